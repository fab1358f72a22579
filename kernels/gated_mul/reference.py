"""Plain torch twin of the gated products: the specification, and what the CPU runs."""

import torch
from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    gate, up = gate_up.chunk(2, -1)
    torch.mul(functional.silu(gate), up, out=out)


def gelu_tanh_mul(gate_up: Tensor, out: Tensor) -> None:
    gate, up = gate_up.chunk(2, -1)
    torch.mul(functional.gelu(gate, approximate="tanh"), up, out=out)
