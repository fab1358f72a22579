"""Runs a StepPlan: plan -> tensors -> one forward -> tokens. Keeps nothing about requests from step to step.

A step has two halves: ``begin`` gives the device everything it needs, ``finish`` waits for the tokens, the only time
that the host waits for a step. What is done between the two is done beside it.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kvoy.core.step import StepPlan, StepResult
from kvoy.engine.batch import Limits, lay_out
from kvoy.engine.device import Device, HostDevice, Mark
from kvoy.engine.graphs import Buckets, DecodeGraphs
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.model import Decoder
from kvoy.engine.sampler import Sampling
from kvoy.engine.uploads import Uploads


@dataclass(frozen=True, slots=True)
class RunningStep:
    step_id: int
    started_at: float
    sampling: Sampling
    outcome: Tensor  # [numbers] fp64, in the host's memory, once ``done`` is past
    done: Mark

    def finish(self) -> StepResult:
        """EngineError when the model computed NaN."""
        self.done.wait()
        sampled = tuple(self.sampling.read(self.outcome.tolist()))
        return StepResult(self.step_id, sampled, self.started_at, time.time())


class Runner:
    """Owns what a step needs beside the decoder and the pool, which are its caller's. ``context_tokens`` bounds the
    positions of a plan; without ``device`` all is on the CPU. At most one step is running."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        context_tokens: int,
        device: Device | None = None,
        uploads: Uploads | None = None,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._device = device or HostDevice()
        self._uploads = uploads or Uploads(self._device)
        self.graphs: DecodeGraphs | None = None
        self._limits = Limits(
            vocab_tokens=decoder.spec.vocab_tokens,
            context_tokens=context_tokens,
            block_tokens=pool.layout.spec.block_tokens,
            pool_blocks=pool.layout.blocks,
        )

    def capture(self, buckets: Buckets) -> None:
        """Decode steps of these sizes; before the first of them is wanted."""
        self.graphs = DecodeGraphs(self._decoder, self._pool, self._limits, self._device, buckets=buckets)

    def run(self, plan: StepPlan) -> StepResult:
        """Both halves."""
        return self.begin(plan).finish()

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> RunningStep:
        """InvariantError, with the pool untouched, for a malformed plan."""
        started_at = time.time()
        padding = None if self.graphs is None else self.graphs.buckets.of(plan)
        layout = lay_out(plan, self._limits, padding)
        sampling = Sampling.of(layout.samples, layout.packed)
        if self.graphs is None or padding is None:
            memory = self._uploads.send(layout.packed)
            logits = self._decoder.forward(layout.bind(memory), self._pool)
        else:
            graph = self.graphs[padding]
            memory = self._uploads.send(layout.packed, graph.memory)
            logits = graph.replay()[: len(layout.samples)]
        outcome = sampling.launch(logits, memory)
        host = self._device.host_copy(outcome)
        return RunningStep(plan.step_id, started_at, sampling, host, self._device.compute.mark())
