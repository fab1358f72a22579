"""What holds of compiled ops alone: threads, workspace and memory, and where they are compiled and kept."""

import ctypes
import os
import subprocess
import sys
import threading
from unittest.mock import Mock

import numba
import numpy as np
import pytest
import torch
from numba.core.runtime import rtsys

from kernels import cpu, jit, vectors
from kernels.cpu import words
from kernels.kv_write import Angles, KvWrite, QkNorm
from kernels.kv_write import compiled as kv_write
from kernels.kv_write import reference as kv_write_reference
from kernels.paged import KvFormat, PoolShape
from kernels.paged_decode import PagedDecode
from kernels.paged_decode import compiled as paged_decode
from kernels.paged_decode import rows as decode_rows
from kernels.rms_norm import add_rms_norm, rms_norm
from tests.architecture.sources import ROOT
from tests.kernels.oracle import INT8, pool_of
from tests.kernels.paged_case import BLOCK_TOKENS, GROUP, HEAD_DIM, HEADS, KV_HEADS, SCALE, Guarded, PagedCase, Sizes

FP32, BF16 = torch.float32, torch.bfloat16
LENGTHS = [1, 1101, 0, 17, 513, 1024, 64]


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def on_threads(count: int, compute):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return compute()
    finally:
        torch.set_num_threads(before)


def decode_case(fmt: KvFormat, dtype: torch.dtype = FP32):
    case = PagedCase(LENGTHS, FP32 if fmt == INT8 else fmt.dtype, "BHLNC", fmt)
    return case, torch.randn(len(LENGTHS), HEADS, HEAD_DIM).to(dtype)


def plan_of(case: PagedCase, q: torch.Tensor, window_tokens: int | None = None):
    return paged_decode.plan(case.tables, case.kv_lengths, q, case.kv, window_tokens)


@pytest.mark.parametrize("fmt", [KvFormat(FP32), KvFormat(BF16), INT8], ids=["fp32", "bf16", "int8"])
def test_decode_has_the_same_bits_each_time_on_any_threads_and_leaves_its_counters_at_zero(fmt):
    case, q = decode_case(fmt)
    plan = plan_of(case, q)
    plan.partial.fill_(float("nan"))
    first = torch.empty_like(q)
    on_threads(1, lambda: paged_decode.run(plan, q, case.kv, SCALE, first))
    assert not first.isnan().any()
    for _ in range(50):
        out = torch.full_like(q, float("nan"))
        on_threads(2, lambda out=out: paged_decode.run(plan, q, case.kv, SCALE, out))
        assert torch.equal(out, first)
        assert (plan.finished == 0).all()


def test_one_plan_serves_layers_one_after_the_other():
    case, q = decode_case(KvFormat(FP32))
    case.pool.values[:, 0] = case.kv.values * 2
    case.pool.values[:, 2] = case.kv.values
    plan, outs = plan_of(case, q), [torch.empty_like(q) for _ in range(3)]
    for layer, out in enumerate(outs):
        paged_decode.run(plan, q, case.pool.layer(layer), SCALE, out)
    alone = torch.empty_like(q)
    paged_decode.run(plan_of(case, q), q, case.pool.layer(0), SCALE, alone)
    assert torch.equal(outs[1], outs[2])
    assert torch.equal(outs[0], alone)
    assert not torch.equal(outs[0], outs[1])


def test_a_call_follows_one_plan_after_the_other():
    case, q = decode_case(INT8)
    out, expected = torch.empty_like(q), torch.empty_like(q)
    call = paged_decode.call(q, case.kv, SCALE, out)
    for order in (slice(None), torch.arange(len(LENGTHS) - 1, -1, -1)):
        for window_tokens in (None, 600):
            plan = paged_decode.plan(case.tables[order], case.kv_lengths[order], q, case.kv, window_tokens)
            paged_decode.run(plan, q, case.kv, SCALE, expected)
            out.fill_(float("nan"))
            paged_decode.follow(call, plan)
            call.run()
            assert torch.equal(out, expected)


def _few_and_totals(given):
    vectors.store_fp32(decode_rows.notable(vectors.load_fp32(given[0])), given[1])
    vectors.store_fp32(decode_rows.totals(given[0]), given[1] + 64)


