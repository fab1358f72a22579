"""The write kernel: rotation against float64, and every byte of the pool where it belongs."""

import pytest
import torch

from kernels.kv_write import Angles, QkNorm, kernel
from kernels.paged import PoolShape
from tests.kernels.oracle import INT8, encoded, pool_of, tile_bytes
from tests.kernels_triton.paged_requests import FP16, FP32

FORMATS = [FP32, FP16, INT8]
BLOCKS, LAYERS, BLOCK_TOKENS, EPS = 6, 2, 4, 1e-5


class Write:
    """Some tokens, the first of which may be padding, to write to layer 1 of a pool of random bytes."""

    def __init__(self, fence, fmt, order="BLHNC", *, tokens=7, padding=2, heads=6, kv_heads=2, head_dim=16, dtype=None):
        self.heads, self.kv_heads = heads, kv_heads
        shape = PoolShape(BLOCKS, LAYERS, kv_heads, BLOCK_TOKENS, head_dim)
        size = BLOCKS * LAYERS * kv_heads * fmt.tile_bytes(BLOCK_TOKENS, head_dim)
        self.pool = pool_of(fmt, shape, order, fence.around(torch.randint(0, 256, (size,), dtype=torch.uint8)))
        slots = torch.randperm(BLOCKS * BLOCK_TOKENS)[:tokens]
        slots[:padding] = -1
        self.slots = fence.around(slots)
        dtype = dtype or (torch.float32 if fmt == INT8 else fmt.dtype)
        self.qkv = fence.around(torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype))
        turn = torch.rand(tokens, head_dim // 2) * 7
        self.angles = Angles(fence.around(turn.cos()), fence.around(turn.sin()))
        weights = torch.rand(2, head_dim) + 0.5
        self.norms = QkNorm(fence.around(weights[0]), fence.around(weights[1]), EPS)

    def expected_q_and_k(self, norms):
        """Float64, before the write."""
        x = self.qkv[:, : self.heads + self.kv_heads].double()
        if norms is not None:
            weight = torch.cat((norms.q_weight.expand(self.heads, -1), norms.k_weight.expand(self.kv_heads, -1)))
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
        turn = torch.complex(self.angles.cos.double(), self.angles.sin.double()).unsqueeze(1)
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((turned.real, turned.imag), -1)

    def expected_tiles(self, before):
        """Of a pool that held ``before``, and what the write left in qkv."""
        head_dim, fmt = self.qkv.shape[2], self.pool.format
        row_bytes = 2 * head_dim * fmt.dtype.itemsize
        for token, slot in enumerate(self.slots.tolist()):
            if slot < 0:
                continue
            block, place = divmod(slot, BLOCK_TOKENS)
            k, v = self.qkv[token, self.heads :].chunk(2)
            rows = encoded(torch.stack((k, v), 1).unsqueeze(1), fmt)  # [kv heads, bytes of a tile of one token]
            before[block, 1, :, place * row_bytes : (place + 1) * row_bytes] = rows[:, :row_bytes]
            if fmt == INT8:
                scales_at = BLOCK_TOKENS * row_bytes + 4 * place
                before[block, 1, :, scales_at : scales_at + 4] = rows[:, row_bytes:]
        return before


def check(write, norms):
    before, v = tile_bytes(write.pool).clone(), write.qkv[:, -write.kv_heads :].clone()
    expected = write.expected_q_and_k(norms)
    kernel.run(write.slots, write.qkv, write.angles, write.pool.layer(1), norms)
    step = 1e-5 if write.qkv.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(write.qkv[:, : -write.kv_heads].double(), expected, rtol=step, atol=step)
    assert torch.equal(write.qkv[:, -write.kv_heads :], v)
    assert torch.equal(tile_bytes(write.pool), write.expected_tiles(before))


@pytest.mark.parametrize("order", ["BLHNC", "BHLNC", "LBHNC"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
def test_each_token_is_rotated_and_put_in_its_slot_and_nothing_else_is_touched(fence, fmt, order, has_norms):
    write = Write(fence, fmt, order)
    check(write, write.norms if has_norms else None)


@pytest.mark.parametrize(
    ("dtype", "fmt"), [(torch.float32, FP16), (torch.float16, FP32), (torch.float16, INT8)], ids=str
)
def test_a_pool_may_hold_another_float_than_the_computations(fence, dtype, fmt):
    check(Write(fence, fmt, dtype=dtype), None)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_head_dims_of_service(fence, fmt, head_dim):
    write = Write(fence, fmt, tokens=2, padding=0, heads=9, kv_heads=3, head_dim=head_dim)
    check(write, write.norms)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (40, 8), (71, 1)])
def test_any_number_of_heads(fence, heads, kv_heads):
    check(Write(fence, FP32, tokens=2, padding=1, heads=heads, kv_heads=kv_heads, head_dim=64), None)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_a_nan_stays_with_its_token(fence):
    write = Write(fence, INT8, padding=0)
    write.qkv[3] = float("nan")
    kernel.run(write.slots, write.qkv, write.angles, write.pool.layer(1), None)
    scales = write.pool.scales[:, 1].transpose(1, 2).flatten(0, 1)[write.slots]  # [tokens, kv heads, k | v]
    assert scales[3].isnan().all()
    assert not scales[torch.arange(7) != 3].isnan().any()


def test_padding_only_writes_nothing(fence):
    write = Write(fence, FP32, padding=7)
    before = tile_bytes(write.pool).clone()
    kernel.run(write.slots, write.qkv, write.angles, write.pool.layer(1), None)
    assert torch.equal(tile_bytes(write.pool), before)
