"""Int8 pools and wires: codes and scales to the bit, attention over them, and every conversion that is allowed."""

import math

import pytest
import torch

from kernels.chunk_prefill import ChunkPrefill
from kernels.int8 import quantise
from kernels.kv_pack import KvPart, kv_pack, kv_unpack
from kernels.kv_write import Angles, KvWrite
from kernels.paged import KvFormat, KvWire, PoolShape
from kernels.paged_decode import PagedDecode
from kvoy.core.errors import InvariantError
from tests.kernels.oracle import CHANNEL, INT8, decoded, encoded, poison, pool_of, quantised, tile_bytes
from tests.kernels.paged_case import BLOCK_TOKENS, HEAD_DIM, HEADS, KV_HEADS, SCALE, Guarded, PagedCase, tolerance

FLOATS = [KvFormat(torch.float32), KvFormat(torch.bfloat16), KvFormat(torch.float16)]
PAIRS = [
    (pool, wire) for pool in (*FLOATS, INT8) for wire in (*FLOATS, INT8, CHANNEL) if (pool, wire) != (INT8, CHANNEL)
]
ORDERS = ["BLHNC", "BHLNC", "LBHNC"]
SHAPE = PoolShape(9, 3, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
PART = KvPart(1, 2, 1, 1)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


def filled_pool(fmt: KvFormat, order: str = "BLHNC"):
    pool = pool_of(fmt, SHAPE, order)
    numbers = torch.randn(SHAPE.blocks, SHAPE.layers, KV_HEADS, BLOCK_TOKENS, 2, HEAD_DIM)
    pool.grid.copy_(encoded(numbers, fmt).view(fmt.dtype))
    return pool


def empty_wire(fmt: KvFormat, blocks: int, part: KvPart = PART) -> KvWire:
    shape = (blocks, part.layers, part.heads, fmt.tile_bytes(BLOCK_TOKENS, HEAD_DIM))
    return KvWire(torch.randint(0, 256, shape, dtype=torch.uint8), fmt)


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("size", [1e-9, 1e-5, 1.0, 300.0, 1e7])
def test_codes_and_scales_are_those_of_the_definition(dim, size):
    x = torch.randn(5, 7, 16) * size
    x[0] = 0
    codes, scales = quantise(x, dim)
    expected_codes, expected_scales = quantised(x, dim)
    assert torch.equal(scales, torch.from_numpy(expected_scales))
    assert torch.equal(codes, torch.from_numpy(expected_codes))


def test_halves_are_rounded_to_even_and_what_is_too_large_is_cut_off():
    codes, scale = quantise(torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 127.0]), -1)
    assert scale.item() == 1
    assert codes.tolist() == [0, 2, 2, 0, -2, 127]
    codes, scale = quantise(torch.tensor([math.inf, -math.inf, 65504.0]), -1)
    assert scale.item() == 65504
    assert codes.tolist() == [127, -127, 1]