def test_weights_of_nothing_are_zeros_and_sixteen_vectors_are_added_up_at_once():
    x = torch.randn(16, 16)
    x[0, :5] = torch.tensor([0.0, 2.0**-126, 2.0**-101, 2.0**-100, float("nan")])
    x[0, 5:] = 1
    out = torch.empty(2, 16)
    jit.op(_few_and_totals)(words(x.data_ptr(), out.data_ptr()), alone=True)
    assert out[0, :3].tolist() == [0, 0, 0]
    assert out[0, 4].isnan()
    assert torch.equal(out[0, [3, *range(5, 16)]], x[0, [3, *range(5, 16)]])
    assert out[1, 0].isnan()
    torch.testing.assert_close(out[1, 1:].double(), x[1:].double().sum(1), atol=1e-5, rtol=0)


def test_another_op_may_do_pieces_in_its_own_order_from_and_to_other_memory():
    case, q = decode_case(KvFormat(BF16), BF16)
    plan, expected = plan_of(case, q), torch.empty_like(q)
    paged_decode.run(plan, q, case.kv, SCALE, expected)
    code = jit.BF16
    numbers = paged_decode.scratch_numbers(GROUP, HEAD_DIM, BLOCK_TOKENS, code)
    wide = torch.full((len(LENGTHS), HEADS + 1, HEAD_DIM), float("nan"))

    def attend(given):
        scratch = jit.scratch(numbers)
        followed = jit.int64s(given[0], 13)
        queries = paged_decode.HeadRows(given[1], HEADS * HEAD_DIM * 2, HEAD_DIM * 2, jit.BF16)
        out = paged_decode.HeadRows(given[2], (HEADS + 1) * HEAD_DIM * 4, HEAD_DIM * 4, jit.FP32)
        for item in range(followed[1] - 1, -1, -1):
            paged_decode.attend_piece(
                followed, item, item, given[3], np.float32(SCALE), queries, out, scratch,
                GROUP, HEAD_DIM, BLOCK_TOKENS, code,
            )  # fmt: skip

    call = paged_decode.call(q, case.kv, SCALE, expected)
    paged_decode.follow(call, plan)
    given = words(ctypes.addressof(call.words), q.data_ptr(), wide.data_ptr(), case.kv.tiles.data_ptr())
    jit.op(attend)(given, alone=True)
    assert torch.equal(wide[:, :HEADS].bfloat16(), expected)
    assert wide[:, HEADS].isnan().all()


def test_decode_asks_for_no_memory():
    """Numba frees an array after its last use, which taking its address is."""
    numba.core.runtime._nrt_python.memsys_enable_stats()
    case, q = decode_case(KvFormat(FP32))
    plan, out = plan_of(case, q), torch.empty_like(q)
    paged_decode.run(plan, q, case.kv, SCALE, out)
    before = rtsys.get_allocation_stats()
    paged_decode.run(plan, q, case.kv, SCALE, out)
    assert rtsys.get_allocation_stats() == before


def test_python_threads_do_not_disturb_each_other():
    cases = [decode_case(KvFormat(FP32)), decode_case(INT8)]
    weight = torch.rand(512)
    rows = torch.randn(60, 512)
    expected_rows = torch.empty_like(rows)
    rms_norm(rows, weight, 1e-5, expected_rows)
    expected = [torch.empty_like(q) for _, q in cases]
    for (case, q), out in zip(cases, expected, strict=True):
        paged_decode.run(plan_of(case, q), q, case.kv, SCALE, out)
    wrong: list[str] = []

    def loop(which: int) -> None:
        case, q = cases[which]
        for step in range(60):
            out, normed = torch.empty_like(q), torch.empty_like(rows)
            paged_decode.run(plan_of(case, q), q, case.kv, SCALE, out)
            rms_norm(rows, weight, 1e-5, normed)
            if not torch.equal(out, expected[which]) or not torch.equal(normed, expected_rows):
                wrong.append(f"step {step} of thread {which}")

    loops = [threading.Thread(target=loop, args=(which % 2,)) for which in range(3)]
    for thread in loops:
        thread.start()
    for thread in loops:
        thread.join()
    assert wrong == []


def _count_threads(given):
    jit.count_up(given[1])


def test_a_team_is_as_large_as_torchs_in_every_python_thread(threads):
    found = torch.zeros(2, dtype=torch.int64)
    op = jit.op(_count_threads)

    def count(which: int) -> None:
        op(words(0, found[which:].data_ptr()), alone=False)

    count(0)
    thread = threading.Thread(target=count, args=(1,))
    thread.start()
    thread.join()
    assert found.tolist() == [threads, threads]


