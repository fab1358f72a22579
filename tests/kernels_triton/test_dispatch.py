"""The public ops, told that their tensors are on a GPU, launch the kernels, which do what the torch twins do."""

import sys

import pytest
import torch

from kernels.chunk_prefill import ChunkPrefill
from kernels.gated_mul import gelu_tanh_mul, silu_mul
from kernels.kv_pack import KvPart, kv_pack, kv_unpack
from kernels.kv_write import Angles, KvWrite, QkNorm
from kernels.paged import KvWire
from kernels.paged_decode import PagedDecode
from kernels.rms_norm import add_rms_norm, rms_norm
from tests.kernels.oracle import CHANNEL, INT8, tile_bytes
from tests.kernels_triton.paged_requests import FP32, SCALE, Requests, Shape

OPS = ("chunk_prefill", "gated_mul", "kv_pack", "kv_write", "paged_decode", "rms_norm")


@pytest.fixture
def on_both(monkeypatch):
    """Run a function that returns its outputs on the CPU, then as on a GPU; compare."""

    def compare(op, function, exact=False):
        kernel = sys.modules[f"kernels.{op}.kernel"]
        expected, launches = function(), []
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
            patch.setattr("kernels.gpu.capability", lambda _: 90)
            for name in ("run", "rms_norm", "add_rms_norm", "silu_mul", "gelu_tanh_mul", "kv_pack", "kv_unpack"):
                if hasattr(kernel, name):
                    patch.setattr(kernel, name, counted(getattr(kernel, name), launches))
            found = function()
        assert launches
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5, equal_nan=True)

    return compare


def counted(launch, launches):
    def counting(*args, **kwargs):
        launches.append(launch)
        return launch(*args, **kwargs)

    return counting


@pytest.fixture(autouse=True, scope="module")
def _kernels_are_imported():
    for op in OPS:
        __import__(f"kernels.{op}.kernel")


def test_norms(on_both):
    x, residual, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)

    def norms():
        outs, total = torch.empty(2, 3, 40), residual.clone()
        rms_norm(x, weight, 1e-5, outs[0])
        add_rms_norm(x, total, weight, 1e-5, outs[1])
        return [outs, total]

    on_both("rms_norm", norms)


def test_gates(on_both):
    gate_up = torch.randn(3, 80)

    def gates():
        outs = torch.empty(2, 3, 40)
        silu_mul(gate_up, outs[0])
        gelu_tanh_mul(gate_up, outs[1])
        return [outs]

    on_both("gated_mul", gates)


@pytest.mark.parametrize("fmt", [FP32, INT8], ids=str)
def test_write(on_both, fence, fmt):
    pool = Requests(fence, [20], Shape(), fmt).pool
    before, given, turn = pool.tiles.clone(), torch.randn(5, 10, 16), torch.rand(5, 8)
    norms = QkNorm(torch.rand(16), torch.rand(16), 1e-5)

    def write():
        pool.tiles.copy_(before)
        qkv = given.clone()
        KvWrite(torch.tensor([3, -1, 0, 9, 17]))(qkv, Angles(turn.cos(), turn.sin()), pool.layer(0), norms)
        return [qkv]

    on_both("kv_write", write)


@pytest.mark.parametrize("window_tokens", [None, 7])
@pytest.mark.parametrize("fmt", [FP32, INT8], ids=str)
def test_attention(on_both, fence, fmt, window_tokens):
    requests = Requests(fence, [20, 9], Shape(), fmt)
    q, starts = requests.queries(6, torch.float32), torch.tensor([0, 4, 6], dtype=torch.int32)

    def decode():
        out = torch.empty(2, 6, 16)
        op = PagedDecode(requests.tables, requests.kv_lengths, 20)
        op(q[:2], requests.kv, scale=SCALE, window_tokens=window_tokens, out=out)
        return [out]

    def prefill():
        out = torch.empty(6, 6, 16)
        op = ChunkPrefill(requests.tables, starts, requests.kv_lengths, 4)
        op(q, requests.kv, scale=SCALE, window_tokens=window_tokens, out=out)
        return [out]

    on_both("paged_decode", decode)
    on_both("chunk_prefill", prefill)


@pytest.mark.parametrize("wire_format", [FP32, INT8, CHANNEL], ids=str)
def test_block_copies(on_both, fence, wire_format):
    pool, blocks, part = Requests(fence, [20], Shape(), FP32).pool, torch.tensor([2, 0]), KvPart(1, 1, 0, 2)
    pool.values.copy_(torch.randn(pool.values.shape))
    before = pool.tiles.clone()

    def there_and_back():
        pool.tiles.copy_(before)
        wire = KvWire(torch.zeros((2, 1, 2, wire_format.tile_bytes(4, 16)), dtype=torch.uint8), wire_format)
        kv_pack(pool, blocks, part, 7, wire)
        kv_unpack(wire, torch.tensor([1, 3]), part, pool)
        return [wire.tiles, tile_bytes(pool)]

    on_both("kv_pack", there_and_back, exact=True)
