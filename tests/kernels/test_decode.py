"""PagedDecode over every kind of size, pool and length, both as torch and compiled: against float64, and its laws."""

import pytest
import torch

from kernels.kv_write import Angles, KvWrite
from kernels.paged import KvFormat, PoolShape
from kernels.paged_decode import PagedDecode
from tests.kernels.oracle import INT8, pool_of
from tests.kernels.paged_case import GROUP, HEAD_DIM, HEADS, KV_HEADS, SCALE, Guarded, PagedCase, Sizes, tolerance

pytestmark = pytest.mark.usefixtures("each_way")
USUAL = Sizes()
FP32, BF16 = torch.float32, torch.bfloat16
FORMATS = {"fp32": KvFormat(FP32), "bf16": KvFormat(BF16), "int8": INT8}
LENGTHS = [1, 1101, 0, 17, 512, 513, 64, 0, 33, 1025, 511]
"""A compiled row is done in spans of 512 tokens; a row of none is padding, also beside rows of several spans."""
CASES = [
    # Each size with each of the others' kinds at least once; all orders of a pool.
    (Sizes(2, 32, 8), "bf16", BF16, 5, "BHLNC"),
    (Sizes(3, 64, 16), "int8", BF16, None, "LBHNC"),
    (Sizes(20, 80, 24), "fp32", BF16, 700, "LHBNC"),
    (Sizes(8, 96, 4), "bf16", FP32, 600, "HBLNC"),
    (Sizes(2, 128, 32), "int8", FP32, 16, "HLBNC"),
    (Sizes(1, 128, 16), "fp32", FP32, None, "BLHNC"),
    (Sizes(8, 16, 16), "int8", BF16, 513, "BHLNC"),
]


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


def attend(case: PagedCase, q: torch.Tensor, window_tokens: int | None = None, row: int | None = None) -> torch.Tensor:
    """Of all rows or of one alone."""
    rows = slice(None) if row is None else slice(row, row + 1)
    guarded = Guarded(tuple(q[rows].shape), q.dtype)
    op = PagedDecode(case.tables[rows], case.kv_lengths[rows], max(case.lengths))
    op(q[rows], case.kv, scale=SCALE, window_tokens=window_tokens, out=guarded.out)
    guarded.check_bands()
    return guarded.out


def case_of(lengths: list[int], name: str, order: str = "BLHNC", sizes: Sizes = USUAL) -> PagedCase:
    return PagedCase(lengths, BF16 if name == "bf16" else FP32, order, FORMATS[name], sizes)


def check(out: torch.Tensor, case: PagedCase, q: torch.Tensor, window_tokens: int | None) -> None:
    expected = torch.cat([case.expected(row, q[row : row + 1], window_tokens) for row in range(len(case.lengths))])
    torch.testing.assert_close(out.double(), expected, atol=tolerance(q.dtype), rtol=0)


@pytest.mark.parametrize(("sizes", "name", "dtype", "window_tokens", "order"), CASES, ids=str)
def test_every_size_equals_float64_and_a_row_alone_has_the_same_bits(sizes, name, dtype, window_tokens, order):
    case = case_of(LENGTHS, name, order, sizes)
    q = torch.randn(len(LENGTHS), sizes.heads, sizes.head_dim).to(dtype)
    out = attend(case, q, window_tokens)
    check(out, case, q, window_tokens)
    for row in (0, 1, 2, 5, 8):
        assert torch.equal(attend(case, q, window_tokens, row)[0], out[row])


@pytest.mark.parametrize("name", FORMATS)
def test_q_and_out_may_be_parts_of_wider_rows(name):
    lengths = [700, 3, 0, 40]
    case = case_of(lengths, name)
    qkv = torch.randn(4, HEADS + 2 * KV_HEADS, HEAD_DIM)
    wide = torch.full((4, HEADS + 3, HEAD_DIM + 16), 5.0)
    q, out = qkv[:, :HEADS], wide[:, 2:-1, :HEAD_DIM]
    op = PagedDecode(case.tables, case.kv_lengths, 700)
    op(q, case.kv, scale=SCALE, window_tokens=None, out=out)
    assert torch.equal(out, attend(case, q.contiguous()))
    out.fill_(5)
    assert (wide == 5).all()


