"""Plain torch twin of rms_norm and add_rms_norm: the specification, and what the CPU runs.

x / sqrt(mean(x^2) + eps) = x / hypot(|x|, sqrt(dim * eps)) * sqrt(dim): three operators fewer, which is what a step of
one token spends its time on. Conversions are operators of their own: in mixed arithmetic torch does not vectorise.
"""

import functools
import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    wide, dim = x.float(), x.shape[-1]
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(_constant(math.sqrt(dim * eps)))
    length.mul_(1 / math.sqrt(dim))
    out.copy_(torch.div(wide, length).mul_(weight.float()))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    residual.add_(x.to(residual.dtype))
    rms_norm(residual, weight, eps, out)


@functools.lru_cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value)
