"""New keys and values into their places in the paged pool: check and dispatch. The specification is reference.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kernels import cpu
from kernels.checks import require_shape, require_unit_stride
from kernels.kv_write import reference
from kernels.paged import PagedLayer
from kvoy.core.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Angles:
    """Of RoPE, per token."""

    cos: Tensor  # [tokens, head dim / 2] fp32
    sin: Tensor


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMS norm of each head of q and of k, before RoPE."""

    q_weight: Tensor  # [head dim]
    k_weight: Tensor  # [head dim]
    eps: float


_Run = Callable[[Tensor, Angles, PagedLayer, QkNorm | None], None]


class KvWrite:
    """RoPE of q and k, and k | v into the pool, for the tokens of one step, in any layer.

    slots [tokens] int64: token t goes to place slots[t] % block tokens of block slots[t] // block tokens. All different
    and inside the pool (the caller's duty); a negative one is padding, whose k and v are not written.
    """

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots
        self._run: _Run | None = None

    def __call__(self, qkv: Tensor, angles: Angles, kv: PagedLayer, norms: QkNorm | None = None) -> None:
        """Norm (if any) and rotate q and k in place in qkv [tokens, heads + 2 * kv heads, head dim], which lie in the
        order q, k, v; write k and v. The rotation is in fp32 and half-split: the halves (a, b) of a head become
        (a cos - b sin, b cos + a sin). Every call gives a layer of the same pool, of any format.
        """
        if self._run is None:
            self._check(qkv, angles, kv)
            self._run = self._bind(qkv, angles, kv, norms)
        self._run(qkv, angles, kv, norms)

    def _bind(self, qkv: Tensor, angles: Angles, kv: PagedLayer, norms: QkNorm | None) -> _Run:
        if not qkv.is_cuda:
            return self._bind_on_cpu(qkv, angles, kv, norms)
        from kernels.kv_write import kernel  # noqa: PLC0415 (triton: only where there is a GPU)

        return partial(kernel.run, self.slots)

    def _bind_on_cpu(self, qkv: Tensor, angles: Angles, kv: PagedLayer, norms: QkNorm | None) -> _Run:
        if cpu.compiles():
            from kernels.kv_write import compiled  # noqa: PLC0415 (numba: only where it is installed)

            if compiled.serves(qkv, angles, kv, norms):
                return partial(compiled.run, self.slots.contiguous())
        return partial(reference.run, reference.plan(self.slots, kv))

    def _check(self, qkv: Tensor, angles: Angles, kv: PagedLayer) -> None:
        tokens, half = self.slots.shape[0], kv.head_dim // 2
        if qkv.dim() != 3 or qkv.shape[1] <= 2 * kv.kv_heads:
            raise InvariantError(f"qkv {tuple(qkv.shape)} does not hold q, k and v of {kv.kv_heads} kv heads")
        require_shape("qkv", qkv, (tokens, qkv.shape[1], kv.head_dim))
        require_shape("cos", angles.cos, (tokens, half))
        require_shape("sin", angles.sin, (tokens, half))
        require_unit_stride("qkv", qkv)
