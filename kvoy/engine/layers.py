"""The parts a decoder is made of that are not kernels of ours: linear layers made ready once, and rotary embedding.

Knows tensors, not models: shapes come with the arguments.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvoy.engine.spec import RopeSpec

_PACK_BATCH_HINT = 8
"""The batch size oneDNN is told when it reorders weights; the layout for 8 serves all sizes from 1 to 512 best."""


class Linear:
    """``x @ weight.T + bias`` for x [rows, in]. Packed: in oneDNN's own order, up to twice as fast for few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool) -> None:
        self._packed = packed
        self._weight = _pack(weight) if packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            return _packed_linear(x, self._weight, self._bias)
        return functional.linear(x, self._weight, self._bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch on this CPU packs weights and then computes the same, tried on a small example.

    The operators are private to torch: another release may lack or change them, and then F.linear serves.
    """
    numbers = torch.Generator().manual_seed(1)
    weight = torch.randn((96, 64), generator=numbers).to(dtype)
    bias = torch.randn((96,), generator=numbers).to(dtype)
    try:
        packed = _pack(weight)
        return all(
            _agree(torch.randn((rows, 64), generator=numbers).to(dtype), weight, packed, bias) for rows in (1, 5, 40)
        )
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False


def _agree(x: Tensor, weight: Tensor, packed: Tensor, bias: Tensor) -> bool:
    expected = functional.linear(x, weight, bias).float()
    step = 1e-5 if x.dtype == torch.float32 else 2e-2
    return torch.allclose(_packed_linear(x, packed, bias).float(), expected, rtol=step, atol=step * 10)


def _pack(weight: Tensor) -> Tensor:
    reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 (no public one exists; can_pack tries it first)
    packed: Tensor = reorder(weight.contiguous(), _PACK_BATCH_HINT)
    return packed


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 (as above)
    out: Tensor = linear(x, packed, bias, "none", [], "")
    return out


def rope_angles(rope: RopeSpec, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [tokens, 1, head_dim / 2] of each position [tokens], in fp32."""
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=positions.device)
    angles = (positions.float().unsqueeze(1) * inv_freq).unsqueeze(1)
    return angles.cos() * rope.magnitude, angles.sin() * rope.magnitude


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> None:
    """Rotary embedding of x [tokens, heads, head_dim] in place, in fp32 whatever its dtype.

    Half-split order: the halves (a, b) of a head become (a cos - b sin, b cos + a sin).
    """
    cos, sin = angles
    first, second = x.chunk(2, -1)
    rotated = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(rotated)
