"""The paged KV pool: one tensor of blocks, its layout, and the copies between it and staging slots.

Which block belongs to whom is the brain's affair (kvoy.core.block_pool); here a block is a number. The layout is
also the wire's (KvSpec): change the two together.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.kv_pack import KvPart, kv_pack, kv_unpack
from kernels.paged import KvFormat, KvWire, PagedLayer, PagedPool, PoolShape, TileStrides
from kvoy.core.errors import ConfigError, InvariantError
from kvoy.core.types import KvDtype, KvSpec
from kvoy.engine.messages import ExportBlocks, ImportBlocks

KV_FORMATS = {
    KvDtype.FP32: KvFormat(torch.float32),
    KvDtype.BF16: KvFormat(torch.bfloat16),
    KvDtype.FP16: KvFormat(torch.float16),
    KvDtype.INT8: KvFormat(torch.int8, "token"),
}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Where an element of the pool is: axes [block, layer, kv head, tile], the last one contiguous.

    ::

        block 0                                            block 1
        +----------------------------------------------+---+----------- ...
        | layer 0            | layer 1            | ...|   |
        | head 0 | head 1 |..|                    |    |   |
        +----------------------------------------------+---+----------- ...
          head = a tile of block_tokens rows, each head_dim of k, then head_dim of v; int8: the scales after them

    The block is outermost, so a block is one run of bytes, and so is a layer of it: what a frame carries.
    """

    spec: KvSpec
    blocks: int

    @property
    def shape(self) -> PoolShape:
        spec = self.spec
        return PoolShape(self.blocks, spec.layers, spec.kv_heads, spec.block_tokens, spec.head_dim)

    @property
    def strides(self) -> TileStrides:
        """In tiles."""
        return TileStrides(block=self.spec.layers * self.spec.kv_heads, layer=self.spec.kv_heads, head=1)

    @property
    def format(self) -> KvFormat:
        return KV_FORMATS[self.spec.dtype]


class KvPool:
    """Owns the pool's memory. Zeros at first, and a page costs memory only once something is written to it.
    ConfigError when the machine does not give that much."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        memory = torch.frombuffer(_zeros(layout.blocks * layout.spec.block_bytes), dtype=torch.uint8)
        self._pool = PagedPool(memory, layout.format, layout.shape, layout.strides)

    def layer(self, index: int) -> PagedLayer:
        return self._pool.layer(index)

    def export_blocks(self, order: ExportBlocks, slot: memoryview) -> None:
        """Pool blocks into a slot. InvariantError, before a byte is written, when the order does not fit."""
        part = self._part(order)
        wire = self._wire(order.blocks, part, slot)
        if not 0 <= order.valid_tokens <= len(order.blocks) * self.layout.spec.block_tokens:
            raise InvariantError(f"{order.valid_tokens} valid tokens in {len(order.blocks)} blocks")
        kv_pack(self._pool, torch.tensor(order.blocks), part, order.valid_tokens, wire)

    def import_blocks(self, order: ImportBlocks, slot: memoryview) -> None:
        """A slot into pool blocks. InvariantError, before a byte is written, when the order does not fit."""
        part = self._part(order)
        wire = self._wire(order.blocks, part, slot)
        if len(set(order.blocks)) < len(order.blocks):
            raise InvariantError(f"blocks {order.blocks} to import are not all different")
        kv_unpack(wire, torch.tensor(order.blocks), part, self._pool)

    def _part(self, order: ExportBlocks | ImportBlocks) -> KvPart:
        spec = self.layout.spec
        if order.first_layer < 0 or order.layers < 1 or order.first_layer + order.layers > spec.layers:
            layers = f"[{order.first_layer}, {order.first_layer + order.layers})"
            raise InvariantError(f"layers {layers} are not in a model of {spec.layers}")
        return KvPart(order.first_layer, order.layers, 0, spec.kv_heads)

    def _wire(self, blocks: Sequence[int], part: KvPart, slot: memoryview) -> KvWire:
        """The slot's leading bytes as tiles."""
        spec = self.layout.spec
        if not blocks or min(blocks) < 0 or max(blocks) >= self.layout.blocks:
            raise InvariantError(f"blocks {tuple(blocks)} are not in a pool of {self.layout.blocks}")
        wire_bytes = len(blocks) * part.layers * spec.layer_bytes
        if wire_bytes > len(slot):
            raise InvariantError(f"{wire_bytes} bytes do not fit a slot of {len(slot)}")
        memory = torch.frombuffer(slot, dtype=torch.uint8, count=wire_bytes)
        return KvWire(memory.view(len(blocks), part.layers, part.heads, -1), self._pool.format)


def _zeros(size_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"no memory for a KV pool of {size_bytes} bytes ({error.strerror}); lower pool_bytes"
        ) from error


def blocks_in(pool_bytes: int, spec: KvSpec) -> int:
    """How many blocks ``pool_bytes`` hold; ConfigError when not even one."""
    blocks = pool_bytes // spec.block_bytes
    if blocks < 1:
        raise ConfigError(
            f"pool_bytes of {pool_bytes} hold no KV block: one of {spec.block_tokens} tokens takes {spec.block_bytes} "
            "bytes with this model; raise pool_bytes or lower block_tokens"
        )
    return blocks
