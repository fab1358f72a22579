"""Linear layers, packed and not, and rotary embedding against its definition in complex numbers."""

import pytest
import torch
from torch.nn import functional

from kvoy.engine import layers
from kvoy.engine.layers import Linear, can_pack, rope_angles, rotate
from kvoy.engine.spec import RopeSpec

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_unpacked_is_torch_bit_for_bit(dtype, has_bias):
    weight, x = torch.randn(24, 16).to(dtype), torch.randn(5, 16).to(dtype)
    bias = torch.randn(24).to(dtype) if has_bias else None
    assert torch.equal(Linear(weight, bias, packed=False)(x), functional.linear(x, weight, bias))


@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_where_that_is_possible_equals_float64(rows, has_bias):
    weight, x = torch.randn(96, 64), torch.randn(rows, 64)
    bias = torch.randn(96) if has_bias else None
    linear = Linear(weight, bias, packed=can_pack(torch.float32))
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, NotImplementedError, TypeError])
def test_a_torch_that_cannot_pack_is_noticed(monkeypatch, error):
    def refuse(weight):
        raise error("no such operator")

    monkeypatch.setattr(layers, "_pack", refuse)
    assert not can_pack(torch.float32)


def test_a_torch_that_packs_wrongly_is_noticed(monkeypatch):
    def other_weights(x, packed, bias):
        return functional.linear(x, torch.ones(96, 64), bias)

    monkeypatch.setattr(layers, "_pack", torch.clone)
    monkeypatch.setattr(layers, "_packed_linear", other_weights)
    assert not can_pack(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_equals_complex_multiplication(dtype):
    rope = RopeSpec(inv_freq=(1.0, 0.1, 0.003), magnitude=1.25)
    positions = torch.tensor([0, 1, 77, 4000])
    qkv = torch.randn(4, 5, 6).to(dtype)
    before = qkv.clone()
    rotate(qkv[:, :3], rope_angles(rope, positions))
    pairs = torch.complex(*before[:, :3].double().chunk(2, -1))
    angles = positions.double()[:, None, None] * torch.tensor(rope.inv_freq, dtype=torch.float64)
    turned = pairs * torch.polar(torch.full_like(angles, rope.magnitude), angles)
    expected = torch.cat((turned.real, turned.imag), -1)
    # fp32 angles of some thousand radians are exact to some 1e-4; bf16 values to 2**-8.
    torch.testing.assert_close(qkv[:, :3].double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=2e-3)
    assert torch.equal(qkv[:, 3:], before[:, 3:])
