"""What number formats cost, teacher-forced on the reference's own outputs and on a short text: bounds, not records.

``python -m bench.precision`` measures the same on 27,000 tokens. The bounds leave room for other machines' rounding.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.precision import MAX_RISE, MAX_WIRE_KL, TEXT, costs, read, readers, report, table
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import GREEDY, KvDtype
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.model import Decoder
from kvoy.engine.quant import FEW_ROWS_BESIDE_TILES, try_int4
from kvoy.engine.tokenizer import Tokenizer
from tests.engine.running import load, logits

CASES = [
    case
    for case in json.loads((Path(__file__).parents[1] / "data" / "golden_smollm2.json").read_text())["cases"]
    if len(case["prompt_ids"]) < 1000
]
FORMATS = {
    "bf16": {"dtype": KvDtype.BF16},
    "bf16, int8 KV": {"dtype": KvDtype.BF16, "kv_dtype": KvDtype.INT8},
    "fp32, int8 KV": {"kv_dtype": KvDtype.INT8},
    "int4": {"dtype": KvDtype.BF16, "int4": True},
}
MAX_KL, MIN_TOP1 = 5e-3, 0.95
TOGETHER = 4
"""Cases in one step of decode."""
BLOCKS = TOGETHER * 70


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def forced(
    decoder: Decoder,
    pool: KvPool,
    cases: list[dict],
    cached_tokens: int = 0,
    together: int = TOGETHER,
    handed_over: Callable[["Forced"], None] | None = None,
) -> list[torch.Tensor]:
    """For each case logits [output ids, vocab] where each follows the reference's ids: its prompt in one step, or the
    first ``cached_tokens`` of it in a step before, then one step of decode a token, a few cases together. What is
    ``handed_over`` may change the prompt's KV before it is decoded."""
    found: list[torch.Tensor] = []
    for first in range(0, len(cases), together):
        rows = [Forced(case, pool, place) for place, case in enumerate(cases[first : first + together])]
        for row in rows:
            for chunk in row.chunks(cached_tokens):
                row.logits.append(logits(decoder, pool, StepPlan(1, (chunk,))))
            if handed_over is not None:
                handed_over(row)
        for step in range(max(len(row.outputs) for row in rows) - 1):
            going_on = [row for row in rows if step < len(row.outputs) - 1]
            plan = StepPlan(1, decode=tuple(row.decode(step) for row in going_on))
            for row, its in zip(going_on, logits(decoder, pool, plan).unsqueeze(1), strict=True):
                row.logits.append(its)
        found += [torch.cat(row.logits) for row in rows]
    return found


class Forced:
    """A case on its way, with a share of the pool for itself."""

    def __init__(self, case: dict, pool: KvPool, place: int) -> None:
        self.name, self.prompt, self.outputs = case["id"], tuple(case["prompt_ids"]), tuple(case["output_ids"])
        blocks = pool.layout.blocks // TOGETHER
        self.table = tuple(range(place * blocks, (place + 1) * blocks))
        self.logits: list[torch.Tensor] = []

    def chunks(self, cached_tokens: int) -> list[PrefillRow]:
        head = [PrefillRow(self.name, self.prompt[:cached_tokens], 0, self.table, None)] if cached_tokens else []
        return [*head, PrefillRow(self.name, self.prompt[cached_tokens:], cached_tokens, self.table, GREEDY)]

    def decode(self, step: int) -> DecodeRow:
        return DecodeRow(self.name, self.outputs[step], len(self.prompt) + step, self.table, GREEDY)


def divergence(reference: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL [tokens], nats."""
    theirs, ours = reference.log_softmax(-1), found.log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1)


@pytest.fixture(scope="module")
def reference(smollm2) -> list[torch.Tensor]:
    found = forced(*load(smollm2, blocks=BLOCKS, block_tokens=16), CASES)
    for case, its in zip(CASES, found, strict=True):
        assert its.argmax(-1).tolist() == case["output_ids"]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_stays_close_to_fp32_on_the_goldens(smollm2, reference, name):
    if name == "int4":
        assert try_int4()
    together = FEW_ROWS_BESIDE_TILES if name == "int4" else TOGETHER  # so few that none of them is done in bf16
    found = forced(*load(smollm2, blocks=BLOCKS, block_tokens=16, **FORMATS[name]), CASES, together=together)
    kl = torch.cat([divergence(theirs, ours) for theirs, ours in zip(reference, found, strict=True)])
    agree = torch.cat([theirs.argmax(-1) == ours.argmax(-1) for theirs, ours in zip(reference, found, strict=True)])
    assert kl.mean() < MAX_KL
    assert agree.double().mean() >= MIN_TOP1


def test_bf16_begins_an_answer_alike_whether_its_prefix_was_cached_or_not(smollm2, reference):
    decoder, pool = load(smollm2, blocks=BLOCKS, block_tokens=16, dtype=KvDtype.BF16)
    expected = {case["id"]: int(theirs[0].argmax()) for case, theirs in zip(CASES, reference, strict=True)}
    for cached in (0, 1, 5, 16, 32):
        begins = [{**case, "output_ids": case["output_ids"][:1]} for case in CASES if len(case["prompt_ids"]) > cached]
        firsts = [int(its[0].argmax()) for its in forced(decoder, pool, begins, cached)]
        assert firsts == [expected[case["id"]] for case in begins], cached


def test_int8_kv_hardly_raises_the_perplexity_of_a_text(smollm2):
    everyone = readers(smollm2, (("bf16", "bf16"), ("bf16", "int8")), pool_tokens=2 * 272, wires=("bf16",))
    ids = Tokenizer.load(smollm2).encode(TEXT.read_text()[:3000])
    read(everyone, ids, window_tokens=256, chunk_tokens=16)
    own, int8, wire = found = costs(everyone)
    assert own.kl == 0
    assert own.bf16_ratio == 1
    assert int8.bf16_ratio == pytest.approx(1.939, abs=1e-3)
    assert abs(int8.rise) < 2 * MAX_RISE  # of some 500 tokens; the bench holds 27,000 to half of it
    assert int8.kl < MAX_KL
    assert int8.top1 >= MIN_TOP1
    assert 0 < wire.own_kl < 2 * MAX_WIRE_KL  # bf16 rounds anew whatever differs a little
    assert wire.own_top1 >= MIN_TOP1
    assert len(report(found, {}, "").lines) == 5
    assert len(table(found).splitlines()) == 4