def test_tables_and_lengths_may_be_parts_of_others():
    case = case_of([600, 0, 9], "fp32")
    q = torch.randn(3, HEADS, HEAD_DIM)
    columns = torch.stack((case.tables, torch.full_like(case.tables, 2**31 - 1)), 2)[..., 0]
    lengths = torch.stack((case.kv_lengths, torch.full_like(case.kv_lengths, 2**31 - 1)), 1)[:, 0]
    out = torch.empty_like(q)
    PagedDecode(columns, lengths, 600)(q, case.kv, scale=SCALE, window_tokens=None, out=out)
    assert torch.equal(out, attend(case, q))


def test_no_rows_and_rows_of_padding_only():
    case = case_of([5], "fp32")
    for lengths in (torch.zeros(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)):
        rows = lengths.shape[0]
        out = torch.full((rows, HEADS, HEAD_DIM), float("nan"))
        op = PagedDecode(torch.full((rows, 4), 2**31 - 1, dtype=torch.int32), lengths, 1)
        op(torch.randn(rows, HEADS, HEAD_DIM), case.kv, scale=SCALE, window_tokens=None, out=out)
        assert (out == 0).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("position", [0, 600, 1100])
def test_a_nan_comes_out_of_its_own_row_and_heads_only(name, position):
    case = case_of([30, 1101, 700], name)
    q = torch.randn(3, HEADS, HEAD_DIM)
    before = attend(case, q)
    blocks, places = case.places(1)
    block, place = int(blocks[position]), int(places[position])
    for part in ("k", "v"):
        poisoned = case.kv.values if case.kv.scales is None else case.kv.scales
        line = poisoned[block, 1, place]
        kept = line.clone()
        line[0 if part == "k" else line.shape[0] // 2] = float("nan")
        out = attend(case, q)
        line.copy_(kept)
        assert out[1, GROUP:, 0].isnan().all()
        assert torch.equal(out[[0, 2]], before[[0, 2]])
        assert torch.equal(out[1, :GROUP], before[1, :GROUP])
    q[1, 2, 5] = float("nan")
    out = attend(case, q)
    assert out[1, 2].isnan().all()
    out[1, 2] = before[1, 2]
    assert torch.equal(out, before)


@pytest.mark.parametrize("name", FORMATS)
def test_large_scores_do_not_overflow(name):
    """Of 1e4 and -1e4, in a first block or a last one, in one span or two."""
    lengths = [20, 21, 800, 801]
    case = case_of(lengths, name)
    chosen = [0, 20, 3, 790]
    for row, position in enumerate(chosen):
        case.dense[row][..., :HEAD_DIM] = -1e4 / SCALE / HEAD_DIM
        case.dense[row][position, :, :HEAD_DIM] *= -1
        case.store(row)
    out = attend(case, torch.ones(4, HEADS, HEAD_DIM))
    for row, position in enumerate(chosen):
        values = case.dense[row][position, :, HEAD_DIM:].repeat_interleave(GROUP, 0)
        torch.testing.assert_close(out[row], values.float(), atol=1e-6, rtol=0)


def test_a_block_beyond_two_gigabytes_is_found():
    block_bytes = FORMATS["fp32"].tile_bytes(4, HEAD_DIM) * KV_HEADS
    blocks = 2**32 // block_bytes + 2
    buffer = torch.empty(blocks * block_bytes, dtype=torch.uint8)  # memory that nobody touches is never there
    kv = pool_of(FORMATS["fp32"], PoolShape(blocks, 1, KV_HEADS, 4, HEAD_DIM), "BLHNC", buffer).layer(0)
    last = blocks - 1
    qkv, turn = torch.randn(1, HEADS + 2 * KV_HEADS, HEAD_DIM), torch.zeros(1, HEAD_DIM // 2)
    KvWrite(torch.tensor([last * 4]))(qkv, Angles(turn.cos(), turn.sin()), kv)
    out = torch.empty(1, HEADS, HEAD_DIM)
    op = PagedDecode(torch.tensor([[last]], dtype=torch.int32), torch.ones(1, dtype=torch.int32), 1)
    op(qkv[:, :HEADS], kv, scale=SCALE, window_tokens=None, out=out)
    assert torch.equal(out[0], qkv[0, -KV_HEADS:].repeat_interleave(GROUP, 0))
