"""RMS norm over the last axis: check and dispatch. The specification is reference.py."""

from torch import Tensor

from kernels import cpu
from kernels.checks import require_shape, require_unit_stride
from kernels.rms_norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write x / sqrt(mean(x^2) + eps) * weight to ``out``: computed in fp32, rounded once.

    x, out [rows, dim] or [rows, heads, dim] of any strides with a contiguous last axis; ``out`` may be ``x``. weight
    [dim]. Each may be of another float dtype.
    """
    _check(x, weight, out)
    if x.is_cuda:
        from kernels.rms_norm import kernel  # noqa: PLC0415 (triton: only where there is a GPU)

        kernel.rms_norm(x, weight, eps, out)
    elif not _run_compiled(x, None, weight, eps, out):
        reference.rms_norm(x, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Add x to ``residual``, rounded to its dtype, and write the norm of the sum to ``out``, as rms_norm does. All
    [rows, dim].
    """
    _check(residual, weight, out)
    require_shape("x", x, tuple(residual.shape))
    require_unit_stride("x", x)
    if x.is_cuda:
        from kernels.rms_norm import kernel  # noqa: PLC0415 (triton: only where there is a GPU)

        kernel.add_rms_norm(x, residual, weight, eps, out)
    elif not _run_compiled(x, residual, weight, eps, out):
        reference.add_rms_norm(x, residual, weight, eps, out)


def _run_compiled(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> bool:
    if not cpu.compiles():
        return False
    from kernels.rms_norm import compiled  # noqa: PLC0415 (numba: only where it is installed)

    if serves := compiled.serves(x, weight, out, residual):
        compiled.call(x, residual, weight, eps, out).run()
    return serves


def _check(x: Tensor, weight: Tensor, out: Tensor) -> None:
    require_shape("weight", weight, (x.shape[-1],))
    require_shape("out", out, tuple(x.shape))
    require_unit_stride("x", x)
    require_unit_stride("out", out)
