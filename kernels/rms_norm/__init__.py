"""RMS norm over the last axis: check and dispatch. The specification is reference.py."""

from torch import Tensor

from kernels.checks import require_same_dtype, require_shape, require_unit_stride
from kernels.rms_norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write x / sqrt(mean(x^2) + eps) * weight to ``out``: computed in fp32, rounded once.

    x, out [..., dim] of any strides with a contiguous last axis; ``out`` may be ``x``. weight [dim].
    """
    require_shape("weight", weight, (x.shape[-1],))
    require_shape("out", out, tuple(x.shape))
    require_same_dtype("weight", weight, x)
    require_same_dtype("out", out, x)
    require_unit_stride("x", x)
    require_unit_stride("out", out)
    reference.rms_norm(x, weight, eps, out)
