"""kv_unpack_tokens: tokens of blocks of one size into those of another, in all formats; nothing else is written."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.kv_pack import KvPart, TokenSpan, kv_pack, kv_unpack, kv_unpack_tokens
from kernels.paged import KvFormat, KvWire, PagedPool, PoolShape
from kvoy.core.errors import InvariantError
from tests.kernels.oracle import CHANNEL, INT8, decoded, encoded, pool_of, tile_bytes

FLOATS = [KvFormat(torch.float32), KvFormat(torch.bfloat16), KvFormat(torch.float16)]
PAIRS = [
    (pool, wire) for pool in (*FLOATS, INT8) for wire in (*FLOATS, INT8, CHANNEL) if (pool, wire) != (INT8, CHANNEL)
]
LAYERS, HEADS, DIM, BLOCKS = 3, 2, 16, 7
PART = KvPart(1, 2, 1, 1)


def shape_of(block_tokens: int) -> PoolShape:
    return PoolShape(BLOCKS, LAYERS, HEADS, block_tokens, DIM)


def filled(fmt: KvFormat, block_tokens: int) -> PagedPool:
    pool = pool_of(fmt, shape_of(block_tokens), "BLHNC")
    numbers = torch.randn(BLOCKS, LAYERS, HEADS, block_tokens, 2, DIM)
    pool.grid.copy_(encoded(numbers, fmt).view(fmt.dtype))
    return pool


def wire_of(fmt: KvFormat, blocks: int, block_tokens: int) -> KvWire:
    numbers = torch.randn(blocks, PART.layers, PART.heads, block_tokens, 2, DIM)
    return KvWire(encoded(numbers, fmt).contiguous(), fmt)


def rows(pool: PagedPool, block: int, place: int) -> list[torch.Tensor]:
    """What a token is in the part's layers and heads: numbers or codes, and scales if there are any."""
    found = pool.values[block, 1:3, 1:2, place]
    return [found] if pool.scales is None else [found, pool.scales[block, 1:3, 1:2, place]]


def told(wire: KvWire, pool_format: KvFormat, token: int, block_tokens: int) -> list[torch.Tensor]:
    """The same of a token of the wire, as the pool is to have it."""
    if wire.format == pool_format:
        size = wire.format.tile_bytes(block_tokens, DIM)
        twin = pool_of(pool_format, PoolShape(len(wire.tiles), 2, 1, block_tokens, DIM), "BLHNC", wire.tiles.view(-1))
        assert size == twin.format.tile_bytes(block_tokens, DIM)
        block, place = divmod(token, block_tokens)
        found = twin.values[block, :, :, place]
        return [found] if twin.scales is None else [found, twin.scales[block, :, :, place]]
    block, place = divmod(token, block_tokens)
    numbers = decoded(wire.tiles, wire.format, DIM).float()[block, :, :, place : place + 1]
    alone = encoded(numbers, pool_format)  # tiles of one token
    if pool_format != INT8:
        return [alone.view(pool_format.dtype)]
    return [alone[..., : 2 * DIM].view(torch.int8), alone[..., 2 * DIM :].contiguous().view(torch.float16)]


@pytest.mark.usefixtures("each_way")
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), formats=st.sampled_from(PAIRS), sizes=st.sampled_from([(4, 8), (8, 4), (4, 4), (16, 2), (1, 8)]))
def test_tokens_of_the_span_go_to_their_places_and_nothing_else_changes(data, formats, sizes):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    (pool_format, wire_format), (block_tokens, wire_block_tokens) = formats, sizes
    pool, wire = filled(pool_format, block_tokens), wire_of(wire_format, 3, wire_block_tokens)
    blocks = data.draw(st.permutations(range(BLOCKS)))[: data.draw(st.integers(1, 4))]
    tokens = data.draw(st.integers(0, min(3 * wire_block_tokens, len(blocks) * block_tokens)))
    first_token = data.draw(st.integers(0, 3 * wire_block_tokens - tokens))
    first_place = data.draw(st.integers(0, len(blocks) * block_tokens - tokens))
    expected = pool_of(pool_format, shape_of(block_tokens), "BLHNC", tile_bytes(pool).view(-1))
    for token in range(tokens):
        block, place = divmod(first_place + token, block_tokens)
        news = told(wire, pool_format, first_token + token, wire_block_tokens)
        for old, new in zip(rows(expected, blocks[block], place), news, strict=True):
            old.copy_(new)
    span = TokenSpan(wire_block_tokens, first_token, tokens, first_place)
    kv_unpack_tokens(wire, span, torch.tensor(blocks), PART, pool)
    assert torch.equal(tile_bytes(pool), tile_bytes(expected))


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(("pool_format", "wire_format"), PAIRS, ids=str)
def test_whole_blocks_of_one_size_are_as_unpacked(pool_format, wire_format):
    pool, twin = (pool_of(pool_format, shape_of(4), "BLHNC") for _ in range(2))
    blocks, wire = torch.tensor([5, 0, 3]), wire_of(wire_format, 3, 4)
    kv_unpack(wire, blocks, PART, pool)
    kv_unpack_tokens(wire, TokenSpan(4, 0, 12, 0), blocks, PART, twin)
    assert torch.equal(tile_bytes(pool), tile_bytes(twin))


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("fmt", [*FLOATS, INT8], ids=str)
def test_blocks_of_another_size_and_back_keep_every_bit(fmt):
    small, large = filled(fmt, 4), pool_of(fmt, shape_of(8), "BLHNC")
    small.tiles.view(torch.uint8).random_(0, 256)
    whole, again = KvPart(0, LAYERS, 0, HEADS), pool_of(fmt, shape_of(4), "BLHNC")
    for source, target, size, blocks in (
        (small, large, 4, ([0, 1, 2, 3], [6, 1])),
        (large, again, 8, ([6, 1], range(4))),
    ):
        tiles = torch.empty((len(blocks[0]), LAYERS, HEADS, fmt.tile_bytes(size, DIM)), dtype=torch.uint8)
        wire = KvWire(tiles, fmt)
        kv_pack(source, torch.tensor(blocks[0]), whole, 16, wire)
        kv_unpack_tokens(wire, TokenSpan(size, 0, 16, 0), torch.tensor(blocks[1]), whole, target)
    assert torch.equal(tile_bytes(again)[:4], tile_bytes(small)[:4])


@pytest.mark.parametrize(
    "span",
    [TokenSpan(8, 0, 17, 0), TokenSpan(8, -1, 4, 0), TokenSpan(8, 13, 4, 0), TokenSpan(8, 0, 4, -1),
     TokenSpan(8, 0, 4, 5), TokenSpan(8, 0, -1, 0), TokenSpan(4, 0, 4, 0)],
)  # fmt: skip
def test_a_span_that_is_not_there_is_refused_before_anything_is_written(span):
    pool, wire = filled(FLOATS[0], 4), wire_of(FLOATS[0], 2, 8)
    before = tile_bytes(pool)
    with pytest.raises(InvariantError):
        kv_unpack_tokens(wire, span, torch.tensor([2, 5]), PART, pool)
    assert torch.equal(tile_bytes(pool), before)


def test_what_is_int8_already_is_not_rounded_again():
    pool = filled(INT8, 4)
    with pytest.raises(InvariantError, match="twice"):
        kv_unpack_tokens(wire_of(CHANNEL, 2, 8), TokenSpan(8, 0, 8, 0), torch.tensor([2, 5]), PART, pool)
