"""KvWrite, kv_pack, kv_unpack: every bit where it belongs and nowhere else."""

import pytest
import torch

from kernels.kv_pack import KvPart, kv_pack, kv_unpack
from kernels.kv_write import Angles, KvWrite, QkNorm
from kernels.paged import KvFormat, KvWire, PagedPool
from kvoy.core.errors import InvariantError
from tests.kernels.paged_case import BLOCK_TOKENS, HEAD_DIM, HEADS, KV_HEADS, poisoned_pool

ORDERS = ["BLHNC", "BHLNC", "LBHNC"]
INTEGER_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
LAYERS, BLOCKS = 3, 9
WHOLE = KvPart(0, LAYERS, 0, KV_HEADS)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request) -> torch.dtype:
    return request.param


def random_bits(pool: PagedPool) -> PagedPool:
    """Any bit pattern, NaN payloads and denormals included."""
    pool.tiles.view(torch.uint8).random_(0, 256)
    return pool


def random_wire(pool: PagedPool, blocks: int, part: KvPart) -> torch.Tensor:
    tile_bytes = pool.format.tile_bytes(BLOCK_TOKENS, HEAD_DIM)
    return torch.randint(0, 256, (blocks, part.layers, part.heads, tile_bytes), dtype=torch.uint8)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(INTEGER_OF[values.dtype])


