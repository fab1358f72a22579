"""rms_norm and the gated products against float64."""

import pytest
import torch
from torch.nn import functional

from kernels.gated_mul import gelu_tanh_mul, silu_mul
from kernels.rms_norm import add_rms_norm, rms_norm
from kvoy.core.errors import InvariantError
from tests.kernels.paged_case import Guarded

pytestmark = pytest.mark.usefixtures("each_way")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


def norm_in_float64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def relative_step(dtype: torch.dtype) -> float:
    return 2e-6 if dtype == torch.float32 else 2**-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 13])
def test_rms_norm_equals_float64(dtype, rows):
    x, weight = torch.randn(rows, 96).to(dtype) * 30, torch.randn(96).to(dtype)
    guarded = Guarded((rows, 96), dtype)
    rms_norm(x, weight, 1e-5, guarded.out)
    expected = norm_in_float64(x, weight, 1e-5)
    torch.testing.assert_close(guarded.check().double(), expected, rtol=relative_step(dtype), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_in_place_leaves_the_other_heads_alone(dtype):
    qkv = torch.randn(5, 7, 16).to(dtype)
    before, weight = qkv.clone(), torch.randn(16).to(dtype)
    rms_norm(qkv[:, 2:4], weight, 1e-6, qkv[:, 2:4])
    expected = norm_in_float64(before[:, 2:4], weight, 1e-6)
    torch.testing.assert_close(qkv[:, 2:4].double(), expected, rtol=relative_step(dtype), atol=1e-6)
    assert torch.equal(qkv[:, :2], before[:, :2])
    assert torch.equal(qkv[:, 4:], before[:, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_a_row_alone_has_the_bits_it_has_in_a_batch(dtype):
    x, weight = torch.randn(9, 96).to(dtype), torch.randn(96).to(dtype)
    together, alone = torch.empty_like(x), torch.empty_like(x[:1])
    rms_norm(x, weight, 1e-5, together)
    for row in range(9):
        rms_norm(x[row : row + 1], weight, 1e-5, alone)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_in_fp32_and_norms_the_sum(dtype):
    x, residual, weight = torch.randn(5, 96).to(dtype), torch.randn(5, 96) * 50, torch.randn(96)
    total = residual + x.float()
    guarded = Guarded((5, 96), dtype)
    add_rms_norm(x, residual, weight, 1e-5, guarded.out)
    assert torch.equal(residual, total)
    expected = norm_in_float64(total, weight, 1e-5)
    torch.testing.assert_close(guarded.check().double(), expected, rtol=relative_step(dtype), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gated_products_equal_float64(dtype, name):
    gate_up = torch.randn(6, 2 * 40).to(dtype) * 3
    guarded = Guarded((6, 40), dtype)
    {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}[name](gate_up, guarded.out)
    gate, up = gate_up.double().chunk(2, -1)
    activated = functional.silu(gate) if name == "silu" else functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(guarded.check().double(), activated * up, rtol=2 * relative_step(dtype), atol=1e-6)


def test_shapes_that_do_not_fit_are_refused_before_anything_is_written():
    x, out = torch.randn(3, 8), torch.full((3, 8), float("nan"))
    for wrong_x, weight in ((x, torch.ones(4)), (x[:2], torch.ones(8)), (torch.randn(8, 3).t(), torch.ones(8))):
        with pytest.raises(InvariantError):
            rms_norm(wrong_x, weight, 1e-5, out)
        with pytest.raises(InvariantError):
            add_rms_norm(wrong_x, x, weight, 1e-5, out[:, :7])
    for gate_up in (torch.randn(3, 15), torch.randn(2, 16), torch.randn(3, 16).bfloat16(), torch.randn(16, 3).t()):
        with pytest.raises(InvariantError):
            silu_mul(gate_up, out)
        with pytest.raises(InvariantError):
            gelu_tanh_mul(gate_up, out)
    assert out.isnan().all()
