"""Slots in another format than the pool's, and blocks of another size: what arrives where, and what is refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoy.core.errors import InvariantError
from kvoy.core.types import KvDtype, KvSpec
from kvoy.core.wire import WireRun, importable
from kvoy.engine.engine import Engine
from kvoy.engine.kv_cache import KvLayout, KvPool
from kvoy.engine.messages import EngineSettings, ExportBlocks, ImportBlocks
from kvoy.engine.slab import Slab, nameless_file
from kvoy.engine.transfers import DirectTransfers, StagedTransfers
from kvoy.engine.uploads import Uploads
from tests.engine.lanes import ClockDevice, Races
from tests.engine.running import FAMILIES

SPEC = KvSpec(layers=3, kv_heads=2, head_dim=16, block_tokens=4, dtype=KvDtype.FP32)
BLOCKS, SLOT_BYTES = 12, 4 * 16 * SPEC.block_bytes
POOLS = [KvDtype.FP32, KvDtype.BF16, KvDtype.INT8]
PAIRS = [(pool, wire) for pool in POOLS for wire in importable(pool)]
INTEGERS = {KvDtype.FP32: torch.int32, KvDtype.BF16: torch.int16, KvDtype.INT8: torch.int8}


def pool_of(dtype: KvDtype, block_tokens: int = 4, blocks: int = BLOCKS) -> KvPool:
    return KvPool(KvLayout(replace(SPEC, dtype=dtype, block_tokens=block_tokens), blocks))


def full_pool(dtype: KvDtype, block_tokens: int = 4, blocks: int = BLOCKS) -> KvPool:
    pool = pool_of(dtype, block_tokens, blocks)
    for index in range(SPEC.layers):
        layer = pool.layer(index)
        if layer.scales is None:
            layer.values.normal_()
        else:
            layer.values.random_(-127, 128)
            layer.scales.uniform_(0, 0.1)
    return pool


def bits(pool: KvPool) -> torch.Tensor:
    """[tokens, all that the pool has of one], in the order of blocks: as integers, of which none is unlike itself."""
    kind = INTEGERS[pool.layout.spec.dtype]
    parts = []
    for index in range(SPEC.layers):
        layer = pool.layer(index)
        kept = [layer.values.view(kind)] + ([] if layer.scales is None else [layer.scales.view(torch.int16)])
        parts += [part.movedim(2, 1).flatten(0, 1).flatten(1).int() for part in kept]
    return torch.cat(parts, 1)


def slab(slots: int = 2, slot_bytes: int = SLOT_BYTES) -> Slab:
    return Slab(nameless_file(), slots, slot_bytes)


@pytest.mark.parametrize(("pool_dtype", "wire"), PAIRS, ids=str)
def test_a_slot_has_the_bytes_of_its_format_and_the_rest_of_it_is_left_alone(pool_dtype, wire):
    pool, staging = full_pool(pool_dtype), slab()
    staging.slot(1)[:] = b"\x55" * SLOT_BYTES
    order = ExportBlocks(1, 1, (7, 2, 9), 1, 2, 9, wire)
    DirectTransfers(pool, staging).export_blocks(order)
    size = 3 * 2 * replace(SPEC, dtype=wire).layer_bytes
    assert pool.wire_bytes(order) == size
    assert bytes(staging.slot(1)[size:]) == b"\x55" * (SLOT_BYTES - size)
    target = pool_of(pool_dtype)
    DirectTransfers(target, staging).import_blocks(ImportBlocks(1, 1, (0, 1, 2), 1, 2, WireRun(wire, 4, 3)))
    if wire is pool_dtype:
        sent, came = bits(pool).unflatten(0, (BLOCKS, 4))[[7, 2, 9]].flatten(0, 1), bits(target)[:12]
        width = sent.shape[1] // 3
        assert torch.equal(came[:9, width:], sent[:9, width:])
    assert (bits(target)[9:] == 0).all()


def test_wire_and_run_of_the_pools_own_format_are_as_none_at_all():
    pool, staging = full_pool(KvDtype.BF16), slab()
    transfers = DirectTransfers(pool, staging)
    transfers.export_blocks(ExportBlocks(1, 0, (3, 5), 0, 3, 7))
    transfers.export_blocks(ExportBlocks(1, 1, (3, 5), 0, 3, 7, KvDtype.BF16))
    assert bytes(staging.slot(0)) == bytes(staging.slot(1))
    targets = [pool_of(KvDtype.BF16) for _ in range(2)]
    for target, run in zip(targets, (None, WireRun(KvDtype.BF16, 4, 2)), strict=True):
        DirectTransfers(target, staging).import_blocks(ImportBlocks(1, 0, (8, 1), 0, 3, run))
    assert torch.equal(bits(targets[0]), bits(targets[1]))


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**31),
    pair=st.sampled_from(PAIRS),
    sizes=st.sampled_from([(4, 8), (8, 4), (4, 4), (16, 2), (2, 16)]),
    run_blocks=st.integers(1, 4),
    count=st.integers(1, 4),
    first_token=st.integers(-20, 20),
    skip_tokens=st.integers(0, 20),
)
def test_tokens_of_a_run_that_lie_in_our_blocks_arrive_and_no_others(
    seed, pair, sizes, run_blocks, count, first_token, skip_tokens
):
    torch.manual_seed(seed)
    (pool_dtype, wire), (block_tokens, wire_block_tokens) = pair, sizes
    sender = full_pool(pool_dtype, wire_block_tokens)
    staging, listed = slab(), torch.randperm(BLOCKS)[:count].tolist()
    whole = tuple(range(run_blocks))
    DirectTransfers(sender, staging).export_blocks(
        ExportBlocks(1, 0, whole, 0, 3, run_blocks * wire_block_tokens, wire)
    )
    told = pool_of(pool_dtype, wire_block_tokens)  # what each token becomes, by the way of equal blocks
    DirectTransfers(told, staging).import_blocks(
        ImportBlocks(1, 0, whole, 0, 3, WireRun(wire, wire_block_tokens, run_blocks))
    )
    ours, news = full_pool(pool_dtype, block_tokens), bits(told)
    expected = bits(ours)
    for token in range(skip_tokens, run_blocks * wire_block_tokens):
        index, place = divmod(first_token + token, block_tokens)
        if 0 <= index < count:
            expected[listed[index] * block_tokens + place] = news[token]
    run = WireRun(wire, wire_block_tokens, run_blocks, first_token, skip_tokens)
    DirectTransfers(ours, staging).import_blocks(ImportBlocks(1, 0, tuple(listed), 0, 3, run))
    assert torch.equal(bits(ours), expected)


@pytest.mark.parametrize(("pool_dtype", "wire"), PAIRS, ids=str)
@pytest.mark.parametrize(("block_tokens", "skip_tokens"), [(4, 0), (8, 3)])
def test_staged_bytes_are_those_of_the_straight_way(pool_dtype, wire, block_tokens, skip_tokens):
    pool, races, staging, straight = full_pool(pool_dtype), Races(), slab(), slab()
    device = ClockDevice(races)
    order = ExportBlocks(1, 1, (7, 2), 0, 3, 6, wire)
    with races:
        StagedTransfers(pool, staging, device, Uploads(device)).export_blocks(order).wait()
    DirectTransfers(pool, straight).export_blocks(order)
    assert bytes(staging.slot(1)) == bytes(straight.slot(1))
    run = WireRun(wire, 4, 2, skip_tokens=skip_tokens)
    targets = [pool_of(pool_dtype, block_tokens) for _ in range(2)]
    order = ImportBlocks(1, 1, (5, 3) if block_tokens == 4 else (5,), 0, 3, run)
    with races:
        StagedTransfers(targets[0], staging, device, Uploads(device)).import_blocks(order).wait()
    DirectTransfers(targets[1], straight).import_blocks(order)
    assert torch.equal(bits(targets[0]), bits(targets[1]))


@pytest.mark.parametrize(
    ("dtype", "order"),
    [
        (KvDtype.INT8, ExportBlocks(1, 0, (1,), 0, 3, 4, KvDtype.INT8_CHANNEL)),
        (KvDtype.INT8, ImportBlocks(1, 0, (1,), 0, 3, WireRun(KvDtype.INT8_CHANNEL, 4, 1))),
        (KvDtype.INT8, ImportBlocks(1, 0, (1,), 0, 3, WireRun(KvDtype.INT8_CHANNEL, 8, 1, 0, 4))),
        (KvDtype.BF16, ExportBlocks(1, 0, (1, 2), 0, 3, 4, KvDtype.FP32)),
        (KvDtype.BF16, ImportBlocks(1, 0, (1, 2), 0, 3, WireRun(KvDtype.FP32, 4, 2))),
        (KvDtype.BF16, ImportBlocks(1, 0, (1,), 0, 3, WireRun(KvDtype.BF16, 4, 3, 0, 8))),
        (KvDtype.BF16, ImportBlocks(1, 0, (1,), 0, 3, WireRun(KvDtype.BF16, 4, 0))),
        (KvDtype.BF16, ImportBlocks(1, 0, (1,), 0, 3, WireRun(KvDtype.BF16, 0, 1))),
        (KvDtype.BF16, ImportBlocks(1, 0, (1,), 0, 3, WireRun(KvDtype.BF16, 4, 1, 0, -1))),
        (KvDtype.BF16, ImportBlocks(1, 0, (1, 1), 0, 3, WireRun(KvDtype.BF16, 8, 1))),
        (KvDtype.BF16, ImportBlocks(1, 0, (BLOCKS,), 0, 3, WireRun(KvDtype.BF16, 8, 1))),
        (KvDtype.BF16, ImportBlocks(1, 0, (-1,), 0, 3, WireRun(KvDtype.BF16, 8, 1))),
        (KvDtype.BF16, ImportBlocks(1, 0, (1,), 1, 3, WireRun(KvDtype.BF16, 8, 1))),
    ],
)
def test_orders_that_do_not_fit_change_nothing(dtype, order):
    pool, staging = full_pool(dtype), slab(slot_bytes=2 * replace(SPEC, dtype=KvDtype.BF16).block_bytes)
    before, slots, device = bits(pool), bytes(staging.whole), ClockDevice(Races())
    for transfers in (DirectTransfers(pool, staging), StagedTransfers(pool, staging, device, Uploads(device))):
        ask = transfers.export_blocks if isinstance(order, ExportBlocks) else transfers.import_blocks
        with pytest.raises(InvariantError):
            ask(order)
    assert torch.equal(bits(pool), before)
    assert bytes(staging.whole) == slots


def test_an_engine_turns_what_it_exports_and_imports():
    settings = EngineSettings(str(FAMILIES / "qwen2"), "fp32", 4, 1 << 20, 0, slots=2, threads=1)
    engine = Engine(settings, nameless_file(), progress=lambda _: None)
    layers = engine.ready.kv_spec.layers
    engine.obey(ExportBlocks(5, 0, (0, 1), 0, layers, 8))
    engine.obey(ExportBlocks(5, 1, (0, 1), 0, layers, 8, KvDtype.INT8_CHANNEL))
    assert bytes(engine._slab.slot(0)) != bytes(engine._slab.slot(1))
    run = WireRun(KvDtype.INT8_CHANNEL, 8, 1, skip_tokens=2)
    with pytest.raises(InvariantError):
        engine.obey(ImportBlocks(6, 2, (3, 4), 0, layers, run))
    assert engine.obey(ImportBlocks(6, 1, (3, 4), 0, layers, run)).transfer_id == 6
