"""New keys and values into their places in the paged pool: check and dispatch. The specification is reference.py."""

from torch import Tensor

from kernels.checks import require_same_dtype, require_shape, require_tiles, require_unit_stride
from kernels.kv_write import reference


class KvWrite:
    """kv[slot // block tokens, head, slot % block tokens] = k | v, for the tokens of one step, in any layer.

    slots [tokens] int64, all different and inside the pool (the caller's duty).
    """

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots
        self._rows: Tensor | None = None

    def __call__(self, k: Tensor, v: Tensor, kv: Tensor) -> None:
        """Write k, v [tokens, kv heads, head dim] to kv [blocks, kv heads, block tokens, k | v], a layer of the pool;
        every call gives a layer of the same pool."""
        require_tiles(kv)
        require_shape("k", k, (self._slots.shape[0], kv.shape[1], kv.shape[3] // 2))
        require_shape("v", v, tuple(k.shape))
        require_same_dtype("k", k, kv)
        require_same_dtype("v", v, kv)
        require_unit_stride("k", k)
        require_unit_stride("v", v)
        if self._rows is None:
            self._rows = reference.plan(self._slots, kv)
        reference.run(k, v, self._rows, kv)
