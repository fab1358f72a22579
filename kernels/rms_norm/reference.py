"""Plain torch twin of rms_norm: the specification, and what the CPU runs."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    torch.mul(wide * scale, weight, out=out)
