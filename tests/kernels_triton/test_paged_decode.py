"""The decode kernel against float64 attention, and the laws a row's bits obey."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_decode import kernel
from tests.kernels.oracle import INT8
from tests.kernels_triton.fence import Fence
from tests.kernels_triton.paged_requests import FP16, FP32, SCALE, Requests, Shape, tolerance

SMALL = kernel.Tiles(split_tokens=32, keys=16, warps=4, stages=1)
FORMATS = [FP32, FP16, INT8]


def decode(requests, q, window_tokens=None, rows=slice(None), tiles=SMALL, max_kv_tokens=None):
    lengths = requests.kv_lengths[rows]
    out = requests.fence.poisoned(*q[rows].shape, dtype=q.dtype)
    longest = max(int(lengths.max()), 1) if max_kv_tokens is None else max_kv_tokens
    plan = kernel.plan(
        requests.tables[rows], lengths, longest, q, requests.kv, window_tokens=window_tokens, tiles=tiles
    )
    kernel.run(plan, q[rows], requests.kv, SCALE, out)
    assert not out.isnan().any()
    return out


def check(requests, q, window_tokens, out):
    for row in range(len(requests.lengths)):
        expected = requests.expected(row, q[row : row + 1], window_tokens)[0]
        torch.testing.assert_close(out[row].double(), expected, atol=tolerance(q.dtype), rtol=0)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    shape=st.builds(
        Shape, st.integers(1, 2), st.sampled_from([1, 3, 8, 20]), st.sampled_from([16, 40]), st.sampled_from([1, 4, 8])
    ),
    fmt=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    order=st.permutations("BLH").map(lambda axes: "".join(axes) + "NC"),
    window_tokens=st.sampled_from([None, 1, 7, 31, 33, 64]),
    split_tokens=st.sampled_from([16, 32, 64]),
)
def test_any_batch_equals_float64_attention(seed, lengths, shape, fmt, dtype, order, window_tokens, split_tokens):
    torch.manual_seed(seed)
    fence = Fence()
    requests = Requests(fence, lengths, shape, fmt, order)
    q = requests.queries(len(lengths), dtype)
    check(requests, q, window_tokens, decode(requests, q, window_tokens, tiles=kernel.Tiles(split_tokens, 16, 4, 1)))
    fence.check()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_tiles_and_head_dims_of_service(fence, fmt, head_dim):
    dtype = torch.float16 if fmt == INT8 else fmt.dtype
    requests = Requests(fence, [300, 17], Shape(1, 4, head_dim, 16), fmt)
    q = requests.queries(2, dtype)
    check(requests, q, None, decode(requests, q, tiles=None))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("window_tokens", [None, 20])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(fence, fmt, window_tokens):
    requests = Requests(fence, [90, 3, 33, 64, 17], Shape(), fmt)
    q = requests.queries(5, torch.float32)
    together = decode(requests, q, window_tokens)
    for row in range(5):
        assert torch.equal(decode(requests, q, window_tokens, slice(row, row + 1))[0], together[row])
        bucket = decode(requests, q, window_tokens, slice(row, row + 1), max_kv_tokens=500)
        assert torch.equal(bucket[0], together[row])


def test_shuffled_blocks_in_any_order_have_the_bits_of_contiguous_ones(fence):
    outs = []
    for order, shuffled in (("BLHNC", False), ("BLHNC", True), ("BHLNC", True), ("LBHNC", True)):
        torch.manual_seed(3)
        requests = Requests(fence, [70, 5], Shape(), FP32, order, shuffled=shuffled)
        torch.manual_seed(4)
        q, dense = requests.queries(2, torch.float32), torch.randn(75, 2, 32)
        for row, tokens in enumerate(dense.split([70, 5])):
            for position, token in enumerate(tokens):
                block = int(requests.tables[row, position // 4])
                requests.kv.values[block, :, position % 4] = token
        outs.append(decode(requests, q))
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("max_kv_tokens", [20, 200])
@pytest.mark.parametrize("window_tokens", [None, 8])
def test_padding_rows_become_zeros(fence, window_tokens, max_kv_tokens):
    requests = Requests(fence, [20, 9, 4], Shape(), FP32)
    requests.kv_lengths[1] = 0
    q = requests.queries(3, torch.float32)
    out = decode(requests, q, window_tokens, max_kv_tokens=max_kv_tokens)
    assert (out[1] == 0).all()
    for row in (0, 2):
        expected = requests.expected(row, q[row : row + 1], window_tokens)[0]
        torch.testing.assert_close(out[row].double(), expected, atol=2e-5, rtol=0)


def test_queries_and_outputs_may_be_slices(fence):
    requests = Requests(fence, [40, 9], Shape(), FP32)
    qkv = fence.around(torch.randn(2, 10, 16))
    out = fence.poisoned(2, 8, 16, dtype=torch.float32)
    plan = kernel.plan(
        requests.tables, requests.kv_lengths, 40, qkv[:, :6], requests.kv, window_tokens=None, tiles=SMALL
    )
    kernel.run(plan, qkv[:, :6], requests.kv, SCALE, out[:, 2:])
    check(requests, qkv[:, :6], None, out[:, 2:])
    assert out[:, :2].isnan().all()


def test_one_plan_serves_every_layer(fence):
    requests = Requests(fence, [90, 50], Shape(), FP32)
    requests.pool.values[:, 0] = requests.kv.values
    q = requests.queries(2, torch.float32)
    plan = kernel.plan(requests.tables, requests.kv_lengths, 90, q, requests.kv, window_tokens=None, tiles=SMALL)
    outs = [fence.poisoned(*q.shape, dtype=q.dtype) for _ in range(2)]
    for layer, out in enumerate(outs):
        kernel.run(plan, q, requests.pool.layer(layer), SCALE, out)
    assert torch.equal(*outs)
