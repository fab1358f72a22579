"""Is every op right, in bf16, against float64: attention, norms, gates, the way into the pool.

Outputs are poisoned before each run. Limits are of |found - expected| / |expected|; rounding to bf16 is some 2e-3.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench.device_check.bench import Bench
from bench.device_check.cases import BF16, BLOCK_TOKENS, INT8, Heads, PagedCase, error_of, make_pool, poison, scale_of
from bench.device_check.report import Report, Row
from kernels.chunk_prefill import ChunkPrefill
from kernels.gated_mul import gelu_tanh_mul, silu_mul
from kernels.kv_write import Angles, KvWrite, QkNorm
from kernels.paged import KvFormat, PagedLayer, PoolShape
from kernels.paged_decode import PagedDecode
from kernels.rms_norm import add_rms_norm, rms_norm

_LIMIT = 1e-2
LLAMA, SMOL, GEMMA, EVERY = Heads(32, 8, 128), Heads(9, 3, 64), Heads(4, 1, 256), Heads(8, 8, 128)


def check(bench: Bench, report: Report) -> None:
    report.check("rms_norm", lambda: _rms_norm(bench))
    report.check("add_rms_norm", lambda: _add_rms_norm(bench))
    report.check("silu_mul, gelu_tanh_mul", lambda: _gated(bench))
    for heads, fmt, window in (
        (LLAMA, BF16, None),
        (LLAMA, BF16, 300),
        (LLAMA, INT8, None),
        (SMOL, BF16, None),
        (SMOL, INT8, 100),
        (GEMMA, BF16, 512),
        (EVERY, BF16, None),
    ):
        about = f"{heads}, {_name(fmt)}" + (f", window {window}" if window else "")
        report.check(f"paged_decode, {about}", partial(_decode, bench, heads, fmt, window))
        report.check(f"chunk_prefill, {about}", partial(_prefill, bench, heads, fmt, window))
    for heads, fmt, has_norm in ((LLAMA, BF16, False), (LLAMA, INT8, False), (GEMMA, BF16, True), (SMOL, INT8, True)):
        about = f"kv_write, {heads}, {_name(fmt)}" + (", q and k normed" if has_norm else "")
        report.check(about, partial(_kv_write, bench, heads, fmt, has_norm=has_norm))


def judged(what: str, error: float, limit: float = _LIMIT) -> Row:
    return Row(what, f"error {error:.1e} < {limit:.0e}", is_right=error < limit)


def _name(fmt: KvFormat) -> str:
    return "int8 pool" if fmt.dtype == torch.int8 else "bf16 pool"


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def _rms_norm(bench: Bench) -> Iterator[Row]:
    for shape, dtype in (((37, 4096), torch.float32), ((5, 576), torch.bfloat16), ((9, 12, 64), torch.bfloat16)):
        x = bench.normal(*shape, dtype=dtype)
        if len(shape) == 3:  # heads amid others, in place
            x = x[:, 2:7]
        weight = bench.normal(shape[-1], dtype=torch.float32)
        expected = _normed(x, weight, 1e-5)
        out = x if len(shape) == 3 else torch.full(shape, float("nan"), dtype=torch.bfloat16, device=bench.place)
        rms_norm(x, weight, 1e-5, out)
        yield judged(f"rms_norm {list(shape)} of {_short(dtype)}", error_of(out, expected))


def _add_rms_norm(bench: Bench) -> Iterator[Row]:
    for rows, dim in ((1, 4096), (130, 576)):
        x, weight = bench.normal(rows, dim), bench.normal(dim, dtype=torch.float32)
        residual = bench.normal(rows, dim, dtype=torch.float32)
        total = residual.double() + x.double()
        out = torch.full_like(x, float("nan"))
        add_rms_norm(x, residual, weight, 1e-5, out)
        yield judged(f"add_rms_norm [{rows}, {dim}], norm", error_of(out, _normed(total, weight, 1e-5)))
        yield judged(f"add_rms_norm [{rows}, {dim}], fp32 sum", error_of(residual, total), 1e-6)


def _gated(bench: Bench) -> Iterator[Row]:
    for rows, ffn in ((3, 1536), (37, 14336)):
        gate_up = bench.normal(rows, 2 * ffn)
        gate, up = gate_up.double().chunk(2, -1)
        for op, activated in (
            (silu_mul, functional.silu(gate)),
            (gelu_tanh_mul, functional.gelu(gate, approximate="tanh")),
        ):
            out = gate_up.new_full((rows, ffn), float("nan"))
            op(gate_up, out)
            yield judged(f"{op.__name__} [{rows}, {ffn}]", error_of(out, activated * up))


def _queries(bench: Bench, tokens: int, heads: Heads) -> Tensor:
    """[tokens, heads, head dim] as the model has them: the leading heads of q, k and v together."""
    return bench.normal(tokens, heads.heads + 2 * heads.kv_heads, heads.head_dim)[:, : heads.heads]


def _decode(bench: Bench, heads: Heads, fmt: KvFormat, window: int | None) -> Iterator[Row]:
    about = f"paged_decode, {heads}, {_name(fmt)}" + (f", window {window}" if window else "")
    lengths = [0, 1, 15, 16, 17, 255, 256, 257, 700, bench.sizes.of(2500, 900)]
    case, q = PagedCase(bench, fmt, heads, lengths), _queries(bench, len(lengths), heads)

    def attend(rows: slice, longest: int) -> Tensor:
        out = torch.full(q[rows].shape, float("nan"), dtype=q.dtype, device=q.device)
        op = PagedDecode(case.tables[rows], case.kv_lengths[rows], longest)
        op(q[rows], case.kv, scale=scale_of(heads), window_tokens=window, out=out)
        return out

    found = attend(slice(None), max(lengths))
    expected = [case.expected(row, q[row : row + 1], window) for row in range(1, len(lengths))]
    yield judged(about, error_of(found, torch.cat([torch.zeros_like(expected[0]), *expected])))
    alone = [attend(slice(row, row + 1), length + 900) for row, length in enumerate(lengths)]
    is_same = all(torch.equal(found[row : row + 1], one) for row, one in enumerate(alone))
    yield Row("  a row alone has the bits it has in the batch", "", is_right=is_same)


def _prefill(bench: Bench, heads: Heads, fmt: KvFormat, window: int | None) -> Row:
    about = f"chunk_prefill, {heads}, {_name(fmt)}" + (f", window {window}" if window else "")
    chunks, befores = [1, 7, 130, 64, 300], [0, 33, 0, 512, bench.sizes.of(1100, 40)]
    case = PagedCase(bench, fmt, heads, [chunk + before for chunk, before in zip(chunks, befores, strict=True)])
    starts = [sum(chunks[:request]) for request in range(len(chunks) + 1)]
    q = _queries(bench, starts[-1], heads)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)
    op = ChunkPrefill(case.tables, bench.ints(starts), case.kv_lengths, max(chunks))
    op(q, case.kv, scale=scale_of(heads), window_tokens=window, out=out)
    expected = [case.expected(row, q[starts[row] : starts[row + 1]], window) for row in range(len(chunks))]
    return judged(about, error_of(out, torch.cat(expected)))


def _kv_write(bench: Bench, heads: Heads, fmt: KvFormat, *, has_norm: bool) -> Iterator[Row]:
    about = f"kv_write, {heads}, {_name(fmt)}" + (", q and k normed" if has_norm else "")
    tokens, blocks, dim = 61, 8, heads.head_dim
    pool = make_pool(bench, fmt, PoolShape(blocks, 3, heads.kv_heads, BLOCK_TOKENS, dim))
    poison(pool)
    kv = pool.layer(1)
    slots = torch.randperm(blocks * BLOCK_TOKENS)[:tokens].to(bench.place)
    slots[[0, 7, tokens - 1]] = -1
    qkv = bench.normal(tokens, heads.heads + 2 * heads.kv_heads, dim)
    angle = torch.rand((tokens, dim // 2), device=bench.place) * 700
    angles = Angles(angle.cos(), angle.sin())
    norms = None
    q, k, v = torch.split(qkv.double(), [heads.heads, heads.kv_heads, heads.kv_heads], 1)
    if has_norm:
        norms = QkNorm(bench.normal(dim, dtype=torch.float32), bench.normal(dim, dtype=torch.float32), 1e-6)
        q, k = _normed(q, norms.q_weight, 1e-6), _normed(k, norms.k_weight, 1e-6)
    KvWrite(slots)(qkv, angles, kv, norms)
    q, k = _rotated(q, angles), _rotated(k, angles)
    yield judged(f"{about}, q", error_of(qkv[:, : heads.heads], q))
    stored, expected = _stored(kv, slots[slots >= 0]), torch.cat([k, v], -1)[slots >= 0]
    yield judged(f"{about}, k and v", error_of(stored, expected))
    written = torch.isfinite(kv.values.float() if kv.scales is None else kv.scales.float()).all(-1)
    yield Row("  nothing else is written", "", is_right=int(written.sum()) == heads.kv_heads * int((slots >= 0).sum()))


def _rotated(x: Tensor, angles: Angles) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos.double().unsqueeze(1), angles.sin.double().unsqueeze(1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _stored(kv: PagedLayer, slots: Tensor) -> Tensor:
    """[tokens, kv heads, k | v] as numbers, of the places of slots [tokens]."""
    block, place = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    values = kv.values[block, :, place].double()
    if kv.scales is None:
        return values
    return values * kv.scales[block, :, place].double().repeat_interleave(kv.head_dim, -1)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
