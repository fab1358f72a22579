"""Plain torch twin of KvWrite: the specification, and what the CPU runs."""

import torch
from torch import Tensor

from kernels.tiles import flat, token_rows


def plan(slots: Tensor, kv: Tensor) -> Tensor:
    """Where the tokens go, the same in every layer."""
    return token_rows(kv, slots)


def run(k: Tensor, v: Tensor, rows: Tensor, kv: Tensor) -> None:
    width = kv.shape[3]
    flat(kv, width).index_copy_(0, rows, torch.cat((k, v), -1).view(-1, width))
