"""What is behind the channel: settings -> model, pool and slab; order -> answer. One order at a time, in order.

Owns everything that takes memory. Knows nothing of processes, sockets or signals: that is worker.py.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

import torch

from kernels.cpu import compiles
from kvoy.core.errors import ConfigError, EngineError, ModelError
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import GREEDY, KvDtype, KvSpec, ModelInfo
from kvoy.core.wire import Place, WireRun
from kvoy.engine.device import Device, Mark, choose
from kvoy.engine.graphs import Buckets
from kvoy.engine.kv_cache import KvLayout, KvPool, blocks_in
from kvoy.engine.lent import LentMemory
from kvoy.engine.messages import (
    EngineSettings,
    ExportBlocks,
    Exported,
    ForgetLent,
    ImportBlocks,
    Imported,
    MapLent,
    Mapped,
    Ready,
    RunStep,
    StepDone,
)
from kvoy.engine.model import Decoder
from kvoy.engine.models import ModelFiles, resolve
from kvoy.engine.quant import Int4Weights, try_int4
from kvoy.engine.row_invariance import RowInvariance, prove
from kvoy.engine.runner import Runner
from kvoy.engine.settings_check import DTYPES, check_memory, check_settings, kv_dtype_of
from kvoy.engine.slab import Slab, slot_bytes
from kvoy.engine.spec import ModelSpec
from kvoy.engine.transfers import DirectTransfers, StagedTransfers, Transfers
from kvoy.engine.uploads import Uploads
from kvoy.engine.weights import load_weights

_Answered = StepDone | Exported | Imported | Mapped
_WARM_UP_TOKENS = 64
_ROOM_BYTES = 1 << 30
"""What a GPU keeps free of the pool: for what a step computes with, and for captured steps."""


class Engine:
    """A loaded, warm model with its pool and slab. ``ready`` is what the service is told about it."""

    def __init__(
        self,
        settings: EngineSettings,
        slab_fd: int,
        progress: Callable[[str], None],
        lent: LentMemory | None = None,
    ) -> None:
        """Takes the slab's descriptor over. ConfigError for settings, ModelError for a model that cannot be served."""
        started_at = time.monotonic()
        check_settings(settings)
        device = choose("cpu" if settings.deterministic else settings.device, DTYPES[settings.dtype])
        torch.set_num_threads(settings.threads)
        files = resolve(settings.model, progress=progress)
        spec = files.spec()
        kv_spec = kv_spec_of(spec, settings)
        context_tokens = min(settings.context_tokens or spec.context_tokens, spec.context_tokens)
        layout = KvLayout(kv_spec, blocks_in(settings.pool_bytes, kv_spec))
        slot = slot_bytes(settings.slot_bytes, kv_spec)
        if device.place.type == "cpu":
            check_memory(settings, spec, settings.slots * slot)
        progress(f"loading {files.name} in {settings.dtype}")
        int4 = _int4(files, spec, device, progress) if settings.dtype == "int4" else None
        decoder = _decoder(spec, load_weights(files, DTYPES[settings.dtype], progress), int4, device)
        if settings.deterministic:
            decoder.compute_rows_alike(RowInvariance(progress))
        _check_room(layout, device)
        self._pool = KvPool(layout, device.place)
        uploads = Uploads(device)
        self._runner = Runner(decoder, self._pool, context_tokens, device, uploads)
        self._slab = Slab(slab_fd, settings.slots, slot)
        self._lent = lent or LentMemory()
        self._transfers = _transfers(self._pool, self._slab, device, uploads, progress, lent=self._lent)
        self._pending: deque[tuple[Mark, Exported | Imported | Mapped]] = deque()
        if device.place.type == "cpu" and not compiles():
            progress("computing with torch alone; with the extra kvoy[cpu] decode is up to half faster")
        self._warm_up_transfers()
        try:
            self._warm_up(context_tokens)
        except EngineError as error:
            raise ModelError(
                f"{files.path} makes no numbers: {error}; its weights are broken, fetch it again"
            ) from error
        if settings.deterministic:
            prove(self._runner.run, layout.blocks, min(kv_spec.block_tokens, context_tokens), spec.vocab_tokens)
        is_on_cpu = device.place.type == "cpu"
        if not is_on_cpu:
            self._capture(Buckets.up_to(min(settings.graph_rows, layout.blocks), context_tokens), progress)
        self.ready = _ready(files, spec, layout, context_tokens, time.monotonic() - started_at, reads_lent=is_on_cpu)

    def obey(self, order: RunStep | ExportBlocks | ImportBlocks) -> _Answered:
        """``begin``, and wait for it: the answer to this order. Nothing must be pending."""
        (answer,) = [*self.begin(order), *self.settle()]
        return answer

    def begin(self, order: RunStep | ExportBlocks | ImportBlocks | MapLent | ForgetLent) -> list[_Answered]:
        """Answers that are due, each order's own, if it has one, in the end, in the order of the orders: a GPU copies
        blocks beside the steps that follow. InvariantError for an order that does not fit, before it has changed
        anything."""
        match order:
            case RunStep(plan):
                step = self._runner.begin(plan)
                return [*self.settle(), StepDone(step.finish())]
            case ExportBlocks():
                self._pending.append((self._transfers.export_blocks(order), Exported(order.transfer_id)))
            case ImportBlocks(place=Place()):
                self._pending.append((Mark(), Imported(order.transfer_id, self._transfers.import_lent(order))))
            case ImportBlocks():
                self._pending.append((self._transfers.import_blocks(order), Imported(order.transfer_id)))
            case MapLent(number, nbytes):
                self._pending.append((Mark(), Mapped(number, self._lent.map(number, nbytes))))
            case ForgetLent(number):
                self._lent.forget(number)
            case _:
                assert_never(order)
        due: list[_Answered] = []
        while self._pending and self._pending[0][0].is_past:
            due.append(self._pending.popleft()[1])
        return due

    def settle(self) -> list[_Answered]:
        """Wait for what ``begin`` left open: its answers."""
        answers: list[_Answered] = []
        while self._pending:
            mark, answer = self._pending.popleft()
            mark.wait()
            answers.append(answer)
        return answers

    def _capture(self, buckets: Buckets, progress: Callable[[str], None]) -> None:
        if not buckets.rows:
            return
        started_at = time.monotonic()
        self._runner.capture(buckets)
        progress(f"captured {len(list(buckets))} sizes of decode steps in {time.monotonic() - started_at:.1f} s")

    def _warm_up_transfers(self) -> None:
        """Have compiled what turns KV into another format: zeros, there and back, in a layer of the first block."""
        spec = self._pool.layout.spec
        other = [KvDtype.INT8_CHANNEL] if spec.dtype is not KvDtype.INT8 else []
        for wire in (spec.dtype, *other):
            run = WireRun(wire, spec.block_tokens, 1)
            if replace(spec, dtype=wire).layer_bytes <= self._slab.slot_bytes:
                self.obey(ExportBlocks(0, 0, (0,), 0, 1, 0, wire))
                self.obey(ImportBlocks(0, 0, (0,), 0, 1, run))

    def _warm_up(self, context_tokens: int) -> None:
        """Make the first request not pay for what torch sets up on first use. Leaves garbage in the first blocks,
        which nobody reads: a block is read up to the tokens that its owner wrote."""
        layout = self._pool.layout
        blocks = min(layout.blocks, layout.spec.blocks_for(_WARM_UP_TOKENS))
        tokens = min(_WARM_UP_TOKENS, context_tokens, blocks * layout.spec.block_tokens)
        table = tuple(range(blocks))
        if tokens > 1:
            self._runner.run(StepPlan(0, prefill=(PrefillRow("warm-up", (0,) * (tokens - 1), 0, table, GREEDY),)))
        self._runner.run(StepPlan(1, decode=(DecodeRow("warm-up", 0, tokens - 1, table, GREEDY),)))


