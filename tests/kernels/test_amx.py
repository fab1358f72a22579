"""What holds of products on the matrix unit alone, and where the unit cannot be used."""

import ctypes
from unittest.mock import Mock

import pytest
import torch

from kernels import amx, jit, tiled_linear
from kernels.cpu import words
from tests.kernels.products import numbers, product, tile


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


@pytest.fixture
def _tried_anew():
    amx.works.cache_clear()
    yield
    amx.works.cache_clear()


@pytest.mark.parametrize("kind", ["plain", "fp32", "silu"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_threads(kind, threads):
    weight = tile(numbers(64, 288))
    x = torch.randn(600, 288) if kind == "fp32" else numbers(600, 288)
    together = product(kind, x, weight)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for first, end in [(0, 1), (599, 600), (3, 5), (7, 23), (7, 24), (100, 131), (100, 133), (0, 599)]:
        assert torch.equal(product(kind, x[first:end].clone(), weight), together[first:end])
    torch.set_num_threads(before)


def test_tiles_of_few_rows_read_and_write_no_others():
    def add_up(given):
        amx.begin(given[4])
        amx.zero(0)
        amx.load(4, given[1], 64)
        amx.load(6, given[2], 64)
        amx.dot(0, 4, 6)
        amx.store(0, given[3], 64)
        amx.end()

    op = jit.op(add_up)
    left, right, out = numbers(16, 32), numbers(32, 16), torch.full((16, 16), 7.0)
    pairs = right.view(16, 2, 16).transpose(1, 2).contiguous()
    left[3:] = float("nan")
    op(words(0, left.data_ptr(), pairs.data_ptr(), out.data_ptr(), 3), alone=True)
    torch.testing.assert_close(out[:3], left[:3].float() @ right.float(), rtol=1e-5, atol=1e-4)
    assert (out[3:] == 7.0).all()


@pytest.mark.usefixtures("_tried_anew")
@pytest.mark.parametrize("feature", ["amx-tile", "amx-bf16"])
def test_a_cpu_without_the_unit_is_served_by_torch(monkeypatch, feature):
    having = {"amx-tile": True, "amx-bf16": True, feature: False}
    monkeypatch.setattr(amx.binding, "get_host_cpu_features", lambda: having)
    assert not amx.works()
    assert not tiled_linear.serves(numbers(32, 32))


@pytest.mark.usefixtures("_tried_anew")
def test_a_system_that_keeps_no_room_for_tiles_is_served_by_torch(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Mock(syscall=Mock(return_value=-1)))
    assert not amx.works()


@pytest.mark.usefixtures("_tried_anew")
def test_a_unit_that_computes_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(amx, "_multiply", lambda _: None)
    assert not amx.works()
