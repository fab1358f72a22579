"""A model and an engine of a few lines for tests of the brains: KV that can be read back and believed or not.

The KV of a token in a layer is a number made of all tokens so far and the layer, so any block that is missing, stale,
misplaced or from another request changes the token that follows. ``continuation`` says what must come out.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from kvoy.core.actions import ExportBlocks, ImportFrame, ImportSlot, RunStep
from kvoy.core.events import Exported, Imported, StepDone
from kvoy.core.step import DecodeRow, PrefillRow, Sampled, StepResult
from kvoy.core.types import KvDtype, KvSpec, Request, Reservation, SamplingParams

SPEC = KvSpec(layers=2, kv_heads=1, head_dim=4, block_tokens=4, dtype=KvDtype.FP32)
WIDE = replace(SPEC, block_tokens=8, dtype=KvDtype.BF16)
NARROW = replace(SPEC, block_tokens=2, dtype=KvDtype.INT8)
FINGERPRINT = "f00d"
CONTEXT_TOKENS = 64
VOCAB_TOKENS = 100_003
_PRIME = 2**31 - 1


class Rounded(int):
    """KV that has been in another number format than an engine computed it in, or was computed of such."""

    @classmethod
    def anywhere(cls, blocks):
        return any(isinstance(kv, cls) for block in blocks for kvs in block.values() for kv in kvs)


def follow(tokens):
    """The token after these."""
    return SPEC.layers * sum(_chains(0, tokens)) % VOCAB_TOKENS


def continuation(prompt, sampling, context_tokens=CONTEXT_TOKENS):
    """What the model says after ``prompt``."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens and len(tokens) < context_tokens:
        tokens.append(follow(tokens))
        if tokens[-1] in sampling.stop_token_ids:
            break
    return tuple(tokens[len(prompt) :])


def request(request_id="r", prompt=10, *, first=1, max_tokens=4, stop=(), salt="", deadline=None, tokens=None):
    """A request whose prompt is ``prompt`` tokens counting up from ``first`` (or ``tokens``)."""
    token_ids = tuple(tokens) if tokens is not None else tuple(range(first, first + prompt))
    sampling = SamplingParams(0.0, 0, 1.0, 0, max_tokens, tuple(stop))
    return Request(request_id, token_ids, sampling, FINGERPRINT, cache_salt=salt, deadline=deadline)


def reservation(
    request_id="r",
    epoch=1,
    held_blocks=0,
    *,
    lease="lease-1",
    spec=SPEC,
    max_frame_bytes=0,
    accepts=(),
    lendable_blocks=0,
):
    sizes = (held_blocks, spec, max_frame_bytes, accepts)
    return Reservation(request_id, epoch, lease, "decode:1", *sizes, lendable_blocks=lendable_blocks)


