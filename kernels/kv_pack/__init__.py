"""Pool blocks to and from contiguous wire bytes: check and dispatch. The specification is reference.py."""

from torch import Tensor

from kernels.checks import require_same_dtype, require_shape
from kernels.kv_pack import reference
from kvoy.core.errors import InvariantError


def _check(pool: Tensor, blocks: Tensor, first_layer: int, wire: Tensor) -> None:
    layers = wire.shape[1]
    require_shape("wire", wire, (blocks.shape[0], layers, *pool.shape[2:]))
    require_same_dtype("wire", wire, pool)
    if not wire.is_contiguous():
        raise InvariantError("the wire side of a block copy is not contiguous")
    if first_layer < 0 or first_layer + layers > pool.shape[1]:
        raise InvariantError(f"layers [{first_layer}, {first_layer + layers}) are not in a pool of {pool.shape[1]}")


def kv_pack(pool: Tensor, blocks: Tensor, first_layer: int, valid_tokens: int, wire: Tensor) -> None:
    """wire[i, l] = pool[blocks[i], first_layer + l], bit for bit; token positions >= valid_tokens, counted over the
    listed blocks, become zeros.

    pool [blocks, layers, kv heads, block tokens, k | v] of any strides; blocks [n] int64, inside the pool (the caller's
    duty); wire [n, l, kv heads, block tokens, k | v], contiguous.
    """
    _check(pool, blocks, first_layer, wire)
    reference.kv_pack(pool, blocks, first_layer, valid_tokens, wire)


def kv_unpack(wire: Tensor, blocks: Tensor, first_layer: int, pool: Tensor) -> None:
    """pool[blocks[i], first_layer + l] = wire[i, l], bit for bit: the inverse of kv_pack. ``blocks`` all differ."""
    _check(pool, blocks, first_layer, wire)
    reference.kv_unpack(wire, blocks, first_layer, pool)
