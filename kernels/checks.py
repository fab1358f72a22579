"""Shape checks that the ops share. A failed check is a bug of the caller: InvariantError, before anything is written.

Checks look at shapes, dtypes and strides only, never at values: on a GPU reading a value stalls the launch. What the
values must satisfy (block numbers inside the pool, say) is the caller's duty and stated at each op.
"""

from collections.abc import Callable

from torch import Tensor

from kernels.paged import PagedLayer
from kvoy.core.errors import InvariantError

Attend = Callable[[Tensor, PagedLayer, float, Tensor], None]
"""Attention over paged KV with its tables bound: q, layer, scale, out."""


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise InvariantError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def require_same_dtype(name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise InvariantError(f"{name} is {tensor.dtype}, expected {other.dtype}")


def require_unit_stride(name: str, tensor: Tensor) -> None:
    """The last axis is contiguous."""
    if tensor.stride(-1) != 1:
        raise InvariantError(f"the last axis of {name} has stride {tensor.stride(-1)}, expected 1")


def require_paged(q: Tensor, kv: PagedLayer, out: Tensor) -> None:
    """What every attention over paged KV needs of q and out [queries, heads, head dim] and a layer of the pool."""
    if q.dim() != 3 or q.shape[2] != kv.head_dim or q.shape[1] % kv.kv_heads:
        raise InvariantError(f"q {tuple(q.shape)} does not fit {kv.kv_heads} kv heads of {kv.head_dim}")
    require_shape("out", out, tuple(q.shape))
    require_same_dtype("out", out, q)
    require_unit_stride("q", q)
    require_unit_stride("out", out)