def _int4(files: ModelFiles, spec: ModelSpec, device: Device, progress: Callable[[str], None]) -> Int4Weights | None:
    """ConfigError for a model whose file has no weights of four bits; None where they would not help."""
    weights = Int4Weights.of(files, spec)
    if device.place.type == "cpu" and try_int4():
        return weights
    progress("four-bit weights are of no use to this device or torch; computing in bf16 throughout")
    return None


def _decoder(spec: ModelSpec, weights: dict[str, torch.Tensor], int4: Int4Weights | None, device: Device) -> Decoder:
    try:
        for name, weight in weights.items():  # one by one: what the host held of it is gone soon after
            weights[name] = weight.to(device.place)
        return Decoder(spec, weights, int4)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the weights do not fit into the GPU's memory; use a smaller model, dtype bf16, or device cpu"
        ) from error


def _check_room(layout: KvLayout, device: Device) -> None:
    """ConfigError when a GPU has no room for the pool beside the weights."""
    pool_bytes, free_bytes = layout.blocks * layout.spec.block_bytes, device.free_bytes()
    if free_bytes is not None and pool_bytes > free_bytes - _ROOM_BYTES:
        raise ConfigError(
            f"a KV pool of {pool_bytes >> 20:,} MiB does not fit: beside the weights the GPU has "
            f"{free_bytes >> 20:,} MiB free, of which {_ROOM_BYTES >> 20:,} are needed to compute; lower pool_bytes"
        )


def _transfers(
    pool: KvPool, slab: Slab, device: Device, uploads: Uploads, progress: Callable[[str], None], *, lent: LentMemory
) -> Transfers:
    if device.place.type == "cpu":
        return DirectTransfers(pool, slab, lent)
    transfers = StagedTransfers(pool, slab, device, uploads)
    if not transfers.is_pinned:
        progress("the system does not pin the staging slab: copies to and from the GPU hold steps up")
    return transfers


def kv_spec_of(spec: ModelSpec, settings: EngineSettings) -> KvSpec:
    return KvSpec(
        layers=len(spec.layers),
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        block_tokens=settings.block_tokens,
        dtype=kv_dtype_of(settings),
    )


def _ready(
    files: ModelFiles, spec: ModelSpec, layout: KvLayout, context_tokens: int, load_s: float, *, reads_lent: bool
) -> Ready:
    info = ModelInfo(files.name, files.fingerprint(), context_tokens, spec.vocab_tokens)
    return Ready(info, layout.spec, layout.blocks, files.eos_token_ids(), load_s, reads_lent)
