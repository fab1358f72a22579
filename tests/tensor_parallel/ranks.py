"""What a rank does in test_reshape.py, in a process of its own: four of a sender, four of a receiver, over gloo.

Every rank knows the whole model's pool, from the same seed: a sender's rank takes its heads from it, a receiver's rank
compares with it. Ranks beyond the degree of a case sit it out.
"""

import itertools
import os
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist

from kernels.kv_pack import KvPart, kv_pack, kv_unpack
from kernels.paged import KvFormat, KvWire, PagedPool, PoolShape, TileStrides
from kvoy.core.head_ranges import HeadRange, head_transfers, owned_heads

DEGREES, MOST = (1, 2, 4), 4
KV_HEADS = (1, 2, 3, 5, 8)
BF16, CHANNEL = KvFormat(torch.bfloat16), KvFormat(torch.int8, "channel")
BLOCKS, LAYERS, BLOCK_TOKENS, HEAD_DIM = 6, 3, 4, 8
SENT, LANDED = torch.tensor([4, 0, 5]), torch.tensor([1, 3, 2])
VALID_TOKENS = 3 * BLOCK_TOKENS - 1


def pool_of(heads: int) -> PagedPool:
    shape = PoolShape(BLOCKS, LAYERS, heads, BLOCK_TOKENS, HEAD_DIM)
    size_bytes = BLOCKS * LAYERS * heads * BF16.tile_bytes(BLOCK_TOKENS, HEAD_DIM)
    memory = torch.zeros(size_bytes, dtype=torch.uint8)
    return PagedPool(memory, BF16, shape, TileStrides(LAYERS * heads, heads, 1))


def whole_pool(kv_heads: int) -> PagedPool:
    pool = pool_of(kv_heads)
    pool.values.copy_(torch.randn(pool.values.shape, generator=torch.Generator().manual_seed(kv_heads)))
    return pool


def wire_of(fmt: KvFormat, heads: int) -> KvWire:
    size = (len(SENT), LAYERS, heads, fmt.tile_bytes(BLOCK_TOKENS, HEAD_DIM))
    return KvWire(torch.empty(size, dtype=torch.uint8), fmt)


def part_of(heads: HeadRange, owned: HeadRange) -> KvPart:
    return KvPart(0, LAYERS, heads.first - owned.first, heads.heads)


def send(rank: int, kv_heads: int, degrees: tuple[int, int], fmt: KvFormat) -> None:
    owned = owned_heads(kv_heads, rank, degrees[0])
    pool = pool_of(owned.heads)
    pool.values.copy_(whole_pool(kv_heads).values[:, :, owned.first : owned.end])
    for one in head_transfers(kv_heads, *degrees):
        if one.sender == rank:
            wire = wire_of(fmt, one.range.heads)
            kv_pack(pool, SENT, part_of(one.range, owned), VALID_TOKENS, wire)
            dist.send(wire.tiles, MOST + one.receiver)


def receive(rank: int, kv_heads: int, degrees: tuple[int, int], fmt: KvFormat) -> None:
    owned = owned_heads(kv_heads, rank, degrees[1])
    pool = pool_of(owned.heads)
    for one in head_transfers(kv_heads, *degrees):
        if one.receiver == rank:
            wire = wire_of(fmt, one.range.heads)
            dist.recv(wire.tiles, one.sender)
            kv_unpack(wire, LANDED, part_of(one.range, owned), pool)
    expected = without_parallelism(kv_heads, fmt).values[:, :, owned.first : owned.end]
    if not torch.equal(pool.values, expected):
        raise AssertionError(f"rank {rank} of {degrees}: {kv_heads} heads as {fmt} are not as in a whole pool")


def without_parallelism(kv_heads: int, fmt: KvFormat) -> PagedPool:
    """The receiver's pool had both pods one rank each."""
    wire, everything, target = wire_of(fmt, kv_heads), KvPart(0, LAYERS, 0, kv_heads), pool_of(kv_heads)
    kv_pack(whole_pool(kv_heads), SENT, everything, VALID_TOKENS, wire)
    kv_unpack(wire, LANDED, everything, target)
    return target


def run(rank: int, meeting_file: str, done: "SimpleQueue[tuple[int, int]]") -> None:
    """Ranks 0 to 3 send, 4 to 7 receive. Puts into ``done`` how many cases this rank took part in."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting_file}", rank=rank, world_size=2 * MOST)
    cases = 0
    for kv_heads, fmt, sender, receiver in itertools.product(KV_HEADS, (BF16, CHANNEL), DEGREES, DEGREES):
        if rank < sender:
            send(rank, kv_heads, (sender, receiver), fmt)
        elif 0 <= rank - MOST < receiver:
            receive(rank - MOST, kv_heads, (sender, receiver), fmt)
        else:
            continue
        cases += 1
    done.put((rank, cases))
    dist.destroy_process_group()