@pytest.mark.parametrize(
    ("rows", "dim", "dtype", "out_dtype", "has_residual"),
    [
        (1, 16, FP32, FP32, False),
        (1, 4096, BF16, BF16, True),
        (3, 48, BF16, FP32, False),
        (5, 80, FP32, BF16, True),
        (600, 1040, BF16, BF16, False),
        (599, 64, FP32, FP32, True),
        (33, 4096, FP32, BF16, False),
        (17, 896, BF16, FP32, True),
    ],
)
def test_norms_equal_float64_and_have_the_same_bits_alone_and_on_any_threads(rows, dim, dtype, out_dtype, has_residual):
    x, weight = torch.randn(rows, dim + 16).to(dtype)[:, :dim] * 20, torch.rand(dim) + 0.5
    residual = torch.randn(rows, dim) * 30

    def normed(some: slice, threads: int) -> torch.Tensor:
        guarded, kept = Guarded(tuple(x[some].shape), out_dtype), residual[some].clone()
        if has_residual:
            on_threads(threads, lambda: add_rms_norm(x[some], kept, weight, 1e-5, guarded.out))
            assert torch.equal(kept, residual[some] + x[some].float())
        else:
            on_threads(threads, lambda: rms_norm(x[some], weight, 1e-5, guarded.out))
        return guarded.check()

    wide = (residual + x.float() if has_residual else x).double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    together = normed(slice(None), 2)
    step = 2e-6 if out_dtype == FP32 else 2**-7
    torch.testing.assert_close(together.double(), expected, rtol=step, atol=1e-6)
    assert torch.equal(normed(slice(None), 1), together)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(normed(slice(row, row + 1), 1)[0], together[row])


def test_a_nan_spoils_the_norm_of_its_own_row_only():
    x, weight, out = torch.randn(9, 64), torch.rand(64), torch.empty(9, 64)
    before = torch.empty_like(out)
    rms_norm(x, weight, 1e-5, before)
    x[4, 63] = float("nan")
    rms_norm(x, weight, 1e-5, out)
    assert out[4].isnan().all()
    out[4] = before[4]
    assert torch.equal(out, before)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize(("dtype", "pool_dtype"), [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP32, BF16)])
def test_writes_equal_torchs_and_have_the_same_bits_alone_and_on_any_threads(dtype, pool_dtype, head_dim, has_norms):
    tokens, heads, shape = 70, 5, PoolShape(20, 3, KV_HEADS, 8, head_dim)
    slots = torch.randperm(160)[:tokens]
    slots[::9] = -1
    slots = torch.stack((slots, torch.full_like(slots, 2**62)), 1)[:, 0]  # a part of something wider
    turn, weights = torch.rand(tokens, head_dim // 2) * 7, torch.rand(2, head_dim) + 0.5
    angles = Angles(turn.cos(), turn.sin())
    norms = QkNorm(weights[0], weights[1], 1e-5) if has_norms else None
    qkv = torch.randn(tokens, heads + 2 * KV_HEADS, head_dim).to(dtype)

    def written(threads: int, some: slice) -> tuple[torch.Tensor, torch.Tensor]:
        pool, mine = pool_of(KvFormat(pool_dtype), shape, "LHBNC"), qkv[some].clone()
        part = Angles(angles.cos[some], angles.sin[some])
        assert kv_write.serves(mine, part, pool.layer(1), norms)
        on_threads(threads, lambda: KvWrite(slots[some])(mine, part, pool.layer(1), norms))
        return mine, pool.values

    turned, stored = written(2, slice(None))
    expected, pool = qkv.clone(), pool_of(KvFormat(pool_dtype), shape, "LHBNC")
    kv_write_reference.run(kv_write_reference.plan(slots, pool.layer(1)), expected, angles, pool.layer(1), norms)
    step = 1e-5 if dtype == pool_dtype == FP32 else 2e-2
    torch.testing.assert_close(turned, expected, rtol=step, atol=step)
    torch.testing.assert_close(stored, pool.values, rtol=step, atol=step)
    assert all(map(torch.equal, written(1, slice(None)), (turned, stored)))
    for token in (0, 1, tokens - 1):
        assert torch.equal(written(1, slice(token, token + 1))[0][0], turned[token])


@pytest.mark.parametrize(
    "ail",
    [
        lambda patch: patch.setattr(cpu.platform, "machine", lambda: "riscv64"),
        lambda patch: patch.setattr(cpu, "openmp", lambda: None),
        lambda patch: [
            patch.setitem(sys.modules, "numba", None),
            *(patch.delitem(sys.modules, name) for name in ("kernels.vectors", "kernels.jit")),
        ],
        lambda patch: patch.setattr(vectors, "op", lambda _function: 1 / 0),
        lambda patch: patch.setattr(vectors, "op", lambda _function: Mock()),
    ],
    ids=["machine", "openmp", "numba", "compiler", "result"],
)
def test_nothing_is_compiled_where_something_ails(monkeypatch, ail):
    assert cpu.compiles.__wrapped__()
    ail(monkeypatch)
    assert not cpu.compiles.__wrapped__()


def test_nothing_is_kept_where_nothing_can_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit.os, "access", lambda _path, _mode: False)
    assert not jit._has_cache()


