"""Int8 with fp16 scales inside Triton kernels: the twin of kernels/int8.py, to the bit. Knows no memory layout."""

import triton
import triton.language as tl


@triton.jit
def round_half_even(x):
    """Of fp32 |x| < 2**22: adding 1.5 * 2**23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def quantise(x, AXIS: tl.constexpr):
    """Codes of fp32 x, and the fp16 scale of each line along AXIS. A NaN makes the scale of its line NaN and its
    codes 0."""
    scale = tl.minimum(tl.div_rn(tl.max(tl.abs(x), AXIS), 127.0), 65504.0)
    has_nan = tl.max((x != x).to(tl.int32), AXIS) > 0
    scale = tl.where(has_nan, float("nan"), scale).to(tl.float16)
    divisor = tl.expand_dims(scale.to(tl.float32), AXIS)
    quotient = tl.div_rn(x, tl.where(divisor > 0, divisor, 1.0) + tl.zeros_like(x))
    rounded = round_half_even(tl.minimum(tl.maximum(quotient, -127.0), 127.0))
    return tl.where(divisor > 0, rounded, 0.0).to(tl.int8), scale
