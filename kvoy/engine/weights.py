"""Weights under canonical names, from GGUF or safetensors files, in the dtype asked for (norms always in fp32).

Owns undoing what each format does to the numbers (quantisation, q/k row order, "norm + 1") and the choice between
reading the model's own file and a converted copy in the cache. Names come from gguf_config and hf_config, the copy
from weight_cache. Knows nothing of layers or KV.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from kvoy.core.errors import ModelError
from kvoy.engine import gguf_config, hf_config, weight_cache
from kvoy.engine.gguf_file import GgufFile, TensorPlace
from kvoy.engine.models import ModelFiles, ModelKind
from kvoy.engine.spec import ModelSpec, weight_shapes
from kvoy.engine.weight_cache import Safetensors, Stored, open_safetensors

_ROWS_AT_ONCE = 8192
"""Dequantised in one go: an embedding of 262,144 rows would otherwise take three times its memory."""

Source = Callable[[], torch.Tensor]
"""Reads one weight; its dtype is still the file's (fp32 from GGUF)."""


def load_weights(
    files: ModelFiles, dtype: torch.dtype, progress: Callable[[str], None] | None = None
) -> dict[str, torch.Tensor]:
    """Every weight of kvoy.engine.spec.weight_shapes, in ``dtype``, on the CPU; the caller owns the dict. Norms are in
    fp32: they are few, and every number of the stream between the layers is multiplied by them.

    The tensors are a private mapping of a file: pages are read when they are used. The first load of a model that
    is not in ``dtype`` (fp32 or bf16) already converts it, one weight at a time, into the cache.
    """
    spec = files.spec()
    wanted = {
        name: Stored(shape, torch.float32 if _is_norm(name) else dtype) for name, shape in weight_shapes(spec).items()
    }
    sources = _gguf_sources(files, spec) if files.kind is ModelKind.GGUF else _safetensors_sources(files, spec)
    if files.kind is ModelKind.HUGGING_FACE and (weights := _as_they_are(files, sources, wanted)) is not None:
        return weights
    label = "float32" if dtype is torch.float32 else f"{str(dtype).removeprefix('torch.')}-norms-float32"
    target = files.cache_dir / "weights" / f"{files.fingerprint()}-{label}.safetensors"

    def converted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, stored in wanted.items():
            yield name, _checked(files.path, name, sources[name](), stored.shape).to(stored.dtype)

    return weight_cache.load_or_write(target, wanted, converted, progress or (lambda _: None))


def _is_norm(name: str) -> bool:
    return name.endswith("norm")


def _as_they_are(
    files: ModelFiles, sources: dict[str, Source], wanted: dict[str, Stored]
) -> dict[str, torch.Tensor] | None:
    """The weights straight from the model's own files, when those are in the dtype that is wanted."""
    weights: dict[str, torch.Tensor] = {}
    for name, stored in wanted.items():
        weight = _checked(files.path, name, sources[name](), stored.shape)
        if _is_norm(name):
            weight = weight.float()
        if weight.dtype is not stored.dtype:
            return None
        weights[name] = weight
    return weights


def _checked(origin: Path, name: str, weight: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(weight.shape) != shape:
        raise ModelError(
            f"{origin}: the weight {name} has the shape {tuple(weight.shape)}, but its description asks for {shape}; "
            "the file does not belong to this model"
        )
    return weight


def _complete(sources: dict[str, Source], spec: ModelSpec, origin: Path) -> dict[str, Source]:
    """``sources``, unless a weight is missing or one is there that the spec has no place for."""
    wanted = weight_shapes(spec).keys()
    if missing := sorted(wanted - sources.keys()):
        raise ModelError(f"{origin} lacks {len(missing)} weights, the first is {missing[0]}; fetch the model again")
    if extra := sorted(sources.keys() - wanted):
        raise ModelError(f"{origin} has {len(extra)} weights that its description has no place for: {extra[0]}, …")
    return sources


def _gguf_sources(files: ModelFiles, spec: ModelSpec) -> dict[str, Source]:
    file = GgufFile(files.path)
    sources = {name: _gguf_source(file, place, row_heads) for name, place, row_heads in gguf_weights(file, spec)}
    return _complete(sources, spec, files.path)


def gguf_weights(file: GgufFile, spec: ModelSpec) -> Iterator[tuple[str, TensorPlace, int | None]]:
    """Canonical name and place of each weight in a file, and by how many heads its rows have to be put in half-split
    order; None: not at all."""
    heads = {"q": spec.heads, "k": spec.kv_heads, "q_bias": spec.heads, "k_bias": spec.kv_heads}
    permuted = gguf_config.rows_are_permuted(file)
    for place in file.tensors.values():
        name = gguf_config.canonical_name(place.name)
        if name is not None:
            yield name, place, heads.get(name.rpartition(".")[2]) if permuted else None


def _gguf_source(file: GgufFile, place: TensorPlace, row_heads: int | None) -> Source:
    """Dequantised to fp32; with ``row_heads`` the rows of each head are brought back to half-split order."""
    from gguf import GGMLQuantizationType, dequantize  # noqa: PLC0415 - not needed once the model is in the cache

    def read() -> torch.Tensor:
        kind = GGMLQuantizationType(place.type_code)
        values = np.empty((math.prod(place.shape[:-1]), place.shape[-1]), np.float32)
        rows = np.frombuffer(file.view(place), dtype=np.uint8).reshape(len(values), -1)
        try:
            with np.errstate(all="ignore"):  # of a corrupt file; what is no number shows when the engine warms up
                for first in range(0, len(rows), _ROWS_AT_ONCE):
                    some = slice(first, first + _ROWS_AT_ONCE)
                    values[some] = dequantize(rows[some], kind)
        except NotImplementedError:
            raise ModelError(
                f"{file.path}: {place.name} is of type {kind.name}, which kvoy cannot dequantise"
            ) from None
        weight = torch.from_numpy(values).reshape(place.shape)
        return weight if row_heads is None else half_split_rows(weight, row_heads)

    return read


def half_split_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (x0, y0, x1, y1, …) of each head, as interleaved RoPE wants them, to (x0, x1, … y0, y1, …)."""
    if weight.shape[0] % (2 * heads):
        return weight  # the check against the spec will say what is wrong
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])  # [heads, head_dim / 2, 2, in]
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()


def _safetensors_sources(files: ModelFiles, spec: ModelSpec) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for path in files.weight_paths():
        try:
            shard = open_safetensors(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {path}: {error}; fetch the file again") from error
        for tensor in shard.keys():  # noqa: SIM118 - it is no mapping
            name = hf_config.canonical_name(tensor, spec)
            if name is not None:
                add_one = "norm" in name and hf_config.norms_lack_one(spec.family)
                sources[name] = _safetensors_source(shard, path, tensor, add_one=add_one)
    return _complete(sources, spec, files.path)


def _safetensors_source(shard: Safetensors, path: Path, tensor: str, *, add_one: bool) -> Source:
    def read() -> torch.Tensor:
        weight = shard.get_tensor(tensor)
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise ModelError(f"{path}: {tensor} is {weight.dtype}; kvoy takes fp32, fp16 or bf16 weights")
        return weight.float() + 1 if add_one else weight

    return read