def random_angles(tokens: int) -> Angles:
    turn = torch.rand(tokens, HEAD_DIM // 2) * 7
    return Angles(turn.cos(), turn.sin())


def rotated(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """x [tokens, heads, head dim] by the definition in complex numbers, float64."""
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.complex(
        angles.cos.double(), angles.sin.double()
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), -1)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("padding", [0, 3])
def test_write_puts_each_token_in_its_slot_and_touches_nothing_else(dtype, order, padding):
    pool = random_bits(poisoned_pool(BLOCKS, LAYERS, dtype, order))
    expected = pool.values.clone()
    slots = torch.randperm(BLOCKS * BLOCK_TOKENS)[:11]
    slots[:padding] = -1
    write = KvWrite(slots)
    for layer in (1, 0):
        qkv = torch.randn(11, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
        write(qkv, random_angles(11), pool.layer(layer))
        for token in range(padding, 11):
            slot = int(slots[token])
            place = expected[slot // BLOCK_TOKENS, layer, :, slot % BLOCK_TOKENS]
            place[:, :HEAD_DIM], place[:, HEAD_DIM:] = qkv[token, HEADS:-KV_HEADS], qkv[token, -KV_HEADS:]
    assert torch.equal(bits(pool.values), bits(expected))


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("tokens", [1, 11, 300])
def test_write_norms_and_rotates_q_and_k_in_place_and_leaves_v(dtype, has_norms, tokens):
    pool = poisoned_pool(tokens, 1, dtype)
    weights = torch.rand(2, HEAD_DIM) + 0.5
    norms = QkNorm(weights[0], weights[1], 1e-5) if has_norms else None
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    q, k, v = (part.clone() for part in qkv.split([HEADS, KV_HEADS, KV_HEADS], 1))
    angles = random_angles(tokens)
    KvWrite(torch.arange(tokens))(qkv, angles, pool.layer(0), norms)
    if has_norms:
        q, k = normed(q, weights[0], 1e-5), normed(k, weights[1], 1e-5)
    step = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(qkv[:, :HEADS].double(), rotated(q, angles), rtol=step, atol=step)
    torch.testing.assert_close(qkv[:, HEADS:-KV_HEADS].double(), rotated(k, angles), rtol=step, atol=step)
    assert torch.equal(qkv[:, -KV_HEADS:], v)


@pytest.mark.usefixtures("each_way")
def test_write_refuses_shapes_that_do_not_fit():
    pool = poisoned_pool(BLOCKS, LAYERS, torch.float32)
    qkv, slots = torch.randn(2, HEADS + 2 * KV_HEADS, HEAD_DIM), torch.tensor([0, 1])
    angles = random_angles(2)
    for wrong_qkv, wrong_slots, wrong_angles in (
        (qkv[:, : 2 * KV_HEADS], slots, angles),
        (qkv[..., ::2], slots, angles),
        (qkv, slots[:1], angles),
        (qkv, slots, Angles(angles.cos[:, 1:], angles.sin)),
    ):
        with pytest.raises(InvariantError):
            KvWrite(wrong_slots)(wrong_qkv, wrong_angles, pool.layer(0))
    assert pool.values.isnan().all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("part", [WHOLE, KvPart(1, 1, 0, KV_HEADS), KvPart(1, 2, 1, 1)])
def test_pack_then_unpack_into_other_blocks_keeps_every_bit(dtype, order, part):
    source = random_bits(poisoned_pool(BLOCKS, LAYERS, dtype, order))
    target = random_bits(poisoned_pool(BLOCKS, LAYERS, dtype, "BLHNC"))
    expected = target.values.clone()
    from_blocks, to_blocks = torch.tensor([7, 0, 4]), torch.tensor([2, 8, 3])
    wire = random_wire(source, 3, part)
    kv_pack(source, from_blocks, part, 3 * BLOCK_TOKENS, KvWire(wire, source.format))
    kv_unpack(KvWire(wire, source.format), to_blocks, part, target)
    layers = slice(part.first_layer, part.first_layer + part.layers)
    heads = slice(part.first_head, part.first_head + part.heads)
    for a, b in zip([7, 0, 4], [2, 8, 3], strict=True):
        expected[b, layers, heads] = source.values[a, layers, heads]
    assert torch.equal(bits(target.values), bits(expected))


@pytest.mark.parametrize("valid_tokens", [0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 3, 3 * BLOCK_TOKENS])
def test_pack_zeroes_what_is_not_filled(dtype, valid_tokens):
    source = random_bits(poisoned_pool(BLOCKS, LAYERS, dtype))
    wire = random_wire(source, 3, WHOLE)
    blocks = torch.tensor([5, 1, 8])
    kv_pack(source, blocks, WHOLE, valid_tokens, KvWire(wire, source.format))
    values = wire.view(dtype).unflatten(3, (BLOCK_TOKENS, 2 * HEAD_DIM))
    by_token = bits(values).permute(0, 3, 1, 2, 4).flatten(0, 1)
    filled = bits(source.values[blocks]).permute(0, 3, 1, 2, 4).flatten(0, 1)
    assert torch.equal(by_token[:valid_tokens], filled[:valid_tokens])
    assert (by_token[valid_tokens:] == 0).all()


def test_pack_refuses_shapes_that_do_not_fit():
    pool = poisoned_pool(BLOCKS, LAYERS, torch.float32)
    pool.values.zero_()
    part = KvPart(0, 2, 0, KV_HEADS)
    wire = torch.full_like(random_wire(pool, 2, part), 7)
    two = torch.tensor([0, 1])
    wrong = [
        (two, KvPart(2, 2, 0, KV_HEADS), wire),
        (two, KvPart(-1, 2, 0, KV_HEADS), wire),
        (two, KvPart(0, 2, 1, KV_HEADS), wire),
        (two[:1], part, wire),
        (two, part, wire.view(torch.int8)),
        (two, part, wire[..., ::2]),
    ]
    for blocks, wrong_part, buffer in wrong:
        with pytest.raises(InvariantError):
            kv_pack(pool, blocks, wrong_part, BLOCK_TOKENS, KvWire(buffer, pool.format))
        with pytest.raises(InvariantError):
            kv_unpack(KvWire(buffer, pool.format), blocks, wrong_part, pool)
    assert (wire == 7).all()
    assert (pool.values == 0).all()


def test_a_pool_that_does_not_fit_its_memory_is_refused():
    pool = poisoned_pool(BLOCKS, LAYERS, torch.float32)
    buffer = pool.tiles.view(torch.uint8).flatten()
    for wrong in (buffer[:-1], buffer.view(torch.int8), buffer.view(2, -1)):
        with pytest.raises(InvariantError):
            PagedPool(wrong, pool.format, pool.shape, pool.strides)
    with pytest.raises(InvariantError):
        PagedPool(buffer, KvFormat(torch.int8, "channel"), pool.shape, pool.strides)
    with pytest.raises(InvariantError):
        KvFormat(torch.int8)
