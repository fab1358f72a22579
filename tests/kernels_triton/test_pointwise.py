"""The norm and gate kernels against float64."""

import pytest
import torch
from torch.nn import functional

from kernels.gated_mul import kernel as gated_mul
from kernels.rms_norm import kernel as rms_norm

DTYPES = [torch.float32, torch.float16]


def norm_in_float64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def step(dtype: torch.dtype) -> float:
    return 4e-6 if dtype == torch.float32 else 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 96, 576, 1030, 4096])
def test_rms_norm_equals_float64(fence, dtype, dim):
    x, weight = fence.around((torch.randn(3, dim) * 30).to(dtype)), fence.around(torch.randn(dim))
    out = fence.poisoned(3, dim, dtype=dtype)
    rms_norm.rms_norm(x, weight, 1e-5, out)
    torch.testing.assert_close(out.double(), norm_in_float64(x, weight, 1e-5), rtol=step(dtype), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_in_place_leaves_the_other_heads_alone(fence, dtype):
    qkv, weight = fence.around(torch.randn(5, 7, 16).to(dtype)), fence.around(torch.randn(16))
    before = qkv.clone()
    rms_norm.rms_norm(qkv[:, 2:4], weight, 1e-6, qkv[:, 2:4])
    before[:, 2:4] = norm_in_float64(before[:, 2:4], weight, 1e-6).to(dtype)
    torch.testing.assert_close(qkv, before, rtol=step(dtype), atol=1e-6)


def test_rms_norm_of_a_row_alone_has_the_bits_it_has_in_a_batch(fence):
    x, weight = fence.around(torch.randn(6, 100)), fence.around(torch.randn(100))
    together, alone = (fence.poisoned(rows, 100, dtype=torch.float32) for rows in (6, 1))
    rms_norm.rms_norm(x, weight, 1e-5, together)
    for row in range(6):
        rms_norm.rms_norm(x[row : row + 1], weight, 1e-5, alone)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("residual_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_in_the_residuals_dtype_and_norms_the_sum(fence, dtype, residual_dtype):
    x, residual = fence.around(torch.randn(5, 96).to(dtype)), fence.around((torch.randn(5, 96) * 50).to(residual_dtype))
    weight, out = fence.around(torch.randn(96)), fence.poisoned(5, 96, dtype=dtype)
    total = residual + x.to(residual_dtype)
    rms_norm.add_rms_norm(x, residual, weight, 1e-5, out)
    assert torch.equal(residual, total)
    torch.testing.assert_close(out.double(), norm_in_float64(total, weight, 1e-5), rtol=step(dtype), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("ffn", [1, 40, 1024, 1500])
def test_gated_products_equal_float64(fence, dtype, name, ffn):
    gate_up, out = fence.around((torch.randn(3, 2 * ffn) * 3).to(dtype)), fence.poisoned(3, ffn, dtype=dtype)
    getattr(gated_mul, name)(gate_up, out)
    gate, up = gate_up.double().chunk(2, -1)
    activated = functional.silu(gate) if name == "silu_mul" else functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(out.double(), activated * up, rtol=2 * step(dtype), atol=1e-6)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_gates_far_from_zero_are_open_or_shut(fence, name):
    gate_up = fence.around(torch.tensor([[-1e4, -120.0, 0.0, 120.0, 1e4, 2.0, 2.0, 2.0, 2.0, 2.0]]))
    out = fence.poisoned(1, 5, dtype=torch.float32)
    getattr(gated_mul, name)(gate_up, out)
    assert out.tolist() == [[0, 0, 0, 240, 2e4]]


def test_no_rows_are_no_launch(fence):
    empty = torch.empty(0, 16)
    rms_norm.rms_norm(empty, torch.ones(16), 1e-5, empty)
    rms_norm.add_rms_norm(empty, empty, torch.ones(16), 1e-5, empty)
    gated_mul.silu_mul(empty, torch.empty(0, 8))
