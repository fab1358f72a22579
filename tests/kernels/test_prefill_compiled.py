"""Attention of chunks on a CPU's matrix unit: against float64 in all sizes, and a query's bits in any company."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels import amx, jit, vectors
from kernels.chunk_prefill import ChunkPrefill, compiled, reference, weights
from kernels.cpu import words
from kernels.paged import KvFormat
from tests.kernels.oracle import INT8
from tests.kernels.paged_case import SCALE, Guarded, PagedCase, Sizes

BF16, FP32 = torch.bfloat16, torch.float32
LENGTHS = [1, 17, 500, 33, 15, 2100, 130, 16]
CHUNKS = [1, 17, 131, 1, 15, 300, 130, 4]


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


def queries_of(chunks: list[int], sizes: Sizes) -> Tensor:
    return torch.randn(sum(chunks), sizes.heads, sizes.head_dim).to(BF16)


def attend(
    case: PagedCase, q: Tensor, chunks: list[int], window_tokens: int | None, rows: slice = slice(None)
) -> Tensor:
    """Of the chunks at the ends of ``rows``."""
    starts = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
    guarded = Guarded(tuple(q.shape), BF16)
    op = ChunkPrefill(case.tables[rows], starts, case.kv_lengths[rows], max(chunks))
    op(q, case.kv, scale=SCALE, window_tokens=window_tokens, out=guarded.out)
    return guarded.check()


def expected(case: PagedCase, row: int, q: Tensor, window_tokens: int | None) -> Tensor:
    """Float64 attention of the last queries of a row."""
    length, group = case.lengths[row], case.sizes.group
    k, v = (part.transpose(0, 1) for part in case.dense[row].double().repeat_interleave(group, 1).chunk(2, -1))
    at, key = torch.arange(length - q.shape[0], length).unsqueeze(1), torch.arange(length)
    seen = (key <= at) & (key > at - (window_tokens or length))
    return scaled_dot_product_attention(q.double().transpose(0, 1), k, v, seen, scale=SCALE).transpose(0, 1)


def assert_right(case: PagedCase, q: Tensor, window_tokens: int | None, near: float) -> None:
    """Of CHUNKS at the ends of all rows."""
    out, first = attend(case, q, CHUNKS, window_tokens), 0
    for row, chunk in enumerate(CHUNKS):
        own = slice(first, first + chunk)
        torch.testing.assert_close(out[own].double(), expected(case, row, q[own], window_tokens), rtol=0, atol=near)
        first += chunk


@pytest.mark.parametrize("window_tokens", [None, 1, 40, 1500])
@pytest.mark.parametrize(
    "sizes",
    [Sizes(3, 64, 16), Sizes(1, 128, 4), Sizes(4, 256, 32), Sizes(2, 96, 24)],
    ids=str,
)
def test_it_equals_float64_attention(sizes, window_tokens):
    case = PagedCase(LENGTHS, BF16, sizes=sizes)
    q = queries_of(CHUNKS, sizes)
    assert compiled.serves(q, case.kv)
    assert_right(case, q, window_tokens, 2e-2)


@pytest.mark.parametrize("fmt", [KvFormat(FP32), INT8], ids=["fp32", "int8"])
@pytest.mark.parametrize("order", ["BLHNC", "LBHNC"])
def test_pools_of_other_formats_are_read_as_bf16(fmt, order):
    sizes = Sizes(3, 64, 16)
    case = PagedCase(LENGTHS, FP32, order, fmt, sizes)
    q = queries_of(CHUNKS, sizes)
    assert compiled.serves(q, case.kv)
    assert_right(case, q, None, 3e-2)


@pytest.mark.parametrize("window_tokens", [None, 40])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_query_has_the_same_bits_in_any_company_and_however_its_prompt_is_cut(window_tokens, threads):
    sizes = Sizes(3, 64, 16)
    case = PagedCase([1300, 300, 700], BF16, sizes=sizes)
    q = queries_of([1300, 300, 700], sizes)
    together = attend(case, q, [1300, 300, 700], window_tokens)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for cut in (1, 5, 16, 128, 333):
        for end in range(cut, 1301, 7 * cut):
            case.kv_lengths[0] = end
            found = attend(case, q[end - cut : end], [cut], window_tokens, slice(0, 1))
            assert torch.equal(found, together[end - cut : end])
    torch.set_num_threads(before)


def test_what_a_query_does_not_see_never_reaches_it():
    """Not even as infinity or NaN, in the very block that it does see."""
    sizes = Sizes(3, 64, 16)
    case = PagedCase([700], BF16, sizes=sizes)
    q = queries_of([700], sizes)
    clean = attend(case, q, [700], 40)
    for kind in (float("nan"), float("inf"), -float("inf")):
        case.dense[0][600:] = kind
        case.store(0)
        case.kv_lengths[0] = 600
        assert torch.equal(attend(case, q[:600], [600], 40), clean[:600])


@pytest.mark.parametrize("window_tokens", [1, 3, 16, 40])
def test_what_lies_on_the_stack_never_reaches_a_query(window_tokens):
    """Keys before the first one seen have weights of zero: they must not meet what another request left behind."""
    sizes = Sizes(3, 64, 16)
    for length in range(65, 200, 5):
        case = PagedCase([length + 300, length], BF16, sizes=sizes)
        case.dense[0][:] = float("nan")
        case.store(0)
        q = queries_of([200, 1], sizes)
        starts = torch.tensor([0, 200, 201], dtype=torch.int32)
        out = torch.empty_like(q)
        op = ChunkPrefill(case.tables, starts, case.kv_lengths, 200)
        op(q, case.kv, scale=SCALE, window_tokens=window_tokens, out=out)
        torch.testing.assert_close(out[200:].double(), expected(case, 1, q[200:], window_tokens), rtol=0, atol=2e-2)


def test_scores_may_be_large_or_alike():
    sizes = Sizes(3, 64, 16)
    case = PagedCase([300], BF16, sizes=sizes)
    for size in (0.0, 60.0):
        q = queries_of([300], sizes) * size
        found = attend(case, q, [300], None)
        torch.testing.assert_close(found.double(), expected(case, 0, q, None), rtol=0, atol=2e-2)


def _exp2(given):
    for i in range(0, given[2] * 4, 64):
        vectors.store_fp32(weights.exp2(vectors.load_fp32(given[0] + i)), given[1] + i)


def test_weights_are_powers_of_two_to_within_a_rounding_to_bf16_and_nothing_where_they_would_be_denormal():
    far = [-126.5, -149.0, -1e30, -float("inf")]
    x = torch.cat((torch.linspace(-126, 0, 4087), torch.tensor([*far, -126.0, 0.0, 1e-6, -1e-6, float("nan")])))
    found = torch.empty_like(x)
    jit.op(_exp2)(words(x.data_ptr(), found.data_ptr(), x.shape[0]), alone=True)
    cut = (found[:-1].view(torch.int32) >> 16 << 16).view(FP32).double()
    exact = x[:-1].double().exp2()
    near = exact >= 2.0**-126
    assert ((cut - exact).abs() <= exact * (2**-8 + 1e-4))[near].all()
    assert (cut[~near] == 0).all()
    assert (~near).sum() == len(far)
    assert found[-1].isnan()


@pytest.mark.parametrize("case_of", ["no unit", "fp32", "head dim 16"])
def test_what_it_does_not_serve_torch_does(monkeypatch, case_of):
    if case_of == "no unit":
        monkeypatch.setattr(amx, "works", lambda: False)
    sizes = Sizes(3, 16 if case_of == "head dim 16" else 32, 4)
    dtype = FP32 if case_of == "fp32" else BF16
    case = PagedCase([50], dtype, sizes=sizes)
    q = torch.randn(50, sizes.heads, sizes.head_dim).to(dtype)
    starts = torch.tensor([0, 50], dtype=torch.int32)
    found, wanted = torch.empty_like(q), torch.empty_like(q)
    ChunkPrefill(case.tables, starts, case.kv_lengths, 50)(q, case.kv, scale=SCALE, window_tokens=None, out=found)
    plan = reference.plan(case.tables, starts, case.kv_lengths, q, case.kv, window_tokens=None)
    reference.run(plan, q, case.kv, SCALE, wanted)
    assert torch.equal(found, wanted)
