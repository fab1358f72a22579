"""ChunkPrefill and PagedDecode against naive float64 attention, on shuffled blocks with NaN all around."""

import pytest
import torch

from kernels.chunk_prefill import ChunkPrefill
from kernels.paged_decode import PagedDecode
from kvoy.core.errors import InvariantError
from tests.kernels.paged_case import BLOCK_TOKENS, HEAD_DIM, HEADS, SCALE, Guarded, PagedCase, tolerance

DTYPES = [torch.float32, torch.bfloat16]
WINDOWS = [None, 1, 5, 16]
ORDERS = ["BLHNC", "BHLNC", "LBHNC"]


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


def decode(case: PagedCase, q: torch.Tensor, window_tokens: int | None, rows: slice = slice(None)) -> torch.Tensor:
    guarded = Guarded(tuple(q[rows].shape), q.dtype)
    op = PagedDecode(case.tables[rows], case.kv_lengths[rows], max(case.lengths))
    op(q[rows], case.kv, scale=SCALE, window_tokens=window_tokens, out=guarded.out)
    return guarded.check()


def prefill(
    case: PagedCase, q: torch.Tensor, chunks: list[int], window_tokens: int | None, lengths: list[int] | None = None
) -> torch.Tensor:
    guarded = Guarded(tuple(q.shape), q.dtype)
    starts = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    kv_lengths = case.kv_lengths if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    op = ChunkPrefill(case.tables, starts, kv_lengths, max(chunks))
    op(q, case.kv, scale=SCALE, window_tokens=window_tokens, out=guarded.out)
    return guarded.check()


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("window_tokens", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_equals_float64_attention(dtype, window_tokens, order):
    case = PagedCase([1, 4, 5, 9, 23, 24, 50], dtype, order)
    q = torch.randn(len(case.lengths), HEADS, HEAD_DIM).to(dtype)
    out = decode(case, q, window_tokens)
    for row in range(len(case.lengths)):
        expected = case.expected(row, q[row : row + 1], window_tokens)[0]
        torch.testing.assert_close(out[row].double(), expected, atol=tolerance(dtype), rtol=0)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window_tokens", [None, 5])
def test_a_decode_row_alone_has_the_bits_it_has_in_a_batch(dtype, window_tokens):
    case = PagedCase([50, 3, 17, 18, 19, 4, 33], dtype)
    q = torch.randn(len(case.lengths), HEADS, HEAD_DIM).to(dtype)
    together = decode(case, q, window_tokens)
    for row in range(len(case.lengths)):
        assert torch.equal(decode(case, q, window_tokens, slice(row, row + 1))[0], together[row])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("window_tokens", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_equals_float64_attention(dtype, window_tokens, order):
    case = PagedCase([1, 6, 31, 20, 9], dtype, order)
    chunks = [1, 6, 7, 20, 1]
    q = torch.randn(sum(chunks), HEADS, HEAD_DIM).to(dtype)
    out = prefill(case, q, chunks, window_tokens)
    first = 0
    for row, chunk in enumerate(chunks):
        expected = case.expected(row, q[first : first + chunk], window_tokens)
        torch.testing.assert_close(out[first : first + chunk].double(), expected, atol=tolerance(dtype), rtol=0)
        first += chunk


@pytest.mark.parametrize("window_tokens", WINDOWS)
@pytest.mark.parametrize("chunk", [1, 3, BLOCK_TOKENS, 10])
def test_chunks_add_up_to_the_whole(chunk, window_tokens):
    length = 30
    case = PagedCase([length], torch.float32)
    q = torch.randn(length, HEADS, HEAD_DIM)
    whole = prefill(case, q, [length], window_tokens)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        part = prefill(case, q[start:end], [end - start], window_tokens, lengths=[end])
        torch.testing.assert_close(part, whole[start:end], atol=1e-6, rtol=0)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("window_tokens", [None, 5])
def test_one_op_serves_every_layer_of_a_step(window_tokens):
    case = PagedCase([5, 30, 12], torch.float32)
    case.pool.values[:, 2] = case.kv.values
    q, starts = torch.randn(3, HEADS, HEAD_DIM), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    decode_op = PagedDecode(case.tables, case.kv_lengths, max(case.lengths))
    prefill_op = ChunkPrefill(case.tables, starts, case.kv_lengths, 1)
    for op in (decode_op, prefill_op):
        outs = [Guarded(tuple(q.shape), q.dtype) for _ in range(3)]
        op(q, case.pool.layer(1), scale=SCALE, window_tokens=window_tokens, out=outs[0].out)
        op(q, case.pool.layer(1), scale=SCALE, window_tokens=1, out=outs[1].out)
        op(q, case.pool.layer(2), scale=SCALE, window_tokens=window_tokens, out=outs[2].out)
        assert torch.equal(outs[0].check(), outs[2].check())
        assert not torch.equal(outs[0].out, outs[1].check())


@pytest.mark.usefixtures("each_way")
def test_shapes_that_do_not_fit_are_refused_before_anything_is_written():
    case = PagedCase([5, 6], torch.float32)
    q, out = torch.randn(2, HEADS, HEAD_DIM), torch.full((2, HEADS, HEAD_DIM), float("nan"))
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    ops = [
        PagedDecode(case.tables, case.kv_lengths, max(case.lengths)),
        ChunkPrefill(case.tables, starts, case.kv_lengths, 1),
    ]
    wrong = [
        (torch.randn(2, HEADS - 1, HEAD_DIM), case.kv),
        (torch.randn(3, HEADS, HEAD_DIM), case.kv),
        (q[..., ::2], case.kv),
    ]
    for op in ops:
        for wrong_q, wrong_kv in wrong:
            with pytest.raises(InvariantError):
                op(wrong_q, wrong_kv, scale=SCALE, window_tokens=None, out=out)
    with pytest.raises(InvariantError):
        PagedDecode(case.tables[:1], case.kv_lengths, 6)
    with pytest.raises(InvariantError):
        ChunkPrefill(case.tables, starts[:2], case.kv_lengths, 1)
    assert out.isnan().all()
