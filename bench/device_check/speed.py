"""How long each op takes at the shape of an 8B Llama layer, as a share of the floor that floors.py measured.

Bytes are those that must move (each input read once, each output written once); attention's KV is far larger than any
cache, and caches are cold before every run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench.device_check.bench import Bench
from bench.device_check.cases import BF16, BLOCK_TOKENS, INT8, Heads, make_pool, scale_of
from bench.device_check.report import Report, Row, duration
from bench.device_check.transfer import CHANNEL, name, wire_like
from kernels.chunk_prefill import ChunkPrefill
from kernels.gated_mul import silu_mul
from kernels.kv_pack import KvPart, kv_pack, kv_unpack
from kernels.kv_write import Angles, KvWrite
from kernels.paged import KvFormat, PoolShape
from kernels.paged_decode import PagedDecode
from kernels.rms_norm import add_rms_norm, rms_norm

HEADS = Heads(32, 8, 128)
_LAYERS = 4
_HIDDEN, _FFN = 4096, 14336
_COPY_TARGET, _PREFILL_TARGET = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class _Attention:
    """``requests`` of ``tokens`` each; the target is a share of the copy bandwidth, in prefill of the matrix rate."""

    requests: int
    tokens: int
    format: KvFormat
    target: float | None

    def __str__(self) -> str:
        return f"{self.requests} x {self.tokens}, {'int8' if self.format.dtype == torch.int8 else 'bf16'}"


_DECODES = (
    _Attention(128, 2048, BF16, _COPY_TARGET),
    _Attention(128, 2048, INT8, _COPY_TARGET),
    _Attention(32, 8192, BF16, _COPY_TARGET),
    _Attention(1, 8192, BF16, None),
)
_PREFILLS = (
    _Attention(1, 8192, BF16, _PREFILL_TARGET),
    _Attention(4, 2048, BF16, None),
    _Attention(1, 8192, INT8, None),
)


def check(bench: Bench, report: Report) -> None:
    for case in _DECODES:
        report.check(f"paged_decode {case}", partial(_decode, bench, case))
    for pool, wire in ((BF16, BF16), (INT8, INT8), (BF16, CHANNEL)):
        report.check(f"kv_pack {name(pool)} to {name(wire)}", partial(_pack, bench, pool, wire))
    for case in _PREFILLS:
        report.check(f"chunk_prefill {case}", partial(_prefill, bench, case))
    report.check("pointwise", lambda: _pointwise(bench))
    report.check("kv_write", lambda: _kv_write(bench))


def _moved(bench: Bench, what: str, size_bytes: int, target: float | None, run: Callable[[], object]) -> Row:
    seconds = bench.seconds(run)
    return Row(what, duration(seconds), size_bytes / bench.copy_bytes_a_second / seconds, target)


def _tables(bench: Bench, rows: int, tokens: int) -> tuple[torch.Tensor, int]:
    """Every row's own blocks, shuffled as a busy pool's are; how many there are."""
    each = -(-tokens // BLOCK_TOKENS)
    shuffled = torch.randperm(rows * each, dtype=torch.int32)
    return shuffled.view(rows, each).to(bench.place), rows * each


def _decode(bench: Bench, case: _Attention) -> Row:
    rows, tokens = bench.sizes.of(case.requests, min(case.requests, 3)), bench.sizes.of(case.tokens, 70)
    tables, blocks = _tables(bench, rows, tokens)
    shape = PoolShape(blocks, _LAYERS, HEADS.kv_heads, BLOCK_TOKENS, HEADS.head_dim)
    pool = make_pool(bench, case.format, shape)
    op = PagedDecode(tables, bench.ints([tokens] * rows), tokens)
    q = bench.normal(rows, HEADS.heads + 2 * HEADS.kv_heads, HEADS.head_dim)[:, : HEADS.heads]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kv_bytes = blocks * HEADS.kv_heads * case.format.tile_bytes(BLOCK_TOKENS, HEADS.head_dim)

    def attend() -> None:
        op(q, pool.layer(1), scale=scale_of(HEADS), window_tokens=None, out=out)

    moved = kv_bytes + 2 * q.numel() * q.itemsize
    return _moved(bench, f"paged_decode {case}", moved, case.target, attend)


def _pack(bench: Bench, pool_format: KvFormat, wire_format: KvFormat) -> Iterator[Row]:
    layers, count = bench.sizes.of(32, 2), bench.sizes.of(256, 3)
    shape = PoolShape(2 * count, layers, HEADS.kv_heads, BLOCK_TOKENS, HEADS.head_dim)
    pool, part = make_pool(bench, pool_format, shape), KvPart(0, layers, 0, HEADS.kv_heads)
    wire = wire_like(bench, wire_format, pool, part, count)
    blocks = torch.randperm(2 * count)[:count].to(bench.place)
    pool_bytes = count * layers * HEADS.kv_heads * pool_format.tile_bytes(BLOCK_TOKENS, HEADS.head_dim)
    moved, about = pool_bytes + wire.tiles.numel(), f"{name(pool_format)} to {name(wire_format)}"

    def pack() -> None:
        kv_pack(pool, blocks, part, count * BLOCK_TOKENS - 3, wire)

    def unpack() -> None:
        kv_unpack(wire, blocks, part, pool)

    yield _moved(bench, f"kv_pack {about}, {pool_bytes >> 20:,} MiB", moved, _COPY_TARGET, pack)
    yield _moved(bench, f"kv_unpack {about}, {pool_bytes >> 20:,} MiB", moved, _COPY_TARGET, unpack)


def _prefill(bench: Bench, case: _Attention) -> Row:
    requests, tokens = case.requests, bench.sizes.of(case.tokens, 50)
    tables, blocks = _tables(bench, requests, tokens)
    pool = make_pool(bench, case.format, PoolShape(blocks, _LAYERS, HEADS.kv_heads, BLOCK_TOKENS, HEADS.head_dim))
    starts = bench.ints([tokens * request for request in range(requests + 1)])
    op = ChunkPrefill(tables, starts, bench.ints([tokens] * requests), tokens)
    q = bench.normal(requests * tokens, HEADS.heads + 2 * HEADS.kv_heads, HEADS.head_dim)[:, : HEADS.heads]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)

    def attend() -> None:
        op(q, pool.layer(1), scale=scale_of(HEADS), window_tokens=None, out=out)

    seconds = bench.seconds(attend)
    flops = requests * attention_flops(HEADS, tokens)
    return Row(f"chunk_prefill {case}", duration(seconds), flops / bench.bf16_flops_a_second / seconds, case.target)


def attention_flops(heads: Heads, tokens: int) -> int:
    """Causal, of one layer and a whole prompt: two products of 2 operations for each pair of query and seen key."""
    return 4 * heads.heads * heads.head_dim * tokens * (tokens + 1) // 2


def _pointwise(bench: Bench) -> Iterator[Row]:
    tokens, hidden, ffn = bench.sizes.of(8192, 5), bench.sizes.of(_HIDDEN, 64), bench.sizes.of(_FFN, 96)
    x, residual = bench.normal(tokens, hidden), bench.normal(tokens, hidden, dtype=torch.float32)
    weight, out = bench.normal(hidden, dtype=torch.float32), torch.empty_like(x)
    numbers = tokens * hidden
    yield _moved(
        bench,
        f"rms_norm [{tokens}, {hidden}]",
        6 * numbers,
        _COPY_TARGET,
        lambda: rms_norm(residual, weight, 1e-5, out),
    )
    yield _moved(
        bench,
        f"add_rms_norm [{tokens}, {hidden}]",
        12 * numbers,
        _COPY_TARGET,
        lambda: add_rms_norm(x, residual, weight, 1e-5, out),
    )
    gate_up, gated = bench.normal(tokens, 2 * ffn), torch.empty((tokens, ffn), dtype=x.dtype, device=bench.place)
    yield _moved(bench, f"silu_mul [{tokens}, {ffn}]", 6 * tokens * ffn, _COPY_TARGET, lambda: silu_mul(gate_up, gated))


def _kv_write(bench: Bench) -> Row:
    tokens = bench.sizes.of(8192, 40)
    blocks = -(-tokens // BLOCK_TOKENS)
    pool = make_pool(bench, BF16, PoolShape(blocks, _LAYERS, HEADS.kv_heads, BLOCK_TOKENS, HEADS.head_dim))
    qkv = bench.normal(tokens, HEADS.heads + 2 * HEADS.kv_heads, HEADS.head_dim)
    angle = torch.rand((tokens, HEADS.head_dim // 2), device=bench.place)
    angles, op = Angles(angle.cos(), angle.sin()), KvWrite(torch.arange(tokens, device=bench.place))
    # q and k are read and written in place, v is read, k and v are written to the pool.
    moved = tokens * (2 * HEADS.heads + 5 * HEADS.kv_heads) * HEADS.head_dim * 2 + 2 * angle.numel() * 4
    return _moved(bench, f"kv_write of {tokens} tokens", moved, None, lambda: op(qkv, angles, pool.layer(1)))
