"""What ``python -m kernels.compile`` compiles: each op, launched the ways a served model launches it, on CPU tensors.

A change of a launch function, of a tile table or of the dtypes and head dims that are served changes this file.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.chunk_prefill import kernel as chunk_prefill
from kernels.gated_mul import kernel as gated_mul
from kernels.kv_pack import KvPart
from kernels.kv_pack import kernel as kv_pack
from kernels.kv_write import Angles, QkNorm
from kernels.kv_write import kernel as kv_write
from kernels.paged import KvFormat, KvWire, PagedPool, PoolShape, TileStrides
from kernels.paged_decode import kernel as paged_decode
from kernels.rms_norm import kernel as rms_norm

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_INT8, _CHANNEL = KvFormat(torch.int8, "token"), KvFormat(torch.int8, "channel")
_BLOCK_TOKENS, _ROWS = 16, 2
_HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    launch: Callable[[], None]
    has_products: bool = False
    """Of matrices, for which the tensor cores must be used."""


@dataclass(frozen=True, slots=True)
class _Heads:
    dim: int
    kv: int = 4
    group: int = 4


def cases() -> Iterator[Case]:
    for dtype in (_BF16, _FP16, _FP32):
        yield Case(f"rms_norm {dtype}", partial(_norm, dtype))
        yield Case(f"gated_mul {dtype}", partial(_gated, dtype))
    for head_dim in _HEAD_DIMS:
        yield from _attention(_Heads(head_dim), _BF16, KvFormat(_BF16))
    for head_dim in (64, 128, 256):
        yield from _attention(_Heads(head_dim), _BF16, _INT8)
        yield from _attention(_Heads(head_dim), _FP32, KvFormat(_FP32))
    for dtype, fmt in ((_FP16, KvFormat(_FP16)), (_FP32, _INT8), (_FP32, KvFormat(_BF16)), (_BF16, KvFormat(_FP32))):
        yield from _attention(_Heads(128), dtype, fmt)
    yield from _attention(_Heads(64, kv=1, group=1), _BF16, KvFormat(_BF16))  # Triton takes a 1 for a constant
    for dtype, fmt in ((_BF16, KvFormat(_BF16)), (_BF16, _INT8), (_FP32, KvFormat(_FP32))):
        yield Case(
            f"chunk_prefill {_what(_Heads(128), dtype, fmt)}, window",
            partial(_prefill, _Heads(128), dtype, fmt, 512),
            has_products=True,
        )
    for pool in (KvFormat(_BF16), KvFormat(_FP32), _INT8):
        for wire in (KvFormat(_BF16), KvFormat(_FP32), _INT8, _CHANNEL):
            if (pool, wire) != (_INT8, _CHANNEL):
                yield Case(f"kv_pack {_name(pool)} to {_name(wire)}", partial(_copy, pool, wire))


def _attention(heads: _Heads, dtype: torch.dtype, fmt: KvFormat) -> Iterator[Case]:
    what = _what(heads, dtype, fmt)
    yield Case(f"kv_write {what}", partial(_write, heads, dtype, fmt, has_norms=heads.dim == 128))
    yield Case(f"paged_decode {what}", partial(_decode, heads, dtype, fmt), has_products=True)
    yield Case(f"chunk_prefill {what}", partial(_prefill, heads, dtype, fmt, None), has_products=True)


def _what(heads: _Heads, dtype: torch.dtype, fmt: KvFormat) -> str:
    return f"{dtype} over {_name(fmt)}, {heads.kv} kv heads of {heads.dim}"


def _name(fmt: KvFormat) -> str:
    return f"{fmt.dtype} by {fmt.scales}" if fmt.scales != "none" else str(fmt.dtype)


def _pool(fmt: KvFormat, heads: _Heads) -> PagedPool:
    shape = PoolShape(2, 2, heads.kv, _BLOCK_TOKENS, heads.dim)
    size_bytes = shape.blocks * shape.layers * heads.kv * fmt.tile_bytes(_BLOCK_TOKENS, heads.dim)
    strides = TileStrides(block=2 * heads.kv, layer=heads.kv, head=1)
    return PagedPool(torch.zeros(size_bytes, dtype=torch.uint8), fmt, shape, strides)


def _queries(heads: _Heads, dtype: torch.dtype) -> Tensor:
    return torch.zeros((_ROWS, heads.kv * heads.group, heads.dim), dtype=dtype)


def _integers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _norm(dtype: torch.dtype) -> None:
    x, weight = torch.zeros((_ROWS, 4096), dtype=dtype), torch.zeros(4096)
    rms_norm.rms_norm(x, weight, 1e-5, x)
    rms_norm.rms_norm(x.view(_ROWS, 32, 128), weight[:128], 1e-5, x.view(_ROWS, 32, 128))
    rms_norm.add_rms_norm(x, x.float(), weight, 1e-5, x)


def _gated(dtype: torch.dtype) -> None:
    gate_up = torch.zeros((_ROWS, 8192), dtype=dtype)
    gated_mul.silu_mul(gate_up, gate_up[:, :4096])
    gated_mul.gelu_tanh_mul(gate_up, gate_up[:, :4096])


def _write(heads: _Heads, dtype: torch.dtype, fmt: KvFormat, *, has_norms: bool) -> None:
    qkv = torch.zeros((_ROWS, heads.kv * (heads.group + 2), heads.dim), dtype=dtype)
    turn, weight = torch.zeros((_ROWS, heads.dim // 2)), torch.zeros(heads.dim)
    norms = QkNorm(weight, weight, 1e-5) if has_norms else None
    slots = torch.zeros(_ROWS, dtype=torch.int64)
    kv_write.run(slots, qkv, Angles(turn, turn), _pool(fmt, heads).layer(0), norms)


def _decode(heads: _Heads, dtype: torch.dtype, fmt: KvFormat) -> None:
    q, kv = _queries(heads, dtype), _pool(fmt, heads).layer(0)
    for max_kv_tokens in (1, 4096):  # without and with a merge
        plan = paged_decode.plan(_integers(_ROWS, 16), _integers(_ROWS), max_kv_tokens, q, kv, window_tokens=None)
        paged_decode.run(plan, q, kv, 0.1, q)


def _prefill(heads: _Heads, dtype: torch.dtype, fmt: KvFormat, window_tokens: int | None) -> None:
    q, kv = _queries(heads, dtype), _pool(fmt, heads).layer(0)
    starts = _integers(_ROWS + 1)
    plan = chunk_prefill.plan(_integers(_ROWS, 16), starts, _integers(_ROWS), 512, q, kv, window_tokens=window_tokens)
    chunk_prefill.run(plan, q, kv, 0.1, q)


def _copy(pool_format: KvFormat, wire_format: KvFormat) -> None:
    pool, part = _pool(pool_format, _Heads(128)), KvPart(0, 2, 0, 4)
    tiles = torch.zeros((1, 2, 4, wire_format.tile_bytes(_BLOCK_TOKENS, 128)), dtype=torch.uint8)
    wire, blocks = KvWire(tiles, wire_format), torch.zeros(1, dtype=torch.int64)
    kv_pack.kv_pack(pool, blocks, part, _BLOCK_TOKENS, wire)
    kv_pack.kv_unpack(wire, blocks, part, pool)
