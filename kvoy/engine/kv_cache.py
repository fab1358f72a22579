"""The paged KV pool: one tensor of blocks, its layout, and the copies between it and staging slots.

Which block belongs to whom is the brain's affair (kvoy.core.block_pool); here a block is a number. The layout is
also the wire's (KvSpec): change the two together.
"""

import mmap
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.kv_pack import KvPart, TokenSpan, kv_pack, kv_unpack, kv_unpack_tokens
from kernels.paged import KvFormat, KvWire, PagedLayer, PagedPool, PoolShape, TileStrides
from kvoy.core.errors import ConfigError, InvariantError
from kvoy.core.types import KvDtype, KvSpec
from kvoy.core.wire import WireRun
from kvoy.engine.messages import ExportBlocks, ImportBlocks

KV_FORMATS = {
    KvDtype.FP32: KvFormat(torch.float32),
    KvDtype.BF16: KvFormat(torch.bfloat16),
    KvDtype.FP16: KvFormat(torch.float16),
    KvDtype.INT8: KvFormat(torch.int8, "token"),
    KvDtype.INT8_CHANNEL: KvFormat(torch.int8, "channel"),
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
    """Owns the pool's memory, on one device. Zeros at first; on a CPU a page costs memory only once something is
    written to it. ConfigError when the device does not give that much."""

    def __init__(self, layout: KvLayout, place: torch.device | None = None) -> None:
        self.layout = layout
        self.place = place or torch.device("cpu")
        memory = _zeros(layout.blocks * layout.spec.block_bytes, self.place)
        self._pool = PagedPool(memory, layout.format, layout.shape, layout.strides)

    def layer(self, index: int) -> PagedLayer:
        return self._pool.layer(index)

    def export_blocks(self, order: ExportBlocks, slot: memoryview) -> None:
        """Blocks of a pool on the CPU into a slot, at once."""
        self.check(order, len(slot))
        self.pack(order, torch.tensor(order.blocks), torch.frombuffer(slot, dtype=torch.uint8))

    def import_blocks(self, order: ImportBlocks, slot: memoryview) -> None:
        """A slot, or as many other bytes, into blocks of a pool on the CPU, at once."""
        self.check(order, len(slot))
        self.unpack(order, torch.tensor(order.blocks), torch.frombuffer(slot, dtype=torch.uint8))

    def check(self, order: ExportBlocks | ImportBlocks, slot_bytes: int) -> None:
        """InvariantError when an order does not fit the pool or a slot. ``pack`` and ``unpack`` take it as checked."""
        self._part(order)
        blocks, wire = order.blocks, wire_of(order, self.layout.spec)
        if not blocks or min(blocks) < 0 or max(blocks) >= self.layout.blocks:
            raise InvariantError(f"blocks {tuple(blocks)} are not in a pool of {self.layout.blocks}")
        if {KV_FORMATS[wire.dtype].scales, self.layout.format.scales} == {"channel", "token"}:
            raise InvariantError(f"a pool of {self.layout.spec} has no part in a wire of {wire.dtype.label}")
        if isinstance(order, ImportBlocks):
            _check_import(order)
        elif not 0 <= order.valid_tokens <= len(blocks) * self.layout.spec.block_tokens:
            raise InvariantError(f"{order.valid_tokens} valid tokens in {len(blocks)} blocks")
        if self.wire_bytes(order) > slot_bytes:
            raise InvariantError(f"{self.wire_bytes(order)} bytes do not fit a slot of {slot_bytes}")

    def wire_bytes(self, order: ExportBlocks | ImportBlocks) -> int:
        return _wire_blocks(order) * order.layers * wire_of(order, self.layout.spec).layer_bytes

    def pack(self, order: ExportBlocks, blocks: Tensor, memory: Tensor) -> None:
        """Pool blocks into the leading bytes of ``memory`` (uint8); ``blocks`` [n] int64 are the order's. All three are
        on one device."""
        kv_pack(self._pool, blocks, self._part(order), order.valid_tokens, self._wire(order, memory))

    def unpack(self, order: ImportBlocks, blocks: Tensor, memory: Tensor) -> None:
        """The inverse of ``pack``; of a run that is not just these blocks, the tokens that belong in them."""
        wire, part, run = self._wire(order, memory), self._part(order), order.run
        block_tokens = self.layout.spec.block_tokens
        if run is None or _is_just(run, len(order.blocks), block_tokens):
            kv_unpack(wire, blocks, part, self._pool)
            return
        span = _span(run, len(order.blocks) * block_tokens)
        kv_unpack_tokens(wire, span, blocks, part, self._pool)

    def _part(self, order: ExportBlocks | ImportBlocks) -> KvPart:
        spec = self.layout.spec
        if order.first_layer < 0 or order.layers < 1 or order.first_layer + order.layers > spec.layers:
            layers = f"[{order.first_layer}, {order.first_layer + order.layers})"
            raise InvariantError(f"layers {layers} are not in a model of {spec.layers}")
        return KvPart(order.first_layer, order.layers, 0, spec.kv_heads)

    def _wire(self, order: ExportBlocks | ImportBlocks, memory: Tensor) -> KvWire:
        tiles = memory[: self.wire_bytes(order)].view(_wire_blocks(order), order.layers, self.layout.spec.kv_heads, -1)
        return KvWire(tiles, KV_FORMATS[wire_of(order, self.layout.spec).dtype])


def wire_of(order: ExportBlocks | ImportBlocks, pool: KvSpec) -> KvSpec:
    """How the order's slot is laid out, for a pool of ``pool``."""
    if isinstance(order, ExportBlocks):
        return pool if order.wire is None else replace(pool, dtype=order.wire)
    if order.run is None:
        return pool
    return replace(pool, dtype=order.run.dtype, block_tokens=order.run.block_tokens)


def _wire_blocks(order: ExportBlocks | ImportBlocks) -> int:
    if isinstance(order, ImportBlocks) and order.run is not None:
        return order.run.blocks
    return len(order.blocks)


def _check_import(order: ImportBlocks) -> None:
    if len(set(order.blocks)) < len(order.blocks):
        raise InvariantError(f"blocks {order.blocks} to import are not all different")
    run = order.run
    if run is not None and (run.blocks < 1 or run.block_tokens < 1 or run.skip_tokens < 0):
        raise InvariantError(f"{run} is no run of blocks")


def _is_just(run: WireRun, blocks: int, block_tokens: int) -> bool:
    """Whether it is so many whole blocks of that size."""
    return run == WireRun(run.dtype, block_tokens, blocks)


def _span(run: WireRun, room_tokens: int) -> TokenSpan:
    """Of the run what is not to be skipped and lies in blocks that hold ``room_tokens``; maybe nothing."""
    first = max(run.skip_tokens, -run.first_token, 0)
    end = min(run.blocks * run.block_tokens, room_tokens - run.first_token)
    if first >= end:
        return TokenSpan(run.block_tokens, 0, 0, 0)
    return TokenSpan(run.block_tokens, first, end - first, run.first_token + first)


def _zeros(size_bytes: int, place: torch.device) -> Tensor:
    try:
        if place.type != "cpu":
            return torch.zeros((size_bytes,), dtype=torch.uint8, device=place)
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, torch.OutOfMemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the GPU has less"
        raise ConfigError(f"no memory for a KV pool of {size_bytes} bytes ({reason}); lower pool_bytes") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def blocks_in(pool_bytes: int, spec: KvSpec) -> int:
    """How many blocks ``pool_bytes`` hold; ConfigError when not even one."""
    blocks = pool_bytes // spec.block_bytes
    if blocks < 1:
        raise ConfigError(
            f"pool_bytes of {pool_bytes} hold no KV block: one of {spec.block_tokens} tokens takes {spec.block_bytes} "
            "bytes with this model; raise pool_bytes or lower block_tokens"
        )
    return blocks
