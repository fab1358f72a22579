"""Products by tiled weights, on the matrix unit and without: against float64, whatever the number of rows."""

import pytest
import torch
from torch.nn import functional

from kernels import tiled_linear
from kernels.tiled_linear import WeightMemory, reference
from kvoy.core.errors import InvariantError
from tests.kernels.paged_case import Guarded
from tests.kernels.products import numbers, product, tile

pytestmark = pytest.mark.usefixtures("each_way")

ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 49, 100, 600]
SHAPES = [(32, 32), (48, 96), (64, 288), (16, 1120)]
FP32, BF16 = torch.float32, torch.bfloat16
ACTIVATED = {"silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_hold_the_weight(shape):
    weight = numbers(*shape)
    assert torch.equal(reference.untile(tile(weight)), weight)


def test_weights_lie_one_after_the_other_and_large_ones_in_memory_of_their_own(monkeypatch):
    monkeypatch.setattr(tiled_linear.memory, "_PIECE_BYTES", 1 << 16)
    memory = WeightMemory()
    weights = [numbers(32, 64), numbers(48, 96), numbers(640, 640), numbers(32, 32)]
    tiled = [tiled_linear.tile(weight, memory) for weight in weights]
    assert tiled[1].tiles.data_ptr() == tiled[0].tiles.data_ptr() + 32 * 64 * 2
    for one, weight in zip(tiled, weights, strict=True):
        assert one.tiles.data_ptr() % 64 == 0
        assert torch.equal(reference.untile(one), weight)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_equals_float64(rows, shape, has_bias):
    weight, x = numbers(*shape), numbers(rows, shape[1])
    bias = torch.randn(shape[0]) if has_bias else None
    guarded = Guarded((rows, shape[0]), BF16)
    tiled_linear.linear(x, tile(weight), bias, guarded.out)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(guarded.check().double(), expected, rtol=2**-8, atol=1e-5 * shape[1])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_exact_to_fp32_or_nearly(rows, shape):
    weight, x = numbers(*shape), torch.randn(rows, shape[1])
    guarded = Guarded((rows, shape[0]), FP32)
    tiled_linear.linear_fp32(x, tile(weight), guarded.out)
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(guarded.check().double(), expected, rtol=0, atol=3e-5 * shape[1] ** 0.5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ACTIVATED)
def test_a_gated_product_equals_float64(rows, name):
    gate, up, x = numbers(48, 96) / 4, numbers(48, 96) / 4, numbers(rows, 96)
    guarded = Guarded((rows, 48), BF16)
    tiled_linear.gated_linear(x, tiled_linear.tile_pair(gate, up, WeightMemory()), name, guarded.out)
    expected = ACTIVATED[name](x.double() @ gate.double().t()) * (x.double() @ up.double().t())
    torch.testing.assert_close(guarded.check().double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("name", ACTIVATED)
def test_the_ends_of_an_activation(name):
    gate = torch.zeros(16, 32)
    gate[:, 0] = torch.tensor(
        [-3e38, -1e20, -200.0, -90.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 90.0, 200.0, 1e20] + [0.5] * 4
    )
    gate[15, 0] = float("nan")
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    ones = torch.zeros(16, 32)
    ones[:, 0] = 1.0
    out = torch.empty(1, 16, dtype=BF16)
    weight = tiled_linear.tile_pair(gate.to(BF16), ones.to(BF16), WeightMemory())
    tiled_linear.gated_linear(x.to(BF16), weight, name, out)
    expected = ACTIVATED[name](gate[:, 0].to(BF16).double())
    torch.testing.assert_close(out[0].double(), expected, rtol=2**-8, atol=1e-6, equal_nan=True)


def test_what_is_no_number_stays_in_its_row():
    weight, x = tile(numbers(64, 288)), numbers(50, 288)
    clean = product("plain", x, weight)
    x[33, 7] = float("nan")
    x[12, 9] = float("inf")
    found = product("plain", x, weight)
    others = [row for row in range(50) if row not in {12, 33}]
    assert torch.equal(found[others], clean[others])
    assert found[33].isnan().all()
    assert not found[12].isfinite().any()


def test_rows_may_lie_apart():
    weight, wide = tile(numbers(64, 96)), numbers(40, 300)
    x, out = wide[:, 64:160], torch.zeros(40, 128, dtype=BF16)
    tiled_linear.linear(x, weight, None, out[:, 32:96])
    assert torch.equal(out[:, 32:96], product("plain", x.clone(), weight))
    assert not out[:, :32].any()
    assert not out[:, 96:].any()


def test_no_rows_are_no_work():
    product("plain", numbers(0, 96), tile(numbers(64, 96)))


def test_others_than_whole_tiles_of_bf16_are_not_served():
    assert not tiled_linear.serves(torch.zeros(32, 32))
    assert not tiled_linear.serves(numbers(24, 32))
    assert not tiled_linear.serves(numbers(32, 48))
    assert not tiled_linear.serves(numbers(32, 32), numbers(32, 40))


def test_wrong_shapes_are_refused():
    weight = tile(numbers(64, 96))
    with pytest.raises(InvariantError, match="x has shape"):
        tiled_linear.linear(numbers(3, 64), weight, None, numbers(3, 64))
    with pytest.raises(InvariantError, match="out has shape"):
        tiled_linear.gated_linear(numbers(3, 96), weight, "silu", numbers(3, 64))
    with pytest.raises(InvariantError, match="a tiled product of"):
        tiled_linear.linear(torch.zeros(3, 96), weight, None, numbers(3, 64))
    with pytest.raises(InvariantError, match="a bias of"):
        tiled_linear.linear(numbers(3, 96), weight, numbers(64), numbers(3, 64))
