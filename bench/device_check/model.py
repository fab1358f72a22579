"""The engine's runner with the shape of an 8B Llama and random weights: prefill, and decode through captured steps.

Times are the host's, from a plan to its tokens. The floor of a decode step is the time to read the weights and the KV
once; of a prefill, the time of its products at the measured rate.
"""

import math
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.device_check.bench import Bench
from bench.device_check.cases import BLOCK_TOKENS, Heads
from bench.device_check.report import Report, Row, duration
from bench.device_check.speed import attention_flops
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import GREEDY, KvDtype, KvSpec, SamplingParams
from kvoy.engine.batch import SampleAt
from kvoy.engine.graphs import Buckets
from kvoy.engine.kv_cache import KvLayout, KvPool
from kvoy.engine.model import Decoder
from kvoy.engine.packing import Packed
from kvoy.engine.rope import plain
from kvoy.engine.runner import Runner
from kvoy.engine.sampler import Sampling, sample
from kvoy.engine.spec import LayerSpec, ModelSpec, weight_shapes
from kvoy.engine.uploads import Uploads

_DECODE_TARGET = 0.75
_SAME_STEPS = 4


def check(bench: Bench, report: Report) -> None:
    report.check("sampling", lambda: _sampling(bench))
    model = _Model(bench)
    for tokens in (bench.sizes.of(4096, 20), bench.sizes.of(8192, 40)):
        report.check(f"prefill {tokens} tokens", partial(model.prefill, tokens))
    report.check("capture", model.capture)
    for rows in model.rows:
        report.check(f"decode {rows}", partial(model.decode, rows))
    report.check("captured steps and plain ones", model.compare)
    report.check("mixed step", model.mixed)


def llama(bench: Bench) -> ModelSpec:
    sizes = bench.sizes
    layer = LayerSpec(rope=plain(sizes.of(128, 16), 500_000.0))
    return ModelSpec(
        family="llama",
        layers=(layer,) * sizes.of(32, 2),
        hidden=sizes.of(4096, 64),
        heads=sizes.of(32, 4),
        kv_heads=sizes.of(8, 2),
        head_dim=sizes.of(128, 16),
        ffn=sizes.of(14336, 96),
        vocab_tokens=sizes.of(128256, 300),
        context_tokens=8192,
        norm_eps=1e-5,
        activation="silu",
        attention_scale=sizes.of(128, 16) ** -0.5,
    )


def random_weights(bench: Bench, spec: ModelSpec) -> dict[str, Tensor]:
    """Such that numbers keep their size through the layers."""
    weights = {}
    for name, shape in weight_shapes(spec).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=torch.bfloat16, device=bench.place)
        else:
            scale = 1.0 if name == "embed" else shape[1] ** -0.5
            weights[name] = torch.empty(shape, dtype=torch.bfloat16, device=bench.place).normal_(0, scale)
    return weights


