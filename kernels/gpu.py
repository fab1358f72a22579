"""What the launch functions ask about the device that their tensors are on. Knows no kernel; needs no triton."""

import functools

import torch
from torch import Tensor


def next_power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()


def capability(tensor: Tensor) -> int:
    """80 for an A100, 90 for an H100; 0 when a kernel runs in Triton's interpreter, which is on the CPU."""
    return _capability(tensor.get_device()) if tensor.is_cuda else 0


@functools.cache
def _capability(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
