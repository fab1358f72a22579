"""Linear layers, packed and not, and RoPE's angles."""

import pytest
import torch
from torch.nn import functional

from kvoy.engine import layers
from kvoy.engine.layers import ACTIVATIONS, GatedLinear, Linear, Rope, try_packing
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
    linear = Linear(weight, bias, packed=try_packing(torch.float32))
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, NotImplementedError, TypeError])
def test_a_torch_that_cannot_pack_is_noticed(monkeypatch, error):
    def refuse(weight):
        raise error("no such operator")

    monkeypatch.setattr(layers, "_pack", refuse)
    assert not try_packing(torch.float32)


def test_a_torch_that_packs_wrongly_is_noticed(monkeypatch):
    def other_weights(x, packed, bias):
        return functional.linear(x, torch.ones(96, 64), bias)

    monkeypatch.setattr(layers, "_pack", torch.clone)
    monkeypatch.setattr(layers, "_packed_linear", other_weights)
    assert not try_packing(torch.float32)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_gated_product_equals_float64(name, dtype, packed, rows):
    gate, up, x = (torch.randn(n, 32).to(dtype) / 4 for n in (48, 48, rows))
    out = GatedLinear(gate, up, ACTIVATIONS[name], packed=packed and try_packing(dtype))(x)
    wide = x.double() @ gate.double().t()
    activated = functional.silu(wide) if name == "silu" else functional.gelu(wide, approximate="tanh")
    expected = activated * (x.double() @ up.double().t())
    near = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, rtol=near, atol=near)


@pytest.mark.parametrize("shape", [(24, 16), (576, 1536), (64, 4096)])
def test_a_packed_row_alone_has_the_bits_it_has_in_a_batch(shape):
    linear = Linear(torch.randn(shape), None, packed=try_packing(torch.float32))
    x = torch.randn(130, shape[1])
    together = linear(x)
    for rows in (1, 2, 9, 33):
        assert torch.equal(linear(x[:rows].clone()), together[:rows])


def test_angles_are_those_of_complex_rotation():
    rope = RopeSpec(inv_freq=(1.0, 0.1, 0.003), magnitude=1.25)
    positions = torch.tensor([0, 1, 77, 4000])
    found = Rope(rope, positions.device)(positions)
    angles = positions.double()[:, None] * torch.tensor(rope.inv_freq, dtype=torch.float64)
    turned = torch.polar(torch.full_like(angles, rope.magnitude), angles)
    # fp32 angles of some thousand radians are exact to some 1e-4.
    torch.testing.assert_close(found.cos.double(), turned.real, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.sin.double(), turned.imag, rtol=0, atol=1e-3)
