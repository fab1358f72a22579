"""Is the way of blocks right: pack and unpack in every pair of formats, the engine's path through a staging slab."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bench.device_check.bench import Bench
from bench.device_check.cases import BF16, BLOCK_TOKENS, INT8, error_of, make_pool
from bench.device_check.correctness import judged
from bench.device_check.report import Report, Row, rate
from kernels.kv_pack import KvPart, kv_pack, kv_unpack
from kernels.paged import KvFormat, KvWire, PagedPool, PoolShape, TileStrides
from kvoy.core.types import KvDtype, KvSpec
from kvoy.engine.kv_cache import KvLayout, KvPool
from kvoy.engine.messages import ExportBlocks, ImportBlocks
from kvoy.engine.slab import Slab, nameless_file
from kvoy.engine.transfers import StagedTransfers
from kvoy.engine.uploads import Uploads

FP32, FP16, CHANNEL = KvFormat(torch.float32), KvFormat(torch.float16), KvFormat(torch.int8, "channel")
_PAIRS = (
    (BF16, BF16),
    (INT8, INT8),
    (BF16, FP32),
    (BF16, FP16),
    (FP32, BF16),
    (BF16, INT8),
    (BF16, CHANNEL),
    (INT8, BF16),
    (FP32, CHANNEL),
)
_PART = KvPart(first_layer=1, layers=3, first_head=2, heads=4)
_SHAPE = PoolShape(blocks=9, layers=5, kv_heads=8, block_tokens=BLOCK_TOKENS, head_dim=128)


def check(bench: Bench, report: Report) -> None:
    for pool, wire in _PAIRS:
        report.check(f"kv_pack {name(pool)} to {name(wire)}", partial(_there_and_back, bench, pool, wire))
    report.check("through the staging slab", lambda: _staged(bench))


def name(fmt: KvFormat) -> str:
    return str(fmt.dtype).removeprefix("torch.") + ("" if fmt.scales == "none" else f" by {fmt.scales}")


def wire_like(bench: Bench, fmt: KvFormat, pool: PagedPool, part: KvPart, blocks: int) -> KvWire:
    tile_bytes = fmt.tile_bytes(pool.shape.block_tokens, pool.shape.head_dim)
    shape = (blocks, part.layers, part.heads, tile_bytes)
    return KvWire(torch.full(shape, 255, dtype=torch.uint8, device=bench.place), fmt)


def _there_and_back(bench: Bench, pool_format: KvFormat, wire_format: KvFormat) -> Iterator[Row]:
    """What arrives must be what the specification computes on the CPU, to the bit."""
    pool, target = (make_pool(bench, pool_format, _SHAPE) for _ in range(2))
    blocks, valid_tokens = bench.ints([4, 0, 7, 2], torch.int64), 3 * BLOCK_TOKENS + 5
    wire = wire_like(bench, wire_format, pool, _PART, len(blocks))
    twin, twin_target = _on_host(pool), _on_host(target)
    twin_wire = KvWire(torch.empty(wire.tiles.shape, dtype=torch.uint8), wire_format)
    kv_pack(pool, blocks, _PART, valid_tokens, wire)
    kv_pack(twin, blocks.cpu(), _PART, valid_tokens, twin_wire)
    about = f"{name(pool_format)} to {name(wire_format)}"
    yield _same(f"kv_pack {about}", wire.tiles, twin_wire.tiles, lambda: _numbers(wire), lambda: _numbers(twin_wire))
    kv_unpack(KvWire(twin_wire.tiles.to(bench.place), wire_format), blocks, _PART, target)
    kv_unpack(twin_wire, blocks.cpu(), _PART, twin_target)
    found, expected = target.tiles.view(torch.uint8), twin_target.tiles.view(torch.uint8)
    yield _same(f"kv_unpack {about}", found, expected, lambda: _values(target), lambda: _values(twin_target))


Numbers = Callable[[], Tensor]


def _same(what: str, found: Tensor, expected: Tensor, found_as: Numbers, expected_as: Numbers) -> Row:
    """Equal bytes; else the error of the numbers that they stand for, which is a wrong result all the same unless a
    scale's last bit explains it."""
    if torch.equal(found.cpu(), expected.cpu()):
        return Row(what, "equal to the bit", is_right=True)
    return judged(f"{what}, not equal", error_of(found_as().cpu(), expected_as()), 2e-3)


def _on_host(pool: PagedPool) -> PagedPool:
    memory = pool.tiles.view(torch.uint8).flatten().cpu().clone()
    shape = pool.shape
    return PagedPool(memory, pool.format, shape, TileStrides(shape.layers * shape.kv_heads, shape.kv_heads, 1))


def _values(pool: PagedPool) -> Tensor:
    values = pool.values.double()
    if pool.scales is None:
        return values
    return values * pool.scales.double().repeat_interleave(pool.shape.head_dim, -1)


def _numbers(wire: KvWire) -> Tensor:
    """What a wire says, through the specification, as fp32."""
    blocks, layers, heads, _ = wire.tiles.shape
    shape = PoolShape(blocks, layers, heads, BLOCK_TOKENS, _SHAPE.head_dim)
    memory = torch.zeros((blocks * layers * heads * FP32.tile_bytes(BLOCK_TOKENS, _SHAPE.head_dim),), dtype=torch.uint8)
    pool = PagedPool(memory, FP32, shape, TileStrides(layers * heads, heads, 1))
    everything = KvPart(0, layers, 0, heads)
    kv_unpack(KvWire(wire.tiles.cpu(), wire.format), torch.arange(blocks), everything, pool)
    return pool.values.double()


def _staged(bench: Bench) -> Iterator[Row]:
    """Blocks of one pool through the slots of a real slab into another, all orders given before any is waited for."""
    spec = KvSpec(layers=bench.sizes.of(32, 2), kv_heads=8, head_dim=128, block_tokens=BLOCK_TOKENS, dtype=KvDtype.BF16)
    slots = bench.sizes.of(64, 5)
    source, target = (KvPool(KvLayout(spec, slots + 1), bench.place) for _ in range(2))
    for layer in range(spec.layers):
        source.layer(layer).values.normal_()
    slab = Slab(nameless_file(), slots, spec.block_bytes)
    uploads = Uploads(bench.device)
    leaves = StagedTransfers(source, slab, bench.device, uploads)
    yield Row("the staging slab is pinned", "yes" if leaves.is_pinned else "no: copies hold the host up")
    arrives = StagedTransfers(target, slab, bench.device, uploads)

    def leave() -> None:
        for slot in range(slots):
            mark = leaves.export_blocks(ExportBlocks(1, slot, (slots - slot,), 0, spec.layers, BLOCK_TOKENS))
        mark.wait()

    def arrive() -> None:
        for slot in range(slots):
            arrives.import_blocks(ImportBlocks(1, slot, (slot,), 0, spec.layers))
        bench.wait()

    for what, run in (("export", leave), ("import", arrive)):
        seconds = bench.wall_seconds(run, 3)
        yield Row(
            f"{what} of {slots} blocks of {spec.block_bytes >> 10:,} KiB", rate(slots * spec.block_bytes / seconds)
        )
    is_same = all(
        torch.equal(target.layer(layer).values[slot], source.layer(layer).values[slots - slot])
        for layer in (0, spec.layers - 1)
        for slot in range(slots)
    )
    yield Row("blocks arrive through the slab as they left", "", is_right=is_same)
