"""Int8 with fp16 scales, in torch: how a line of numbers becomes codes and a scale. Knows no memory layout.

scale = amax / 127 in fp16, at most its largest finite number; code = x / scale, rounded half to even, within 127, and 0
where the scale is 0. A NaN makes the scale of its line NaN, so the whole line comes back as NaN.
kernels/triton_int8.py does the same inside Triton kernels, to the bit.
"""

import torch
from torch import Tensor

_LARGEST_CODE = 127
_LARGEST_SCALE = torch.finfo(torch.float16).max


def quantise(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Codes int8 of x, and fp16 scales of x's shape with size 1 along ``dim``."""
    wide = x.float()
    largest = torch.linalg.vector_norm(wide, float("inf"), dim, keepdim=True)
    scale = largest.div_(_LARGEST_CODE).clamp_(max=_LARGEST_SCALE).half()
    divisor = scale.float().masked_fill_(scale == 0, float("inf"))
    codes = wide.div(divisor).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE).nan_to_num_(0)
    return codes.to(torch.int8), scale
