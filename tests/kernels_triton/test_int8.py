"""Quantising inside a kernel gives the codes and scales that it gives in torch, to the bit."""

import math

import pytest
import torch
import triton
import triton.language as tl

from kernels.int8 import quantise
from kernels.triton_int8 import quantise as triton_quantise


@triton.jit
def _quantise(x, codes, scales, LINES: tl.constexpr, WIDTH: tl.constexpr, AXIS: tl.constexpr):
    place = tl.arange(0, LINES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    found, scale = triton_quantise(tl.load(x + place), AXIS)
    tl.store(codes + place, found)
    tl.store(scales + (tl.arange(0, WIDTH) if AXIS == 0 else tl.arange(0, LINES)), scale)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-5, 1.0, 300.0, 1e7])
def test_codes_and_scales_are_those_of_the_twin(fence, axis, size):
    same_bits(fence, torch.randn(8, 16) * size, axis)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("special", [[math.nan], [math.inf], [-math.inf], [math.inf, math.nan], [math.nan, -math.inf]])
def test_what_is_not_finite_is_treated_as_by_the_twin(fence, axis, special):
    x = torch.randn(8, 16)
    x.view(-1)[: len(special)] = torch.tensor(special)
    same_bits(fence, x, axis)


def test_halves_are_rounded_to_even(fence):
    x = torch.arange(-63.5, 64.5, 0.5)[:256].view(16, 16)
    x[:, 0] = 127
    same_bits(fence, x, 1)


def same_bits(fence, x, axis):
    x = fence.around(x)
    codes = fence.around(torch.full(x.shape, 99, dtype=torch.int8))
    scales = fence.poisoned(x.shape[1 - axis], dtype=torch.float16)
    _quantise[(1,)](x, codes, scales, LINES=x.shape[0], WIDTH=x.shape[1], AXIS=axis)
    expected_codes, expected_scales = quantise(x, axis)
    assert torch.equal(codes, expected_codes)
    torch.testing.assert_close(scales, expected_scales.view(-1), rtol=0, atol=0, equal_nan=True)
