"""Int8 in compiled ops, to the bit as in torch: lines of numbers (kernels/codes.py), and whole tiles in kv_pack."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import codes, cpu, jit
from kernels.cpu import words
from kernels.int8 import quantise
from kernels.jit import BF16, FP32
from kernels.kv_pack import KvPart, compiled, kv_pack, kv_unpack, reference
from kernels.paged import KvFormat, KvWire, PagedPool, PoolShape
from tests.kernels.oracle import CHANNEL, INT8, pool_of

FLOATS = [KvFormat(torch.float32), KvFormat(torch.bfloat16)]
CODES = {torch.float32: FP32, torch.bfloat16: BF16}
COLUMNS, HEAD_DIM, BLOCK_TOKENS = 64, 64, 5
SHAPE = PoolShape(6, 3, 3, BLOCK_TOKENS, HEAD_DIM)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


def _quantise_lines(given):
    for line in range(given[3]):
        source, into = given[0] + line * COLUMNS * jit.item_bytes(given[4]), given[1] + line * COLUMNS
        codes.quantise(source, given[4], into, given[2] + line * 2, COLUMNS)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty((len(x), 1), dtype=torch.float16)
    given = words(x.data_ptr(), found.data_ptr(), scales.data_ptr(), len(x), CODES[x.dtype])
    jit.op(_quantise_lines)(given, alone=True)
    return found, scales


def check_lines(x: torch.Tensor) -> None:
    for found, expected in zip(quantised(x), quantise(x, -1), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_halves_between_two_codes_go_to_the_even_one(dtype):
    """A product with a rounded reciprocal gets every twentieth of these wrong."""
    scale = (torch.rand(20_000, 1) * 0.05 + 1e-3).half().float()
    x = (torch.randint(-126, 126, (20_000, COLUMNS)) + 0.5) * scale
    x[:, 0] = 127 * scale[:, 0]
    check_lines(x.to(dtype))


@pytest.mark.parametrize("step", [-1, 1])
def test_numbers_beside_the_middle_between_two_codes_go_to_the_nearer_one(step):
    scale = (torch.rand(20_000, 1) * 0.05 + 1e-3).half().float()
    x = (torch.randint(-126, 126, (20_000, COLUMNS)) + 0.5) * scale
    x = (x.view(torch.int32) + step).view(torch.float32)
    x[:, 0] = 127 * scale[:, 0]
    check_lines(x)


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-9, 3e-6, 1e-5, 1.0, 300.0, 1e7, 1e30])
def test_lines_of_any_size(size):
    x = torch.randn(2000, COLUMNS) * size
    x[0] = 0
    check_lines(x)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_lines_with_what_is_no_number(dtype):
    x = torch.randn(6, COLUMNS)
    for line, odd in enumerate((math.inf, -math.inf, math.nan, -math.nan, 3e38)):
        x[line, 17 * line % COLUMNS] = odd
    x[5, 3], x[5, 4] = math.inf, math.nan
    check_lines(x.to(dtype))


def random_pool(fmt: KvFormat, shape: PoolShape, order: str) -> PagedPool:
    pool = pool_of(fmt, shape, order)
    if fmt == INT8:
        pool.values.random_(-127, 128)
        pool.scales.uniform_(0, 0.1)
    else:
        pool.values.normal_()
    return pool


def wire_of(fmt: KvFormat, blocks: int, part: KvPart) -> KvWire:
    size = (blocks, part.layers, part.heads, fmt.tile_bytes(BLOCK_TOKENS, HEAD_DIM))
    return KvWire(torch.randint(0, 256, size, dtype=torch.uint8), fmt)


def spans(size: int):
    return st.integers(0, size - 1).flatmap(lambda first: st.tuples(st.just(first), st.integers(1, size - first)))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    formats=st.sampled_from([*((fmt, CHANNEL) for fmt in FLOATS), (INT8, FLOATS[0]), (FLOATS[1], INT8)]),
    order=st.sampled_from(["BLHNC", "BHLNC", "LBHNC"]),
    part=st.tuples(spans(SHAPE.layers), spans(SHAPE.kv_heads)).map(lambda both: KvPart(*both[0], *both[1])),
    blocks=st.permutations(range(SHAPE.blocks)).flatmap(lambda all_: st.integers(1, 6).map(lambda n: all_[:n])),
    missing_tokens=st.integers(0, 3 * BLOCK_TOKENS),
)
def test_both_ways_give_the_bytes_of_the_torch_twins(seed, formats, order, part, blocks, missing_tokens):
    torch.manual_seed(seed)
    pool, listed = random_pool(formats[0], SHAPE, order), torch.tensor(blocks)
    valid_tokens = max(len(blocks) * BLOCK_TOKENS - missing_tokens, 0)
    wires = [wire_of(formats[1], len(blocks), part) for _ in range(2)]
    for twin, wire in zip((compiled, reference), wires, strict=True):
        twin.kv_pack(pool, listed, part, valid_tokens, wire)
    assert torch.equal(wires[0].tiles, wires[1].tiles)
    targets = [pool_of(formats[0], SHAPE, order) for _ in range(2)]
    for twin, target in zip((compiled, reference), targets, strict=True):
        twin.kv_unpack(wires[0], listed, part, target)
    assert torch.equal(targets[0].tiles, targets[1].tiles)


def test_a_channel_with_a_nan_comes_back_as_one_and_the_others_as_ever():
    pool, part, blocks = random_pool(FLOATS[0], SHAPE, "BLHNC"), KvPart(0, 3, 0, 3), torch.arange(SHAPE.blocks)
    clean, broken = wire_of(CHANNEL, SHAPE.blocks, part), wire_of(CHANNEL, SHAPE.blocks, part)
    kv_pack(pool, blocks, part, SHAPE.blocks * BLOCK_TOKENS, clean)
    pool.values[:, :, :, 2, 9] = math.nan
    pool.values[:, :, :, 3, HEAD_DIM + 9] = math.nan
    kv_pack(pool, blocks, part, SHAPE.blocks * BLOCK_TOKENS, broken)
    expected, found = (random_pool(FLOATS[0], SHAPE, "BLHNC") for _ in range(2))
    kv_unpack(clean, blocks, part, expected)
    kv_unpack(broken, blocks, part, found)
    expected.values[..., 9] = expected.values[:, :, :, 3, HEAD_DIM:] = math.nan
    torch.testing.assert_close(found.values, expected.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_share_the_blocks(threads):
    before = torch.get_num_threads()
    shape, part = PoolShape(40, 4, 3, 16, HEAD_DIM), KvPart(0, 4, 0, 3)
    pool, blocks = random_pool(FLOATS[1], shape, "BLHNC"), torch.randperm(40)
    size = (40, 4, 3, CHANNEL.tile_bytes(16, HEAD_DIM))
    wires = [KvWire(torch.empty(size, dtype=torch.uint8), CHANNEL) for _ in range(2)]
    torch.set_num_threads(threads)
    try:
        compiled.kv_pack(pool, blocks, part, 40 * 16 - 3, wires[0])
    finally:
        torch.set_num_threads(before)
    reference.kv_pack(pool, blocks, part, 40 * 16 - 3, wires[1])
    assert torch.equal(wires[0].tiles, wires[1].tiles)


def test_what_is_not_compiled_for_is_left_to_torch():
    half, odd = KvFormat(torch.float16), PoolShape(2, 1, 1, 4, 24)
    assert cpu.compiles()
    for fmt, wire_format, shape in ((half, CHANNEL, SHAPE), (FLOATS[0], half, SHAPE), (FLOATS[0], CHANNEL, odd)):
        size = (1, 1, 1, wire_format.tile_bytes(shape.block_tokens, shape.head_dim))
        pool, wire = pool_of(fmt, shape, "BLHNC"), KvWire(torch.ones(size, dtype=torch.uint8), wire_format)
        assert not compiled.serves(pool, wire)
        kv_pack(pool, torch.tensor([1]), KvPart(0, 1, 0, 1), shape.block_tokens, wire)
        assert (wire.tiles == 0).all()