PROGRAM = """
import torch
from kernels import cpu, jit
from kernels.paged import KvFormat, PoolShape
from kernels.paged_decode import PagedDecode
from tests.kernels.oracle import pool_of

assert cpu.compiles()
kv = pool_of(KvFormat(torch.float32), PoolShape(2, 1, 1, 4, 16), "BLHNC").layer(0)
kv.values.fill_(3)
q, out = torch.ones(1, 1, 16), torch.empty(1, 1, 16)
one = torch.ones(1, dtype=torch.int32)
PagedDecode(one.view(1, 1), one, 1)(q, kv, scale=1.0, window_tokens=None, out=out)
print(out.unique().tolist(), jit._HAS_CACHE)
"""


def run_program(cache: os.PathLike) -> str:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_ops_run_where_the_cache_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert run_program(tmp_path / "file" / "x") == "[3.0] False"


def test_a_second_process_reads_what_the_first_compiled(tmp_path):
    def kept() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    assert run_program(tmp_path) == "[3.0] True"
    first = kept()
    assert len([path for path in first if path.endswith(".nbc")]) == 2
    assert run_program(tmp_path) == "[3.0] True"
    assert kept() == first


def test_what_was_kept_and_is_broken_is_compiled_again(tmp_path):
    """As after a loss of power, or on a disk that was full."""
    assert run_program(tmp_path) == "[3.0] True"
    for path in tmp_path.rglob("*.nbc"):
        path.write_bytes(path.read_bytes()[:100])
    assert run_program(tmp_path) == "[3.0] True"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 8 << 20),
        ({"OMP_STACKSIZE": "256k"}, 256 << 10),
        ({"OMP_STACKSIZE": "300"}, 300 << 10),
        ({"GOMP_STACKSIZE": " 1 M "}, 1 << 20),
        ({"OMP_STACKSIZE": "2g"}, 8 << 20),
        ({"OMP_STACKSIZE": "much"}, 8 << 20),
    ],
)
def test_the_least_stack_of_a_thread_is_known(monkeypatch, environment, expected):
    monkeypatch.setattr(cpu.resource, "getrlimit", lambda _: (8 << 20, cpu.resource.RLIM_INFINITY))
    assert cpu.stack_bytes(environment) == expected
    monkeypatch.setattr(cpu.resource, "getrlimit", lambda _: (cpu.resource.RLIM_INFINITY,) * 2)
    assert cpu.stack_bytes({}) > 1 << 40


def test_ops_that_a_stack_has_no_room_for_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(cpu, "stack_bytes", lambda _: 1 << 20)
    cpu.compiles.cache_clear()
    assert not cpu.compiles()
    monkeypatch.undo()
    cpu.compiles.cache_clear()
    assert cpu.compiles()
    case = PagedCase([100], BF16, sizes=Sizes(16, 32, 1 << 17))
    q = torch.randn(1, case.sizes.heads, 32).to(BF16)
    assert not paged_decode.serves(q, case.kv)


def test_dtypes_that_are_not_compiled_for_are_left_to_torch():
    case, q = decode_case(KvFormat(torch.float16))
    assert not paged_decode.serves(q, case.kv)
    assert not paged_decode.serves(q.half(), decode_case(KvFormat(FP32))[0].kv)
    out = torch.empty_like(q)
    PagedDecode(case.tables, case.kv_lengths, max(LENGTHS))(q, case.kv, scale=SCALE, window_tokens=None, out=out)
    assert not out.isnan().any()