@dataclass(eq=False)
class ToyEngine:
    """Obeys orders one by one, in order, when told to go on. ``slots`` are the staging slab: {layer: KV} each block,
    and ``slot_dtypes`` what that is meant to be."""

    spec: KvSpec
    pool_blocks: int
    slots: list[list[dict[int, list[int]]]]
    slot_bytes: int | None = None
    now: float = 0.0
    orders: deque = field(default_factory=deque)
    memory: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    steps: list = field(default_factory=list)
    slot_dtypes: dict[int, KvDtype] = field(default_factory=dict)

    def key(self, block_id):
        """What a kvstore knows the block by: pools of another format have blocks of their own there."""
        return self.spec.dtype.label, block_id

    def order(self, action):
        self.orders.append(action)
        assert sum(isinstance(order, RunStep) for order in self.orders) <= 1, "one step at a time"

    def work(self):
        """Obey the oldest order; returns the event that answers it."""
        action = self.orders.popleft()
        match action:
            case RunStep(plan):
                return self._run(plan)
            case ExportBlocks(transfer_id, slot, blocks, first, layers, valid_tokens, wire):
                kind = int if wire is None else Rounded
                self.slots[slot] = self._export(blocks, range(first, first + layers), valid_tokens, kind)
                assert wire is not self.spec.dtype, "as the pool has it is None"
                self.slot_dtypes[slot] = wire or self.spec.dtype
                layer_bytes = replace(self.spec, dtype=self.slot_dtypes[slot]).layer_bytes
                assert self.slot_bytes is None or len(blocks) * layers * layer_bytes <= self.slot_bytes
                return Exported(transfer_id)
            case ImportSlot(transfer_id, slot, blocks):
                self._import(slot, blocks, range(self.spec.layers))
                return Imported(transfer_id)
            case ImportFrame(transfer_id, header, _, slot, blocks, run):
                layers = range(header.first_layer, header.first_layer + header.layers)
                if run is None:
                    self._import(slot, blocks, layers)
                else:
                    assert (self.slot_dtypes[slot], len(self.slots[slot])) == (run.dtype, run.blocks)
                    self._import_run(slot, blocks, layers, run)
                return Imported(transfer_id)

    def _run(self, plan):
        self.steps.append(plan)
        started_at = self.now
        rows = [*plan.prefill, *plan.decode]
        assert rows, "an empty step"
        assert len({row.request_id for row in rows}) == len(rows)
        sampled = [Sampled(row.request_id, token) for row in rows if (token := self._row(row)) is not None]
        self.now += 0.001
        return StepDone(StepResult(plan.step_id, tuple(sampled), started_at, self.now))

    def _row(self, row):
        match row:
            case PrefillRow(_, tokens, start, table, sampling):
                pass
            case DecodeRow(_, token, start, table, sampling):
                tokens = (token,)
        end = start + len(tokens)
        assert len(table) * self.spec.block_tokens >= end
        assert len(set(table)) == len(table)
        assert all(0 <= block < self.pool_blocks for block in table)
        before = self._read(table, 0, start - 1) if start else 0
        is_rounded = any(isinstance(self._read(table, 0, at), Rounded) for at in range(start))
        kind = Rounded if is_rounded else int
        for position, chain in enumerate(_chains(before, tokens), start):
            for layer in range(self.spec.layers):
                self._cell(table, layer, position)[position % self.spec.block_tokens] = kind(chain + layer)
        if sampling is None:
            return None
        read = [self._read(table, layer, at) - layer for layer in range(self.spec.layers) for at in range(end)]
        return sum(read) % VOCAB_TOKENS

    def _read(self, table, layer, position):
        return self._cell(table, layer, position)[position % self.spec.block_tokens]

    def _cell(self, table, layer, position):
        key = (table[position // self.spec.block_tokens], layer)
        return self.memory.setdefault(key, [0] * self.spec.block_tokens)

    def _export(self, blocks, layers, valid_tokens, kind):
        size = self.spec.block_tokens
        content = []
        for index, block in enumerate(blocks):
            valid = max(0, min(size, valid_tokens - index * size))
            empty = [0] * size
            cells = {layer: self.memory.get((block, layer), empty)[:valid] for layer in layers}
            filled = {layer: [_as(kind, kv) for kv in kvs] for layer, kvs in cells.items()}
            content.append({layer: kvs + [0] * (size - valid) for layer, kvs in filled.items()})
        return content

    def _import_run(self, slot, blocks, layers, run):
        size = self.spec.block_tokens
        kind = int if run.dtype is self.spec.dtype else Rounded
        for layer in layers:
            tokens = [token for content in self.slots[slot] for token in content[layer]]
            assert len(tokens) == run.blocks * run.block_tokens
            for at, token in enumerate(tokens[run.skip_tokens :], run.first_token + run.skip_tokens):
                assert at >= 0, "a token that is not skipped lies before our blocks"
                if at < len(blocks) * size:
                    self.memory.setdefault((blocks[at // size], layer), [0] * size)[at % size] = _as(kind, token)

    def _import(self, slot, blocks, layers):
        assert self.slot_dtypes[slot] is self.spec.dtype
        assert len(self.slots[slot]) >= len(blocks)
        for content, block in zip(self.slots[slot], blocks, strict=False):
            for layer in layers:
                self.memory[block, layer] = list(content[layer])


def _as(kind, kv):
    """What is rounded stays so."""
    return kv if isinstance(kv, kind) else kind(kv)


def _chains(before, tokens):
    chains = []
    for token in tokens:
        before = (before * 48271 + token + 11) % _PRIME
        chains.append(before)
    return chains