class _Model:
    """Owns decoder, pool and runners for as long as the part runs."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.spec = spec = llama(bench)
        self.rows = (1, 32, 128) if not bench.sizes.is_tiny else (1, 3, 4)
        self._kv_tokens = bench.sizes.of(2048, 60)
        self._each = -(-self._kv_tokens // BLOCK_TOKENS) + 1
        blocks = max((self.rows[-1] + 1) * self._each, 8192 // BLOCK_TOKENS)
        kv_spec = KvSpec(len(spec.layers), spec.kv_heads, spec.head_dim, BLOCK_TOKENS, KvDtype.BF16)
        self._pool = KvPool(KvLayout(kv_spec, blocks), bench.place)
        for index in range(kv_spec.layers):
            self._pool.layer(index).values.normal_()
        self._table = torch.randperm(blocks).tolist()
        self._decoder = Decoder(spec, random_weights(bench, spec))
        uploads = Uploads(bench.device)
        self._plain = Runner(self._decoder, self._pool, spec.context_tokens, bench.device, uploads)
        self._captured = Runner(self._decoder, self._pool, spec.context_tokens, bench.device, uploads)

    @property
    def _layer_weights(self) -> int:
        """Numbers in all that multiplies a token, the head aside."""
        shapes = weight_shapes(self.spec)
        return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers."))

    def prefill(self, tokens: int) -> Row:
        spec = self.spec
        ids = tuple(torch.randint(0, spec.vocab_tokens, (tokens,)).tolist())
        row = PrefillRow("a", ids, 0, tuple(self._table[: -(-tokens // BLOCK_TOKENS)]), GREEDY)
        seconds = self._bench.wall_seconds(lambda: self._plain.run(StepPlan(1, (row,))), 3)
        flops = 2 * tokens * self._layer_weights + 2 * spec.vocab_tokens * spec.hidden
        flops += len(spec.layers) * attention_flops(Heads(spec.heads, spec.kv_heads, spec.head_dim), tokens)
        share = flops / self._bench.bf16_flops_a_second / seconds
        return Row(f"prefill of {tokens} tokens, {tokens / seconds:,.0f} tokens/s", duration(seconds), share)

    def capture(self) -> Row:
        longest = next(tokens for tokens in Buckets.up_to(1, 8192).kv_tokens if tokens > self._kv_tokens)
        started_at = time.perf_counter()
        self._captured.capture(Buckets(self.rows, (longest,)))
        self._bench.wait()
        seconds = time.perf_counter() - started_at
        return Row(f"capture of {len(self.rows)} sizes of decode steps", duration(seconds))

    def decode(self, rows: int) -> Iterator[Row]:
        spec, bench = self.spec, self._bench
        plan = self._step(rows, [0] * rows, 0)
        seconds = bench.wall_seconds(lambda: self._captured.run(plan), 20)
        weight_bytes = 2 * (self._layer_weights + spec.vocab_tokens * spec.hidden)
        kv_bytes = rows * self._kv_tokens * len(spec.layers) * spec.kv_heads * spec.head_dim * 2 * 2
        floor = (weight_bytes + kv_bytes) / bench.copy_bytes_a_second
        about = f"decode of {rows} at {self._kv_tokens}, {rows / seconds:,.0f} tokens/s"
        yield Row(about, duration(seconds), floor / seconds, _DECODE_TARGET)
        graphs = self._captured.graphs
        assert graphs is not None
        size = graphs.buckets.of(plan)
        assert size is not None
        replayed = bench.seconds(graphs[size].replay)
        yield Row("  of which the device computes", duration(replayed), floor / replayed)
        plain = bench.wall_seconds(lambda: self._plain.run(plan), 3)
        yield Row("  the same step, not captured", duration(plain), floor / plain)

    def compare(self) -> Row:
        """Greedy tokens of a few steps, captured and not, from the same KV on."""
        rows = self.rows[1]
        paths = [self._generated(runner, rows) for runner in (self._captured, self._plain)]
        return Row(
            f"{_SAME_STEPS} steps of {rows} rows, captured as plain", "same tokens", is_right=paths[0] == paths[1]
        )

    def mixed(self) -> Row:
        """A chunk that goes on where another ended, beside rows that decode."""
        rows, tokens = self.rows[1], self._bench.sizes.of(600, 30)
        table = tuple(self._table[-(tokens // BLOCK_TOKENS + 1) :])
        half = tokens // 2
        self._plain.run(StepPlan(1, (PrefillRow("a", (7,) * half, 0, table),)))
        chunk = PrefillRow("a", (7,) * (tokens - half), half, table, GREEDY)
        plan = StepPlan(2, (chunk,), self._step(rows, [7] * rows, 0).decode)
        sampled = self._captured.run(plan).sampled
        return Row(f"a step of a chunk and {rows} rows", f"{len(sampled)} tokens", is_right=len(sampled) == rows + 1)

    def _generated(self, runner: Runner, rows: int) -> list[list[int]]:
        tokens, path = [7] * rows, []
        for step in range(_SAME_STEPS):
            tokens = [one.token_id for one in runner.run(self._step(rows, tokens, step)).sampled]
            path.append(tokens)
        return path

    def _step(self, rows: int, tokens: list[int], step: int) -> StepPlan:
        position = self._kv_tokens - 1 + step
        tables = [tuple(self._table[row * self._each : (row + 1) * self._each]) for row in range(rows)]
        return StepPlan(
            1, decode=tuple(DecodeRow(str(row), tokens[row], position, tables[row], GREEDY) for row in range(rows))
        )


def _sampling(bench: Bench) -> Row:
    """Every kind of request, drawn on the device as on the CPU; a draw may fall on a rounding once."""
    rows, vocab = 64, bench.sizes.of(128256, 3000)
    logits = torch.randn((rows, vocab)) * 3
    kinds = ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 40, 1.0), (0.9, 0, 0.9), (1.2, 2000, 0.8), (1.0, 1, 0.5))
    wanted = [
        SampleAt(str(row), SamplingParams(*kinds[row % len(kinds)], seed=row, max_tokens=1, top_logprobs=row % 3), row)
        for row in range(rows)
    ]
    packed = Packed()
    sampling = Sampling.of(wanted, packed)
    outcome = sampling.launch(logits.to(bench.place), Uploads(bench.device).send(packed))
    found, expected = sampling.read(outcome.tolist()), sample(logits, wanted)
    differ = sum(one.token_id != other.token_id for one, other in zip(found, expected, strict=True))
    return Row("sampling, 64 rows of 6 kinds, as on the CPU", f"{differ} differ", is_right=differ <= 1)
