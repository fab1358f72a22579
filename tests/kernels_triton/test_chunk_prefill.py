"""The prefill kernel against float64 attention, and the laws a query's bits obey."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.chunk_prefill import kernel
from tests.kernels.oracle import INT8
from tests.kernels_triton.fence import Fence
from tests.kernels_triton.paged_requests import FP16, FP32, SCALE, Requests, Shape, tolerance

SMALL = kernel.Tiles(rows=16, keys=16, warps=4, stages=1)
FORMATS = [FP32, FP16, INT8]


def prefill(requests, q, chunks, window_tokens=None, rows=slice(None), tiles=SMALL, lengths=None):
    starts = requests.fence.around(torch.tensor([0, *chunks], dtype=torch.int32).cumsum(0, dtype=torch.int32))
    lengths = requests.kv_lengths[rows] if lengths is None else requests.fence.around(lengths)
    out = requests.fence.poisoned(*q.shape, dtype=q.dtype)
    plan = kernel.plan(
        requests.tables[rows], starts, lengths, max(chunks), q, requests.kv, window_tokens=window_tokens, tiles=tiles
    )
    kernel.run(plan, q, requests.kv, SCALE, out)
    assert not out.isnan().any()
    return out


def check(requests, q, chunks, window_tokens, out):
    for row, (queries, found) in enumerate(zip(q.split(chunks), out.split(chunks), strict=True)):
        expected = requests.expected(row, queries, window_tokens)
        torch.testing.assert_close(found.double(), expected, atol=tolerance(q.dtype), rtol=0)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=3),
    shape=st.builds(
        Shape, st.integers(1, 2), st.sampled_from([1, 3, 7, 20]), st.sampled_from([16, 40]), st.sampled_from([1, 4, 8])
    ),
    fmt=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    order=st.permutations("BLH").map(lambda axes: "".join(axes) + "NC"),
    window_tokens=st.sampled_from([None, 1, 7, 16, 33]),
    tiles=st.builds(kernel.Tiles, st.sampled_from([16, 32]), st.sampled_from([16, 32]), st.just(4), st.just(1)),
)
def test_any_step_equals_float64_attention(seed, spans, shape, fmt, dtype, order, window_tokens, tiles):
    torch.manual_seed(seed)
    fence = Fence()
    chunks = [chunk for _, chunk in spans]
    requests = Requests(fence, [past + chunk for past, chunk in spans], shape, fmt, order)
    q = requests.queries(sum(chunks), dtype)
    check(requests, q, chunks, window_tokens, prefill(requests, q, chunks, window_tokens, tiles=tiles))
    fence.check()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_tiles_and_head_dims_of_service(fence, fmt, head_dim):
    dtype = torch.float16 if fmt == INT8 else fmt.dtype
    requests = Requests(fence, [170, 17], Shape(1, 4, head_dim, 16), fmt)
    chunks = [50, 17]
    q = requests.queries(67, dtype)
    for capability in (80, 90):
        tiles = kernel.tiles_for(head_dim, dtype, fmt.dtype, capability)
        for window_tokens in (None, 100):
            check(requests, q, chunks, window_tokens, prefill(requests, q, chunks, window_tokens, tiles=tiles))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("window_tokens", [None, 20])
def test_a_request_alone_has_the_bits_it_has_in_a_step_with_others(fence, fmt, window_tokens):
    requests, chunks = Requests(fence, [60, 3, 33], Shape(), fmt), [41, 3, 1]
    q = requests.queries(45, torch.float32)
    together = prefill(requests, q, chunks, window_tokens).split(chunks)
    for row, queries in enumerate(q.split(chunks)):
        alone = prefill(
            requests, requests.fence.around(queries), chunks[row : row + 1], window_tokens, slice(row, row + 1)
        )
        assert torch.equal(alone, together[row])


@pytest.mark.parametrize("window_tokens", [None, 20])
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_have_the_bits_of_the_whole(fence, chunk, window_tokens):
    requests = Requests(fence, [45], Shape(), FP32)
    q = requests.queries(45, torch.float32)
    whole = prefill(requests, q, [45], window_tokens)
    for start in range(0, 45, chunk):
        end = min(start + chunk, 45)
        length = torch.tensor([end], dtype=torch.int32)
        part = prefill(requests, q[start:end], [end - start], window_tokens, lengths=length)
        assert torch.equal(part, whole[start:end])


def test_a_request_without_queries_takes_no_part(fence):
    requests = Requests(fence, [20, 9, 4], Shape(), FP32)
    q = requests.queries(9, torch.float32)
    out = prefill(requests, q, [5, 0, 4])
    torch.testing.assert_close(out[:5].double(), requests.expected(0, q[:5], None), atol=2e-5, rtol=0)
    torch.testing.assert_close(out[5:].double(), requests.expected(2, q[5:], None), atol=2e-5, rtol=0)
