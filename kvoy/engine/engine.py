"""What is behind the channel: settings -> model, pool and slab; order -> answer. One order at a time, in order.

Owns everything that takes memory. Knows nothing of processes, sockets or signals: that is worker.py.
"""

import time
from collections.abc import Callable
from typing import assert_never

import torch

from kvoy.core.errors import ConfigError
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import GREEDY, KvDtype, KvSpec, ModelInfo
from kvoy.engine.kv_cache import KvLayout, KvPool, blocks_in
from kvoy.engine.messages import (
    EngineSettings,
    ExportBlocks,
    Exported,
    ImportBlocks,
    Imported,
    Ready,
    RunStep,
    StepDone,
)
from kvoy.engine.model import Decoder
from kvoy.engine.models import ModelFiles, resolve
from kvoy.engine.runner import Runner
from kvoy.engine.slab import Slab, slot_bytes
from kvoy.engine.spec import ModelSpec
from kvoy.engine.weights import load_weights

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_KV_DTYPES = {"fp32": KvDtype.FP32, "bf16": KvDtype.BF16, "int8": KvDtype.INT8}
_WARM_UP_TOKENS = 64


class Engine:
    """A loaded, warm model with its pool and slab. ``ready`` is what the service is told about it."""

    def __init__(self, settings: EngineSettings, slab_fd: int, progress: Callable[[str], None]) -> None:
        """Takes the slab's descriptor over. ConfigError for settings, ModelError for a model that cannot be served."""
        started_at = time.monotonic()
        check_settings(settings)
        torch.set_num_threads(settings.threads)
        files = resolve(settings.model, progress=progress)
        spec = files.spec()
        kv_spec = kv_spec_of(spec, settings)
        context_tokens = min(settings.context_tokens or spec.context_tokens, spec.context_tokens)
        layout = KvLayout(kv_spec, blocks_in(settings.pool_bytes, kv_spec))
        progress(f"loading {files.name} in {settings.dtype}")
        decoder = Decoder(spec, load_weights(files, _DTYPES[settings.dtype], progress))
        self._pool = KvPool(layout)
        self._runner = Runner(decoder, self._pool, context_tokens)
        self._slab = Slab(slab_fd, settings.slots, slot_bytes(settings.slot_bytes, kv_spec))
        self._warm_up(context_tokens)
        self.ready = _ready(files, spec, layout, context_tokens, time.monotonic() - started_at)

    def obey(self, order: RunStep | ExportBlocks | ImportBlocks) -> StepDone | Exported | Imported:
        """InvariantError for an order that does not fit, before it has changed anything."""
        match order:
            case RunStep(plan):
                return StepDone(self._runner.run(plan))
            case ExportBlocks():
                self._pool.export_blocks(order, self._slab.slot(order.slot))
                return Exported(order.transfer_id)
            case ImportBlocks():
                self._pool.import_blocks(order, self._slab.slot(order.slot))
                return Imported(order.transfer_id)
            case _:
                assert_never(order)

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


def check_settings(settings: EngineSettings) -> None:
    """ConfigError, with what to do, for a value that no model could run with."""
    if settings.device != "cpu":
        raise ConfigError(f"there is no device {settings.device!r} here; use cpu")
    if settings.dtype not in _DTYPES:
        raise ConfigError(f"dtype {settings.dtype!r} is not known; use {' or '.join(_DTYPES)}")
    if settings.kv_dtype not in ("auto", *_KV_DTYPES):
        raise ConfigError(f"kv_dtype {settings.kv_dtype!r} is not known; use auto, {', '.join(_KV_DTYPES)}")
    for name in ("block_tokens", "slots", "threads"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(settings, name)}")
    for name in ("pool_bytes", "slot_bytes", "context_tokens"):
        if getattr(settings, name) < 0:
            raise ConfigError(f"{name} must not be negative, as {getattr(settings, name)} is")


def kv_spec_of(spec: ModelSpec, settings: EngineSettings) -> KvSpec:
    label = settings.dtype if settings.kv_dtype == "auto" else settings.kv_dtype
    return KvSpec(
        layers=len(spec.layers),
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        block_tokens=settings.block_tokens,
        dtype=_KV_DTYPES[label],
    )


def _ready(files: ModelFiles, spec: ModelSpec, layout: KvLayout, context_tokens: int, load_s: float) -> Ready:
    info = ModelInfo(files.name, files.fingerprint(), context_tokens, spec.vocab_tokens)
    return Ready(info, layout.spec, layout.blocks, files.eos_token_ids(), load_s)
