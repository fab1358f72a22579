"""An engine in this process with a model of a few lines, for tests of services.

Every cell of a token's KV names the token, its position, layer and head. What follows a row is a digest of all KV
read through the row's block table, so that one wrong, missing or misplaced byte anywhere changes the output:
``continuation`` says what comes out when all is right.
"""

import asyncio
import hashlib
import itertools
import struct
from collections.abc import AsyncIterator, Iterator, Sequence

from kvoy.core.errors import EngineError
from kvoy.core.step import DecodeRow, PrefillRow, Sampled, StepPlan, StepResult
from kvoy.core.types import KvDtype, KvSpec, ModelInfo, SamplingParams, TokenLogprob
from kvoy.engine import messages
from kvoy.engine.lent import LentMemory
from kvoy.engine.slab import Slab, nameless_file

VOCAB_TOKENS = 1000
SPEC = KvSpec(layers=3, kv_heads=2, head_dim=2, block_tokens=4, dtype=KvDtype.FP32)
MODEL = ModelInfo(name="toy", fingerprint="70f", context_tokens=400, vocab_tokens=VOCAB_TOKENS)
_CELL = struct.Struct("<IIII")
"""Of one token, layer and head: two times head_dim values of 4 bytes."""


def follow(token_ids: Sequence[int]) -> int:
    """The token after these."""
    digest = hashlib.blake2b(b"".join(struct.pack("<I", token) for token in token_ids), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_TOKENS


def continuation(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """What the model says after ``prompt``."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < sampling.max_tokens and len(tokens) < MODEL.context_tokens:
        tokens.append(follow(tokens))
        if tokens[-1] in sampling.stop_token_ids:
            break
    return tokens[len(prompt) :]


class ToyEngine:
    """Obeys orders one by one, each after a turn of the event loop. ``hold`` stops it, ``die`` ends it;
    ``hold_before_step`` stops it by itself, when so many steps have been run."""

    def __init__(self, *, pool_blocks: int = 64, slots: int = 6, slot_blocks: int = 2, spec: KvSpec = SPEC) -> None:
        self.ready = messages.Ready(MODEL, spec, pool_blocks, eos_token_ids=(), load_s=0.0, reads_lent=True)
        self.slab = Slab(nameless_file(), slots, slot_blocks * spec.block_bytes)
        self.steps: list[StepPlan] = []
        self.going = asyncio.Event()
        self.going.set()
        self.hold_before_step: int | None = None
        self.stopped = False
        self._spec = spec
        self._pool = bytearray(b"\xee" * (pool_blocks * spec.block_bytes))
        self._orders: asyncio.Queue[messages.Order | EngineError] = asyncio.Queue()
        self._lent, self._numbers = LentMemory(), itertools.count(1)
        self._now = 1000.0

    def send(self, order: messages.Order) -> None:
        self._orders.put_nowait(order)

    def lend(self, fd: int, nbytes: int) -> int | None:
        number = next(self._numbers)
        assert self._lent.take(number, nbytes, fd)
        return number

    def reads(self, number: int) -> bool:
        return number in self._lent._views

    def take_back(self, number: int) -> None:
        self.send(messages.ForgetLent(number))

    def die(self, message: str) -> None:
        self._orders.put_nowait(EngineError(message))
        self.going.set()

    def hold(self) -> None:
        self.going.clear()

    async def answers(self) -> AsyncIterator[messages.Answer]:
        while True:
            order = await self._orders.get()
            await asyncio.sleep(0)
            if isinstance(order, messages.RunStep) and len(self.steps) == self.hold_before_step:
                self.hold()
            await self.going.wait()
            for answer in self._obey(order):
                yield answer

    async def stop(self) -> None:
        self.stopped = True

    def _obey(self, order: messages.Order | EngineError) -> Iterator[messages.Answer]:
        match order:
            case messages.RunStep(plan):
                yield messages.StepDone(self._run(plan))
            case messages.ExportBlocks():
                self._export(order)
                yield messages.Exported(order.transfer_id)
            case messages.ImportBlocks():
                yield messages.Imported(order.transfer_id, self._import(order))
            case messages.ForgetLent(number):
                self._lent.forget(number)
            case EngineError():
                raise order
            case _:
                raise AssertionError(order)

    def _run(self, plan: StepPlan) -> StepResult:
        self.steps.append(plan)
        started_at = self._look_at_clock()
        sampled = [self._prefill(row) for row in plan.prefill]
        return StepResult(
            plan.step_id,
            (*(one for one in sampled if one is not None), *(self._decode(row) for row in plan.decode)),
            started_at,
            self._look_at_clock(),
        )

    def _look_at_clock(self) -> float:
        self._now += 1
        return self._now

    def _prefill(self, row: PrefillRow) -> Sampled | None:
        for n, token in enumerate(row.token_ids):
            self._write(row.block_table, row.start + n, token)
        if row.sampling is None:
            return None
        return self._sample(row.request_id, row.block_table, row.start + len(row.token_ids), row.sampling)

    def _decode(self, row: DecodeRow) -> Sampled:
        self._write(row.block_table, row.position, row.token_id)
        return self._sample(row.request_id, row.block_table, row.position + 1, row.sampling)

    def _sample(self, request_id: str, table: tuple[int, ...], tokens: int, sampling: SamplingParams) -> Sampled:
        token = follow([self._read(table, position) for position in range(tokens)])
        logprob = None if sampling.top_logprobs is None else TokenLogprob(token, -1.5)
        return Sampled(request_id, token, logprob)

    def _offset(self, block: int, layer: int, head: int, slot: int) -> int:
        spec = self._spec
        cell = (layer * spec.kv_heads + head) * spec.block_tokens + slot
        return block * spec.block_bytes + cell * _CELL.size

    def _cells(self, table: tuple[int, ...], position: int) -> list[tuple[int, int, int]]:
        """(offset, layer, head) of every cell of the token at ``position``."""
        block, slot = table[position // self._spec.block_tokens], position % self._spec.block_tokens
        pairs = [(layer, head) for layer in range(self._spec.layers) for head in range(self._spec.kv_heads)]
        return [(self._offset(block, layer, head, slot), layer, head) for layer, head in pairs]

    def _write(self, table: tuple[int, ...], position: int, token: int) -> None:
        for offset, layer, head in self._cells(table, position):
            _CELL.pack_into(self._pool, offset, token, position, layer, head)

    def _read(self, table: tuple[int, ...], position: int) -> int:
        """The token at ``position``; one that cannot be if any of its cells is not what it should be."""
        cells = self._cells(table, position)
        token = int(_CELL.unpack_from(self._pool, cells[0][0])[0])
        right = all(
            _CELL.unpack_from(self._pool, offset) == (token, position, layer, head) for offset, layer, head in cells
        )
        return token if right else VOCAB_TOKENS + position

    def _export(self, order: messages.ExportBlocks) -> None:
        spec, slot, at = self._spec, self.slab.slot(order.slot), 0
        row_bytes = spec.block_tokens * _CELL.size
        for n, block in enumerate(order.blocks):
            valid = max(0, min(spec.block_tokens, order.valid_tokens - n * spec.block_tokens))
            for layer in range(order.first_layer, order.first_layer + order.layers):
                for head in range(spec.kv_heads):
                    offset = self._offset(block, layer, head, 0)
                    filled = self._pool[offset : offset + valid * _CELL.size]
                    slot[at : at + row_bytes] = filled + bytes(row_bytes - len(filled))
                    at += row_bytes

    def _import(self, order: messages.ImportBlocks) -> bool:
        run_bytes, at = order.layers * self._spec.layer_bytes, 0
        slot, checksum = self.slab.slot(order.slot), order.checksum
        if order.place is not None:
            nbytes = run_bytes * len(order.blocks)
            slot, checksum = self._lent.copy(order.place.number, order.place.offset, nbytes)
        if checksum != order.checksum:
            return False
        for block in order.blocks:
            offset = self._offset(block, order.first_layer, 0, 0)
            self._pool[offset : offset + run_bytes] = slot[at : at + run_bytes]
            at += run_bytes
        return True
