"""Plain torch twin of kv_write: the specification, and what the CPU runs."""

import torch
from torch import Tensor

from kernels.tiles import scatter_tokens


def kv_write(k: Tensor, v: Tensor, slots: Tensor, kv: Tensor) -> None:
    scatter_tokens(kv, slots, torch.cat((k, v), -1))
