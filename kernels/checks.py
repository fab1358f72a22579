"""Shape checks that the ops share. A failed check is a bug of the caller: InvariantError, before anything is written.

Checks look at shapes, dtypes and strides only, never at values: on a GPU reading a value stalls the launch. What the
values must satisfy (block numbers inside the pool, say) is the caller's duty and stated at each op.
"""

from torch import Tensor

from kvoy.core.errors import InvariantError


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise InvariantError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def require_same_dtype(name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise InvariantError(f"{name} is {tensor.dtype}, expected {other.dtype}")


def require_unit_stride(name: str, tensor: Tensor) -> None:
    """The last axis is contiguous."""
    if tensor.stride(-1) != 1:
        raise InvariantError(f"the last axis of {name} has stride {tensor.stride(-1)}, expected 1")


def require_tiles(kv: Tensor) -> None:
    """``kv`` is one layer of a pool, [blocks, kv heads, block tokens, k | v], made of whole contiguous tiles
    [block tokens, k | v]; the order of blocks, heads and layers around the tiles is free."""
    if kv.dim() != 4:
        raise InvariantError(f"kv has {kv.dim()} axes, expected [blocks, kv heads, block tokens, k | v]")
    _, _, block_tokens, width = kv.shape
    tile = block_tokens * width
    if kv.stride(3) != 1 or kv.stride(2) != width or kv.stride(0) % tile or kv.stride(1) % tile:
        raise InvariantError(f"kv with strides {kv.stride()} is not made of contiguous tiles of {tile} elements")


def require_paged(q: Tensor, kv: Tensor, out: Tensor) -> None:
    """What every attention over paged KV needs of q and out [queries, heads, head dim] and a layer of the pool."""
    require_tiles(kv)
    if q.dim() != 3 or q.shape[2] * 2 != kv.shape[3] or q.shape[1] % kv.shape[1]:
        raise InvariantError(f"q {tuple(q.shape)} does not fit kv {tuple(kv.shape)}")
    require_shape("out", out, tuple(q.shape))
    require_same_dtype("q", q, kv)
    require_same_dtype("out", out, kv)
    require_unit_stride("q", q)
    require_unit_stride("out", out)
