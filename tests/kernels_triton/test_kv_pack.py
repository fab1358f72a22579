"""The block copies: every byte against a second description of the formats, and against their torch twins."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_pack import KvPart, kernel, reference
from kernels.paged import KvWire, PoolShape
from tests.kernels.oracle import CHANNEL, INT8, decoded, encoded, poison, pool_of, tile_bytes
from tests.kernels_triton.fence import Fence
from tests.kernels_triton.paged_requests import FP16, FP32

PAIRS = [
    (pool, wire)
    for pool in (FP32, FP16, INT8)
    for wire in (FP32, FP16, INT8, CHANNEL)
    if (pool, wire) != (INT8, CHANNEL)
]
ORDERS = ["BLHNC", "BHLNC", "LBHNC"]
SHAPE = PoolShape(6, 3, 4, 4, 16)
WHOLE = KvPart(0, 3, 0, 4)


def fenced_pool(fence, fmt, order="BLHNC", shape=SHAPE):
    """Random numbers all over."""
    pool = pool_of(fmt, shape, order)
    numbers = torch.randn(shape.blocks, shape.layers, shape.kv_heads, shape.block_tokens, 2, shape.head_dim)
    pool.grid.copy_(encoded(numbers, fmt).view(fmt.dtype))
    return pool_of(fmt, shape, order, fence.around(pool.tiles.view(torch.uint8).view(-1)))


def wire_for(fence, fmt, blocks, part, shape=SHAPE):
    size = (len(blocks), part.layers, part.heads, fmt.tile_bytes(shape.block_tokens, shape.head_dim))
    return KvWire(fence.around(torch.randint(0, 256, size, dtype=torch.uint8)), fmt)


def parts(shape: PoolShape):
    def spans(size: int):
        return st.integers(0, size - 1).flatmap(lambda first: st.tuples(st.just(first), st.integers(1, size - first)))

    return st.tuples(spans(shape.layers), spans(shape.kv_heads)).map(lambda both: KvPart(*both[0], *both[1]))


shapes = st.builds(
    PoolShape,
    st.just(5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 4, 6, 16]),
    st.sampled_from([8, 20, 32]),
)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    shape_and_part=shapes.flatmap(lambda shape: st.tuples(st.just(shape), parts(shape))),
    formats=st.sampled_from(PAIRS),
    order=st.sampled_from(ORDERS),
    blocks=st.permutations(range(5)).flatmap(lambda blocks: st.integers(1, 4).map(lambda count: blocks[:count])),
    missing_tokens=st.integers(0, 40),
)
def test_both_ways_give_the_bytes_of_the_torch_twins(seed, shape_and_part, formats, order, blocks, missing_tokens):
    torch.manual_seed(seed)
    (shape, part), (pool_format, wire_format), fence = shape_and_part, formats, Fence()
    pool, listed = fenced_pool(fence, pool_format, order, shape), fence.around(torch.tensor(blocks))
    valid_tokens = max(len(blocks) * shape.block_tokens - missing_tokens, 0)
    wires = [wire_for(fence, wire_format, blocks, part, shape) for _ in range(2)]
    before = tile_bytes(pool).clone()
    kernel.kv_pack(pool, listed, part, valid_tokens, wires[0])
    reference.kv_pack(pool, listed, part, valid_tokens, wires[1])
    assert torch.equal(wires[0].tiles, wires[1].tiles)
    assert torch.equal(tile_bytes(pool), before)
    targets = [poison(fenced_pool(fence, pool_format, order, shape)) for _ in range(2)]
    targets[1].tiles.copy_(targets[0].tiles)
    kernel.kv_unpack(wires[0], listed, part, targets[0])
    reference.kv_unpack(wires[1], listed, part, targets[1])
    assert torch.equal(tile_bytes(targets[0]), tile_bytes(targets[1]))
    assert torch.equal(wires[0].tiles, wires[1].tiles)
    fence.check()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fmt", [FP32, FP16, INT8], ids=str)
def test_pack_then_unpack_keeps_every_bit(fence, fmt, order):
    pool, target = fenced_pool(fence, fmt), fenced_pool(fence, fmt, order)
    pool.tiles.view(torch.uint8).random_(0, 256)
    expected = tile_bytes(target)
    from_blocks, to_blocks = torch.tensor([5, 0, 3]), torch.tensor([1, 4, 2])
    part = KvPart(1, 2, 1, 2)
    wire = wire_for(fence, fmt, from_blocks, part)
    kernel.kv_pack(pool, from_blocks, part, 3 * SHAPE.block_tokens, wire)
    kernel.kv_unpack(wire, to_blocks, part, target)
    expected[to_blocks, 1:, 1:3] = tile_bytes(pool)[from_blocks, 1:, 1:3]
    assert torch.equal(tile_bytes(target), expected)


@pytest.mark.parametrize(("pool_format", "wire_format"), PAIRS, ids=str)
def test_head_and_layer_ranges_recombine_to_the_whole(fence, pool_format, wire_format):
    pool, blocks, valid = fenced_pool(fence, pool_format, "BHLNC"), torch.tensor([5, 2]), 6
    whole = wire_for(fence, wire_format, blocks, WHOLE)
    kernel.kv_pack(pool, blocks, WHOLE, valid, whole)
    for first_layer, layers in ((0, 1), (1, 2)):
        for first_head, heads in ((0, 3), (3, 1)):
            part = KvPart(first_layer, layers, first_head, heads)
            wire = wire_for(fence, wire_format, blocks, part)
            kernel.kv_pack(pool, blocks, part, valid, wire)
            piece = whole.tiles[:, first_layer : first_layer + layers, first_head : first_head + heads]
            assert torch.equal(wire.tiles, piece)


@pytest.mark.parametrize(("pool_format", "wire_format"), PAIRS, ids=str)
def test_the_order_of_a_pool_does_not_show_on_the_wire(fence, pool_format, wire_format):
    wires = []
    for order in ORDERS:
        torch.manual_seed(3)
        pool, blocks = fenced_pool(fence, pool_format, order), torch.tensor([5, 2, 0])
        wires.append(wire_for(fence, wire_format, blocks, WHOLE))
        kernel.kv_pack(pool, blocks, WHOLE, 9, wires[-1])
    assert torch.equal(wires[0].tiles, wires[1].tiles)
    assert torch.equal(wires[0].tiles, wires[2].tiles)


@pytest.mark.parametrize("wire_format", [INT8, CHANNEL], ids=str)
def test_what_is_not_valid_counts_in_no_scale(fence, wire_format):
    pool, blocks = fenced_pool(fence, FP32), torch.tensor([1, 0])
    pool.values[0, :, :, 2:] = float("nan")
    wire = wire_for(fence, wire_format, blocks, WHOLE)
    kernel.kv_pack(pool, blocks, WHOLE, 6, wire)
    numbers = pool.values[blocks].unflatten(-1, (2, 16)).clone()
    numbers[1, :, :, 2:] = 0
    assert torch.equal(wire.tiles, encoded(numbers, wire_format))
    assert (decoded(wire.tiles, wire_format, 16)[1, :, :, 2:] == 0).all()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    ("pool_format", "wire_format"), [(FP16, FP16), (INT8, INT8), (FP16, CHANNEL), (INT8, FP32)], ids=str
)
def test_the_head_dims_of_service(fence, pool_format, wire_format, head_dim):
    shape, blocks = PoolShape(3, 1, 2, 16, head_dim), torch.tensor([2, 0])
    part, pool = KvPart(0, 1, 0, 2), fenced_pool(fence, pool_format, "BLHNC", shape)
    wires = [wire_for(fence, wire_format, blocks, part, shape) for _ in range(2)]
    kernel.kv_pack(pool, blocks, part, 27, wires[0])
    reference.kv_pack(pool, blocks, part, 27, wires[1])
    assert torch.equal(wires[0].tiles, wires[1].tiles)
