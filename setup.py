"""Generates kvoy/v1 from proto/ whenever the package is built, installed (also ``-e``) or ``setup.py proto`` is run.

Everything else about the package stands in pyproject.toml. protoc is run with ``-Iproto``, so that the names in what it
writes are right as they are. kvoy/v1 is git-ignored.
"""

import shutil
import sysconfig
from importlib.resources import files
from pathlib import Path
from typing import ClassVar

from grpc_tools import protoc
from setuptools import Command, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGE = "kvoy.v1"


def generate() -> None:
    """Writes kvoy/v1 anew: messages, services, and the types of both."""
    target = ROOT / "kvoy" / "v1"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    sources = sorted(str(path) for path in (ROOT / "proto" / "kvoy" / "v1").glob("*.proto"))
    outputs = [
        f"--{kind}{ROOT}" for kind in ("python_out=", "grpc_python_out=", "mypy_out=quiet:", "mypy_grpc_out=quiet:")
    ]
    plugins = [f"--plugin=protoc-gen-{name}={_tool(f'protoc-gen-{name}')}" for name in ("mypy", "mypy_grpc")]
    includes = [f"-I{ROOT / 'proto'}", f"-I{files('grpc_tools') / '_proto'}"]
    if protoc.main(["protoc", *includes, *plugins, *outputs, *sources]) != 0:
        raise SystemExit("protoc could not read proto/; what is wrong stands above.")
    (target / "__init__.py").write_text('"""Generated from proto/kvoy/v1 by setup.py; not to be edited."""\n')


def _tool(name: str) -> str:
    """A program of this environment, on PATH or not."""
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        raise SystemExit(f"{name} is missing; install mypy-protobuf.")
    return found


class BuildWithProto(build_py):
    """build_py, after proto/ has become a package that it can find."""

    def finalize_options(self) -> None:
        generate()
        if PACKAGE not in self.distribution.packages:
            self.distribution.packages.append(PACKAGE)
        super().finalize_options()


class Proto(Command):
    """``python setup.py proto``: only generate."""

    description = "generate kvoy/v1 from proto/"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        """Nothing to set."""

    def finalize_options(self) -> None:
        """Nothing to set."""

    def run(self) -> None:
        generate()


setup(cmdclass={"build_py": BuildWithProto, "proto": Proto})
