"""The gate of a feed-forward: check and dispatch. The specification is reference.py."""

from torch import Tensor

from kernels.checks import require_same_dtype, require_shape, require_unit_stride
from kernels.gated_mul import reference


def _check(gate_up: Tensor, out: Tensor) -> None:
    require_shape("gate_up", gate_up, (out.shape[0], 2 * out.shape[1]))
    require_same_dtype("gate_up", gate_up, out)
    require_unit_stride("gate_up", gate_up)
    require_unit_stride("out", out)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Write silu(gate) * up to out [tokens, ffn], for gate_up [tokens, gate | up]."""
    _check(gate_up, out)
    if out.is_cuda:
        from kernels.gated_mul import kernel  # noqa: PLC0415 (triton: only where there is a GPU)

        kernel.silu_mul(gate_up, out)
    else:
        reference.silu_mul(gate_up, out)


def gelu_tanh_mul(gate_up: Tensor, out: Tensor) -> None:
    """Write gelu(gate) * up, gelu in its tanh form, to out [tokens, ffn], for gate_up [tokens, gate | up]."""
    _check(gate_up, out)
    if out.is_cuda:
        from kernels.gated_mul import kernel  # noqa: PLC0415 (triton: only where there is a GPU)

        kernel.gelu_tanh_mul(gate_up, out)
    else:
        reference.gelu_tanh_mul(gate_up, out)