def test_a_nan_makes_its_whole_line_nan():
    codes, scales = quantise(torch.tensor([[1.0, math.nan], [1.0, 2.0]]), -1)
    assert (codes[0] * scales[0].float()).isnan().all()
    assert not scales[1].isnan()


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_stores_codes_and_scales_and_touches_nothing_else(dtype, order):
    pool = pool_of(INT8, SHAPE, order)
    pool.tiles.view(torch.uint8).random_(0, 256)
    expected = tile_bytes(pool)
    slots = torch.randperm(SHAPE.blocks * BLOCK_TOKENS)[:11]
    slots[:3] = -1
    qkv, turn = torch.randn(11, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype), torch.rand(11, HEAD_DIM // 2) * 7
    KvWrite(slots)(qkv, Angles(turn.cos(), turn.sin()), pool.layer(1))
    for token in range(3, 11):
        block, place = divmod(int(slots[token]), BLOCK_TOKENS)
        for head in range(KV_HEADS):
            kv = torch.stack((qkv[token, HEADS + head], qkv[token, HEADS + KV_HEADS + head]))
            alone = encoded(kv.unsqueeze(0), INT8)  # a tile of one token
            width = 2 * HEAD_DIM
            tile = expected[block, 1, head]
            tile[place * width : (place + 1) * width] = alone[:width]
            scales_at = BLOCK_TOKENS * width + 4 * place
            tile[scales_at : scales_at + 4] = alone[width:]
    assert torch.equal(tile_bytes(pool), expected)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_takes_all_that_a_number_can_be(dtype):
    pool = pool_of(INT8, SHAPE, "BLHNC")
    odd = [0.0, 1e-30, 1e-9, 3e38, float("inf"), -float("inf"), float("nan"), 127.0]
    qkv = torch.randn(len(odd), HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    qkv[0] = 0
    qkv[:, HEADS + KV_HEADS :, HEAD_DIM // 2] = torch.tensor(odd).to(dtype).unsqueeze(1)  # of v, which is not turned
    turn = torch.rand(len(odd), HEAD_DIM // 2) * 7
    KvWrite(torch.arange(len(odd)))(qkv, Angles(turn.cos(), turn.sin()), pool.layer(0))
    for token in range(len(odd)):
        codes, scale = quantise(qkv[token, HEADS + KV_HEADS :], -1)
        block, place = divmod(token, BLOCK_TOKENS)
        assert torch.equal(pool.values[block, 0, :, place, HEAD_DIM:], codes)
        torch.testing.assert_close(pool.scales[block, 0, :, place, 1:], scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_write_rounds_to_a_pool_of_another_float(pool_dtype):
    pool = pool_of(KvFormat(pool_dtype), SHAPE, "BLHNC")
    qkv, turn = torch.randn(3, HEADS + 2 * KV_HEADS, HEAD_DIM), torch.rand(3, HEAD_DIM // 2) * 7
    qkv = qkv.to(torch.bfloat16 if pool_dtype == torch.float32 else torch.float32)
    KvWrite(torch.tensor([5, 0, 9]))(qkv, Angles(turn.cos(), turn.sin()), pool.layer(1))
    stored = torch.stack([pool.values[slot // BLOCK_TOKENS, 1, :, slot % BLOCK_TOKENS] for slot in (5, 0, 9)])
    assert torch.equal(stored, torch.cat(qkv[:, HEADS:].chunk(2, 1), -1).to(pool_dtype))


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("fmt", [INT8, *FLOATS[:2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window_tokens", [None, 5])
def test_attention_equals_float64_attention_over_what_the_pool_means(dtype, window_tokens, fmt):
    is_bf16 = fmt.dtype == torch.bfloat16
    case = PagedCase([1, 4, 9, 23, 50], torch.bfloat16 if is_bf16 else torch.float32, "BHLNC", fmt)
    q = torch.randn(5, HEADS, HEAD_DIM).to(dtype)
    decoded_rows, chunked = Guarded(tuple(q.shape), dtype), Guarded(tuple(q.shape), dtype)
    starts = torch.arange(6, dtype=torch.int32)
    decode, prefill = (
        PagedDecode(case.tables, case.kv_lengths, 50),
        ChunkPrefill(case.tables, starts, case.kv_lengths, 1),
    )
    decode(q, case.kv, scale=SCALE, window_tokens=window_tokens, out=decoded_rows.out)
    prefill(q, case.kv, scale=SCALE, window_tokens=window_tokens, out=chunked.out)
    for row in range(5):
        expected = case.expected(row, q[row : row + 1], window_tokens)[0]
        for found in (decoded_rows.check(), chunked.check()):
            torch.testing.assert_close(found[row].double(), expected, atol=tolerance(dtype), rtol=0)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("valid_tokens", [0, 3, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS])
@pytest.mark.parametrize(("pool_format", "wire_format"), PAIRS, ids=str)
def test_pack_gives_the_bytes_of_the_valid_numbers(pool_format, wire_format, valid_tokens, order):
    pool = filled_pool(pool_format, order)
    blocks, wire = torch.tensor([7, 0, 4]), empty_wire(wire_format, 3)
    numbers = decoded(tile_bytes(pool), pool_format, HEAD_DIM)[blocks][:, 1:3, 1:2]
    if pool_format == INT8 != wire_format:
        numbers = numbers.float()  # a code times a scale is rounded to fp32 first
    for token in range(valid_tokens, 3 * BLOCK_TOKENS):
        numbers[token // BLOCK_TOKENS, :, :, token % BLOCK_TOKENS] = 0
    expected = encoded(numbers, wire_format)
    if pool_format == wire_format:
        expected = packed_by_hand(pool, blocks, valid_tokens)
    kv_pack(pool, blocks, PART, valid_tokens, wire)
    assert torch.equal(wire.tiles, expected)


def packed_by_hand(pool, blocks: torch.Tensor, valid_tokens: int) -> torch.Tensor:
    tiles = tile_bytes(pool)[blocks][:, 1:3, 1:2].clone()
    row_bytes = 2 * HEAD_DIM * pool.format.dtype.itemsize
    for token in range(valid_tokens, 3 * BLOCK_TOKENS):
        block, place = divmod(token, BLOCK_TOKENS)
        tiles[block, ..., place * row_bytes : (place + 1) * row_bytes] = 0
        if pool.scales is not None:
            scales_at = BLOCK_TOKENS * row_bytes + 4 * place
            tiles[block, ..., scales_at : scales_at + 4] = 0
    return tiles


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("pool_format", "wire_format"), PAIRS, ids=str)
def test_unpack_writes_the_part_and_nothing_else(wire_format, pool_format, order):
    pool = poison(pool_of(pool_format, SHAPE, order))
    expected = tile_bytes(pool)
    blocks, numbers = torch.tensor([2, 8, 3]), torch.randn(3, 2, 1, BLOCK_TOKENS, 2, HEAD_DIM)
    wire = KvWire(encoded(numbers, wire_format), wire_format)
    told = decoded(wire.tiles, wire_format, HEAD_DIM).float()
    expected[blocks, 1:3, 1:2] = wire.tiles if wire_format == pool_format else encoded(told, pool_format)
    kv_unpack(wire, blocks, PART, pool)
    assert torch.equal(tile_bytes(pool), expected)


def test_what_is_int8_already_is_never_rounded_again():
    pool = filled_pool(INT8)
    before = tile_bytes(pool)
    with pytest.raises(InvariantError, match="twice"):
        kv_pack(pool, torch.tensor([1]), PART, BLOCK_TOKENS, empty_wire(CHANNEL, 1))
    with pytest.raises(InvariantError, match="twice"):
        kv_unpack(empty_wire(CHANNEL, 1), torch.tensor([1]), PART, pool)
    assert torch.equal(tile_bytes(pool), before)


def test_keys_with_an_outlier_channel_lose_less_by_channel_than_by_token():
    pool = filled_pool(FLOATS[0])
    pool.values[..., 3] *= 50
    blocks, whole = torch.arange(SHAPE.blocks), KvPart(0, 3, 0, KV_HEADS)
    keys = decoded(tile_bytes(pool), FLOATS[0], HEAD_DIM)[..., 0, :]
    errors = []
    for fmt in (INT8, CHANNEL):
        wire = empty_wire(fmt, SHAPE.blocks, whole)
        kv_pack(pool, blocks, whole, SHAPE.blocks * BLOCK_TOKENS, wire)
        away = decoded(wire.tiles, fmt, HEAD_DIM)[..., 0, :] - keys
        errors.append((away.square().mean((0, 1, 2, 3)) / keys.square().mean((0, 1, 2, 3))).sqrt().mean())
    assert errors[1] * 3 < errors[0]
