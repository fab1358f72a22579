"""From what a user calls a model to its files on this machine, its spec and its identity.

Owns the order in which a name is understood: preset, path, hub id. The formats are read by gguf_config and
hf_config, the weights by weights, the text side by tokenizer. Torch-free.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from kvoy.core.errors import ModelError
from kvoy.engine import gguf_config, hf_config, hub, presets
from kvoy.engine.cache import default_cache_dir, remembered_sha256
from kvoy.engine.fields import Fields
from kvoy.engine.gguf_file import GgufFile
from kvoy.engine.spec import ModelSpec

FINGERPRINT_VERSION = 1
"""Grows when the same files come to mean other KV (a formula mended, say)."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelKind(Enum):
    """How the files are laid out."""

    GGUF = "gguf"
    HUGGING_FACE = "hugging face"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine. ``path`` is a GGUF file or a Hugging Face directory; ``name`` is what users call it."""

    name: str
    kind: ModelKind
    path: Path
    cache_dir: Path

    def spec(self) -> ModelSpec:
        """Read anew from the files, some 30 ms; ModelError when kvoy cannot run the model."""
        if self.kind is ModelKind.GGUF:
            spec = gguf_config.spec_of(GgufFile(self.path))
        else:
            spec = hf_config.spec_of(self.path / "config.json")
        if spec.heads % spec.kv_heads or spec.head_dim % 2:
            raise ModelError(
                f"{self.path} describes {spec.heads} heads over {spec.kv_heads} KV heads of {spec.head_dim} numbers, "
                "which does not divide evenly"
            )
        return spec

    def fingerprint(self) -> str:
        """Hex; the same on every machine for the same weights and description. Reads every weight once per machine."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"kvoy model {FINGERPRINT_VERSION}\n{_spec_text(self.spec())}\n".encode())
        for path in self.weight_paths():
            digest.update(f"{remembered_sha256(path, self.cache_dir)}\n".encode())
        return digest.hexdigest()

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation, as the model's files say."""
        if self.kind is ModelKind.GGUF:
            return gguf_config.eos_token_ids(GgufFile(self.path))
        return hf_config.eos_token_ids(self.path)

    def weight_paths(self) -> tuple[Path, ...]:
        """The files that hold the weights, in an order that does not depend on the machine."""
        if self.kind is ModelKind.GGUF:
            return (self.path,)
        index = self.path / "model.safetensors.index.json"
        if not index.exists():
            return (self.path / "model.safetensors",)
        shards = Fields.of_json(index).inner("weight_map").values.values()
        # A name with a separator would reach out of the directory.
        names = sorted({shard for shard in shards if isinstance(shard, str) and "/" not in shard})
        if missing := [name for name in names if not (self.path / name).is_file()]:
            raise ModelError(f"{self.path} lacks {', '.join(missing)}, which {index.name} lists; fetch the model again")
        return tuple(self.path / name for name in names)


def resolve(model: str, cache_dir: Path | None = None, progress: Callable[[str], None] | None = None) -> ModelFiles:
    """The files of ``model``: a preset, a .gguf file, a Hugging Face directory or a hub id; downloads what is not here.

    ``progress`` is told, in a phrase, what takes time. ModelError says what to do when there is no such model.
    """
    cache = default_cache_dir() if cache_dir is None else cache_dir
    tell = progress or (lambda _: None)
    if model in presets.PRESETS:
        return ModelFiles(model, ModelKind.GGUF, presets.fetch(presets.PRESETS[model], cache, tell), cache)
    path = Path(model)
    try:
        path = path.expanduser()
        is_file, is_directory = path.is_file(), bool(model) and path.is_dir()
    except (OSError, RuntimeError):  # too long a name, or the home of nobody
        is_file, is_directory = False, False
    if is_file:
        return _gguf(path, cache)
    if is_directory:
        return _hugging_face(path.resolve().name, path, cache)
    if path.suffix == ".gguf" or model.startswith(("/", "./", "../", "~")):
        raise ModelError(f"there is no file or directory {model:.200}")
    if _HUB_ID.fullmatch(model):
        return _hugging_face(model, hub.fetch(model, tell), cache)
    raise ModelError(
        f"there is no model {model!r:.200}; give a preset ({', '.join(presets.PRESETS)}), a .gguf file, "
        "a Hugging Face directory or a hub id such as org/name"
    )


def _gguf(path: Path, cache_dir: Path) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is not a .gguf file; give one, or the directory of a Hugging Face model")
    return ModelFiles(path.stem, ModelKind.GGUF, path, cache_dir)


def _hugging_face(name: str, directory: Path, cache_dir: Path) -> ModelFiles:
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json, so it is not the directory of a Hugging Face model")
    if not any((directory / file).is_file() for file in ("model.safetensors", "model.safetensors.index.json")):
        raise ModelError(f"{directory} has no model.safetensors; kvoy reads weights in safetensors or GGUF only")
    return ModelFiles(name, ModelKind.HUGGING_FACE, directory, cache_dir)


def _spec_text(spec: ModelSpec) -> str:
    """Canonical text of a spec. Numbers to 6 digits: the last bits of pow and log depend on the machine's libm."""

    def rounded(value: object) -> object:
        match value:
            case float():
                return f"{value:.6g}"
            case dict():
                return {key: rounded(inner) for key, inner in value.items()}
            case list() | tuple():
                return [rounded(inner) for inner in value]
        return value

    return json.dumps(rounded(asdict(spec)), sort_keys=True)
