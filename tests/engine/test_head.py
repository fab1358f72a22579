"""Logits from bf16 weights: close tokens are told apart, and nothing else changes."""

import pytest
import torch

from kvoy.engine.head import fp32_logits


@pytest.fixture
def weight() -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randn(500, 64).bfloat16()


def product(weight: torch.Tensor):
    return lambda x: x @ weight.t()


def test_fp32_weights_are_multiplied_and_that_is_all(weight):
    wide, normed = weight.float(), torch.randn(3, 64)
    assert torch.equal(fp32_logits(normed, product(wide), wide), normed @ wide.t())


@pytest.mark.parametrize("rows", [1, 5])
def test_of_two_tokens_that_bf16_cannot_tell_apart_the_better_wins(weight, rows):
    normed = torch.randn(rows, 64)
    normed[0, 5] = 1.0
    weight[400] = normed[0].bfloat16()  # far the best of row 0 ...
    weight[33] = weight[400]
    weight[33, 5] = 0.98  # ... but for this, a little worse
    rough = product(weight)(normed.bfloat16())
    assert rough[0].argmax() == 33, "bf16 itself takes the lower of two equal ones"
    logits = fp32_logits(normed, product(weight), weight)
    exact = normed.double() @ weight.double().t()
    assert logits[0].argmax() == 400
    best = exact.argmax(-1, keepdim=True)
    torch.testing.assert_close(logits.gather(1, best).double(), exact.gather(1, best), rtol=1e-5, atol=1e-5)


def test_far_tokens_keep_the_rounded_product(weight):
    normed = torch.randn(4, 64)
    rough, logits = product(weight)(normed.bfloat16()).float(), fp32_logits(normed, product(weight), weight)
    changed = logits != rough
    assert changed.sum() < 40
    assert (rough[changed] > 0).all()


def test_where_nothing_stands_out_nothing_is_computed_again(weight):
    normed = torch.randn(2, 64)
    flat = torch.ones_like(weight)
    assert torch.equal(fp32_logits(normed, product(flat), flat), product(flat)(normed.bfloat16()).float())
