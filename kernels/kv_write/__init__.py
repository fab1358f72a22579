"""New keys and values into their places in the paged pool: check and dispatch. The specification is reference.py."""

from torch import Tensor

from kernels.checks import require_same_dtype, require_shape, require_tiles, require_unit_stride
from kernels.kv_write import reference


def kv_write(k: Tensor, v: Tensor, slots: Tensor, kv: Tensor) -> None:
    """kv[slot // block tokens, head, slot % block tokens] = k | v.

    k, v [tokens, kv heads, head dim]; slots [tokens] int64, all different and inside the pool (the caller's duty);
    kv [blocks, kv heads, block tokens, k | v]: one layer of the pool.
    """
    require_tiles(kv)
    require_shape("k", k, (slots.shape[0], kv.shape[1], kv.shape[3] // 2))
    require_shape("v", v, tuple(k.shape))
    require_same_dtype("k", k, kv)
    require_same_dtype("v", v, kv)
    require_unit_stride("k", k)
    require_unit_stride("v", v)
    reference.kv_write(k, v, slots, kv)
