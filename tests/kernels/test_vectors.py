"""What compiled ops compute with (kernels/vectors.py), number by number."""

import math

import pytest
import torch

from kernels import jit, vectors
from kernels.cpu import words
from kernels.jit import BF16, FP32

NAN = float("nan")
SMALLEST = 2.0**-126
"""What exp gives at least."""


def _exp(given):
    for i in range(0, given[2] * 4, 64):
        vectors.store(vectors.exp(vectors.load(given[0] + i, FP32)), given[1] + i, FP32)


def _exp_number(given):
    x, out = jit.fp32s(given[0], given[2]), jit.fp32s(given[1], given[2])
    for i in range(given[2]):
        out[i] = vectors.exp_number(x[i])


def _store_bf16(given):
    for i in range(0, given[2], 16):
        vectors.store(vectors.load(given[0] + i * 4, FP32), given[1] + i * 2, BF16)


def _convert(given):
    vectors.convert(given[0], FP32, given[1], BF16, given[2])


def _widen(given):
    vectors.convert(given[0], BF16, given[1], FP32, given[2])


def computed(function, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full_like(x, NAN, dtype=dtype)
    jit.op(function)(words(x.data_ptr(), out.data_ptr(), x.numel()), alone=True)
    return out


@pytest.mark.parametrize("function", [_exp, _exp_number])
def test_exp_is_as_close_as_it_says(function):
    x = torch.linspace(-90, 0, 1 << 20)
    found, exact = computed(function, x).double(), x.double().exp()
    normal = exact > SMALLEST
    error = (found - exact).abs() / exact
    assert (error <= 1e-7 * (1 - x.double()))[normal].all()
    assert (found[~normal] == SMALLEST).all()


@pytest.mark.parametrize("function", [_exp, _exp_number])
def test_exp_of_numbers_apart(function):
    special = [0.0, -0.0, -1e-45, -1e-30, -88.0, -104.0, -1e4, -3e38, -math.inf, NAN, -NAN, NAN]
    x = torch.tensor([*special, -1.0, -1.0, -1.0, -1.0])
    found = computed(function, x)
    assert found[:4].tolist() == [1, 1, 1, 1]
    assert (found[4:9] == SMALLEST).all()
    assert found[9:12].isnan().all()
    torch.testing.assert_close(found[12:], x[12:].exp(), rtol=2e-7, atol=0)


@pytest.mark.parametrize("function", [_store_bf16, _convert])
def test_bf16_is_rounded_as_torch_rounds_it(function):
    """Every number of bf16, with all that can follow it in fp32: nothing, the least, near a tie, a tie, all."""
    upper = torch.arange(1 << 16).unsqueeze(1) << 16
    x = (upper | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).to(torch.int32).view(torch.float32).flatten()
    found, expected = computed(function, x, torch.bfloat16), x.bfloat16()
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found.view(torch.int16)[~x.isnan()], expected.view(torch.int16)[~x.isnan()])


def test_bf16_is_widened_to_the_bit():
    x = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(computed(_widen, x, torch.float32).view(torch.int32), x.view(torch.int16).int() << 16)
