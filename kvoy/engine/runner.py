"""Runs a StepPlan: plan -> tensors -> one forward -> tokens. Keeps nothing about requests from step to step."""

import time

import torch

from kvoy.core.step import StepPlan, StepResult
from kvoy.engine.batch import Limits, build_batch
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.model import Decoder
from kvoy.engine.sampler import sample


class Runner:
    """Owns nothing; the decoder and the pool are its caller's. ``context_tokens`` bounds the positions of a plan."""

    def __init__(self, decoder: Decoder, pool: KvPool, context_tokens: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._limits = Limits(
            vocab_tokens=decoder.spec.vocab_tokens,
            context_tokens=context_tokens,
            block_tokens=pool.layout.spec.block_tokens,
            pool_blocks=pool.layout.blocks,
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """InvariantError, with the pool untouched, for a malformed plan; EngineError when the model computes NaN."""
        started_at = time.time()
        batch = build_batch(plan, self._limits)
        logits = self._decoder.forward(batch, self._pool)
        sampled = tuple(sample(logits, batch.samples))
        return StepResult(plan.step_id, sampled, started_at, time.time())
