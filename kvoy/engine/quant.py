"""Weights of four bits as a GGUF file holds them, for the steps of few rows that a CPU spends on reading weights.

Owns the codes of a file's Q4_0 and Q4_1 tensors, the operator that multiplies by them, and up to how many rows it
serves instead of the bf16 weights beside it. The codes are kept as they are; only the scale and zero of a group are
rounded, to bf16: to quantise anew would change the model. Knows no layers of a model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvoy.core.errors import ConfigError
from kvoy.engine.gguf_file import GgufFile, TensorPlace
from kvoy.engine.layers import Activation, TiledGated, TiledLinear
from kvoy.engine.models import ModelFiles, ModelKind
from kvoy.engine.row_invariance import RowOp
from kvoy.engine.spec import ModelSpec
from kvoy.engine.weights import gguf_weights, half_split_rows

GROUP = 32
"""Numbers of a row that share a scale and an offset."""
FEW_ROWS = 8
"""Up to here a step with four bits is faster than with packed bf16, with more rows slower (docs/decisions/0011)."""
FEW_ROWS_BESIDE_TILES = 2
"""The same where the CPU has a matrix unit for bf16."""
EXTRA_BYTES = 0.625
"""Of memory for each weight: half a byte of code, and a bf16 scale and zero for 32 of them."""
_CENTRE = 8
_INNER_K_TILES = 2
_OUT_MULTIPLE = 16
"""The operator takes weights whose number of rows is a multiple of this."""
_GROUP_BYTES = {2: 18, 3: 20}
"""By GGUF type: Q4_0 (fp16 scale, 32 codes) and Q4_1 (fp16 scale and offset, 32 codes)."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [out, in]: code * scale + offset."""

    codes: Tensor  # [out, in] uint8, 0 to 15
    scale: Tensor  # [out, in / GROUP] fp32
    offset: Tensor  # [out, in / GROUP] fp32

    def dequantised(self) -> Tensor:
        """[out, in] fp32."""
        groups = self.codes.view(*self.scale.shape, GROUP).float()
        return groups.mul_(self.scale.unsqueeze(-1)).add_(self.offset.unsqueeze(-1)).view(self.codes.shape)


def has_codes(place: TensorPlace) -> bool:
    """Whether a tensor is of four bits and of a shape that the operator takes."""
    return place.type_code in _GROUP_BYTES and len(place.shape) == 2 and place.shape[0] % _OUT_MULTIPLE == 0


def read_codes(file: GgufFile, place: TensorPlace) -> Codes:
    """Of a tensor [out, in] that has them."""
    shape = place.shape
    raw = np.frombuffer(file.view(place), np.uint8)
    groups = raw.reshape(shape[0], shape[1] // GROUP, _GROUP_BYTES[place.type_code])
    numbers = groups[..., : -GROUP // 2].copy().view(np.float16).astype(np.float32)  # [out, groups, 1 or 2]
    halves = groups[..., -GROUP // 2 :]
    codes = np.concatenate([halves & 15, halves >> 4], axis=-1).reshape(shape)
    scale = torch.from_numpy(numbers[..., 0].copy())
    offset = torch.from_numpy(numbers[..., 1].copy()) if numbers.shape[-1] == 2 else scale * -_CENTRE
    return Codes(torch.from_numpy(codes), scale, offset)


class Int4Linear:
    """``x @ weight.T + bias`` for x [rows, in] in bf16; the weights of ``parts`` lie one below the other."""

    def __init__(self, parts: Sequence[Codes], bias: Tensor | None = None) -> None:
        codes = torch.cat([part.codes for part in parts]).int()
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu  # noqa: SLF001 (no public one exists; try_int4 tries it)
        self._weight: Tensor = pack(codes, _INNER_K_TILES)
        scale = torch.cat([part.scale for part in parts])
        zero = torch.cat([part.offset for part in parts]).add_(scale, alpha=_CENTRE)
        self._scale_zero = torch.stack([scale.T, zero.T], dim=-1).bfloat16()  # [in / GROUP, out, 2]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default  # noqa: SLF001 (as above)
        out: Tensor = multiply(x, self._weight, GROUP, self._scale_zero)
        return out if self._bias is None else out.add_(self._bias)


class Int4Gated:
    """``act(x @ gate.T) * (x @ up.T)`` for x [rows, in] in bf16."""

    def __init__(self, gate: Codes, up: Codes, activation: Activation) -> None:
        self._gate_up = Int4Linear([gate, up])
        self._gated_mul = activation.gated_mul
        self._ffn = gate.codes.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], self._ffn))
        self._gated_mul(self._gate_up(x), out)
        return out


class ByRows:
    """One operator for few rows, another for many."""

    def __init__(self, few: RowOp, many: RowOp) -> None:
        self._few = few
        self.many = many
        self.few_rows = FEW_ROWS_BESIDE_TILES if isinstance(many, TiledLinear | TiledGated) else FEW_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        return self._few(x) if x.shape[0] <= self.few_rows else self.many(x)


class Int4Weights:
    """The weights of a model that its file holds in four bits. Read one at a time, when they are asked for."""

    def __init__(self, sources: dict[str, Callable[[], Codes]]) -> None:
        self._sources = sources

    @classmethod
    def of(cls, files: ModelFiles, spec: ModelSpec) -> "Int4Weights":
        """ConfigError for a model without any."""
        sources = dict(_sources(GgufFile(files.path), spec)) if files.kind is ModelKind.GGUF else {}
        if not sources:
            raise ConfigError(
                f"dtype int4 keeps the four-bit weights of a GGUF file (Q4_0 or Q4_1), but {files.name} has none; "
                "use dtype bf16"
            )
        return cls(sources)

    def linear(self, many: RowOp, names: Sequence[str], bias: Tensor | None) -> RowOp:
        """``many``, which multiplies by the weights ``names`` in bf16, but few rows in four bits if all have them."""
        if not all(name in self._sources for name in names):
            return many
        return ByRows(Int4Linear([self._sources[name]() for name in names], bias), many)

    def gated(self, many: RowOp, gate: str, up: str, activation: Activation) -> RowOp:
        if not (gate in self._sources and up in self._sources):
            return many
        return ByRows(Int4Gated(self._sources[gate](), self._sources[up](), activation), many)


def _sources(file: GgufFile, spec: ModelSpec) -> Iterator[tuple[str, Callable[[], Codes]]]:
    for name, place, row_heads in gguf_weights(file, spec):
        if has_codes(place):
            yield name, _source(file, place, row_heads)


def _source(file: GgufFile, place: TensorPlace, row_heads: int | None) -> Callable[[], Codes]:
    def read() -> Codes:
        found = read_codes(file, place)
        if row_heads is None:
            return found
        return Codes(*(half_split_rows(part, row_heads) for part in (found.codes, found.scale, found.offset)))

    return read


def try_int4() -> bool:
    """Whether this torch on this CPU multiplies by four-bit weights, and right, tried on a small example: the operators
    are private to torch."""
    numbers = torch.Generator().manual_seed(1)
    shape = (96, 64)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=numbers)
    scale, offset = (torch.randn((shape[0], shape[1] // GROUP), generator=numbers) * 0.01 for _ in range(2))
    weight = Codes(codes, scale.bfloat16().float(), offset)
    x = torch.randn((FEW_ROWS, shape[1]), generator=numbers).bfloat16()
    expected = x.float() @ weight.dequantised().T
    try:
        linear = Int4Linear([weight])
        found = torch.cat([linear(x[:1]), linear(x)[1:]])
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
    return torch.allclose(found.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
