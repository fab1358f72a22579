"""KvWrite, kv_pack, kv_unpack: every bit where it belongs and nowhere else."""

import pytest
import torch

from kernels.kv_pack import kv_pack, kv_unpack
from kernels.kv_write import KvWrite
from kvoy.core.errors import InvariantError
from tests.kernels.paged_case import BLOCK_TOKENS, HEAD_DIM, KV_HEADS, poisoned_pool

ORDERS = ["BLHNC", "BHLNC", "LBHNC"]
INTEGER_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
LAYERS, BLOCKS = 3, 9


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request) -> torch.dtype:
    return request.param


def random_bits(like: torch.Tensor) -> torch.Tensor:
    """Any bit pattern, NaN payloads and denormals included, in the shape and strides of ``like``."""
    integers = INTEGER_OF[like.dtype]
    limits = torch.iinfo(integers)
    bits = torch.empty_like(like).view(integers)
    return bits.copy_(torch.randint(limits.min, limits.max, like.shape, dtype=integers)).view(like.dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGER_OF[tensor.dtype])


@pytest.mark.parametrize("order", ORDERS)
def test_write_puts_each_token_in_its_slot_and_touches_nothing_else(dtype, order):
    pool = random_bits(poisoned_pool(BLOCKS, LAYERS, dtype, order))
    expected = pool.clone()
    slots = torch.randperm(BLOCKS * BLOCK_TOKENS)[:11]
    write = KvWrite(slots)
    for layer in (1, 0):
        qkv = torch.randn(11, 3 * KV_HEADS, HEAD_DIM).to(dtype)
        k, v = qkv[:, KV_HEADS : 2 * KV_HEADS], qkv[:, 2 * KV_HEADS :]
        for token, slot in enumerate(slots.tolist()):
            place = expected[slot // BLOCK_TOKENS, layer, :, slot % BLOCK_TOKENS]
            place[:, :HEAD_DIM], place[:, HEAD_DIM:] = k[token], v[token]
        write(k, v, pool[:, layer])
    assert torch.equal(bits(pool), bits(expected))


def test_write_refuses_shapes_that_do_not_fit():
    pool = poisoned_pool(BLOCKS, LAYERS, torch.float32)
    k = torch.randn(2, KV_HEADS, HEAD_DIM)
    slots = torch.tensor([0, 1])
    for wrong_k, wrong_slots in ((k[:, :1], slots), (k[..., ::2], slots), (k.bfloat16(), slots), (k, slots[:1])):
        with pytest.raises(InvariantError):
            KvWrite(wrong_slots)(wrong_k, k, pool[:, 0])
    assert pool.isnan().all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("first_layer", "layers"), [(0, LAYERS), (1, 1), (1, 2)])
def test_pack_then_unpack_into_other_blocks_keeps_every_bit(dtype, order, first_layer, layers):
    source = random_bits(poisoned_pool(BLOCKS, LAYERS, dtype, order))
    target = random_bits(poisoned_pool(BLOCKS, LAYERS, dtype, "BLHNC"))
    expected = target.clone()
    from_blocks, to_blocks = torch.tensor([7, 0, 4]), torch.tensor([2, 8, 3])
    wire = random_bits(torch.empty(3, layers, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_DIM, dtype=dtype))
    kv_pack(source, from_blocks, first_layer, 3 * BLOCK_TOKENS, wire)
    kv_unpack(wire, to_blocks, first_layer, target)
    for a, b in zip([7, 0, 4], [2, 8, 3], strict=True):
        expected[b, first_layer : first_layer + layers] = source[a, first_layer : first_layer + layers]
    assert torch.equal(bits(target), bits(expected))


@pytest.mark.parametrize("valid_tokens", [0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 3, 3 * BLOCK_TOKENS])
def test_pack_zeroes_what_is_not_filled(dtype, valid_tokens):
    source = random_bits(poisoned_pool(BLOCKS, LAYERS, dtype))
    wire = random_bits(torch.empty(3, LAYERS, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_DIM, dtype=dtype))
    blocks = torch.tensor([5, 1, 8])
    kv_pack(source, blocks, 0, valid_tokens, wire)
    by_token = bits(wire).permute(0, 3, 1, 2, 4).flatten(0, 1)
    filled = bits(source[blocks]).permute(0, 3, 1, 2, 4).flatten(0, 1)
    assert torch.equal(by_token[:valid_tokens], filled[:valid_tokens])
    assert (by_token[valid_tokens:] == 0).all()


def test_pack_refuses_shapes_that_do_not_fit():
    pool = torch.zeros(BLOCKS, LAYERS, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)
    wire = torch.full((2, 2, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_DIM), float("nan"))
    two = torch.tensor([0, 1])
    wrong = [(two, 2, wire), (two, -1, wire), (two[:1], 0, wire), (two, 0, wire.bfloat16()), (two, 0, wire[..., ::2])]
    for blocks, first_layer, buffer in wrong:
        with pytest.raises(InvariantError):
            kv_pack(pool, blocks, first_layer, BLOCK_TOKENS, buffer)
        with pytest.raises(InvariantError):
            kv_unpack(buffer, blocks, first_layer, pool)
    assert wire.isnan().all()
    assert (pool == 0).all()
