"""Steps as a brain sees them: order of results, malformed plans, blocks that leave and come back."""

import math
from dataclasses import replace

import pytest
import torch

from kvoy.core.errors import EngineError, InvariantError
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import GREEDY, KvDtype, SamplingParams
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.messages import ExportBlocks, ImportBlocks
from kvoy.engine.runner import Runner
from tests.engine.running import Prompt, family, load, poison, run_all, step

BLOCK_TOKENS = 4
BLOCKS = 40
CONTEXT_TOKENS = 64


@pytest.fixture(params=[("llama", KvDtype.FP32), ("gemma3", KvDtype.FP32), ("gemma3", KvDtype.INT8)], ids=str)
def engine(request) -> tuple[Runner, KvPool]:
    name, kv_dtype = request.param
    decoder, pool = load(family(name), blocks=BLOCKS, block_tokens=BLOCK_TOKENS, kv_dtype=kv_dtype)
    poison(pool)
    return Runner(decoder, pool, CONTEXT_TOKENS), pool


def bits(pool: KvPool) -> torch.Tensor:
    """[block, layer, kv head, token, bytes], its scales included."""
    layers = [pool.layer(layer) for layer in range(pool.layout.spec.layers)]
    parts = [[layer.values for layer in layers], [layer.scales for layer in layers if layer.scales is not None]]
    return torch.cat([torch.stack(part, 1).view(torch.uint8) for part in parts if part], -1)


def test_results_are_the_sampling_prefill_rows_then_the_decode_rows(engine):
    runner, _ = engine
    runner.run(StepPlan(1, (PrefillRow("d", (9, 8), 0, (30,)), PrefillRow("e", (9,), 0, (31,)))))
    plan = StepPlan(
        7,
        prefill=(
            PrefillRow("a", (5, 6), 0, (1,), GREEDY),
            PrefillRow("b", (5, 6), 0, (2,)),
            PrefillRow("c", (5, 6), 0, (3,), GREEDY),
        ),
        decode=(DecodeRow("e", 4, 1, (31,), GREEDY), DecodeRow("d", 4, 2, (30,), GREEDY)),
    )
    result = runner.run(plan)
    assert [one.request_id for one in result.sampled] == ["a", "c", "e", "d"]
    assert result.step_id == 7
    assert result.sampled[0].token_id == result.sampled[1].token_id
    assert all(one.logprob is None for one in result.sampled)
    assert 0 < result.started_at <= result.ended_at


def test_a_step_that_samples_nothing_has_no_results(engine):
    runner, _ = engine
    assert runner.run(StepPlan(1, (PrefillRow("a", (5, 6), 0, (1,)),))).sampled == ()


GOOD = PrefillRow("good", (1, 2, 3), 0, (0,), GREEDY)
MALFORMED = {
    "no rows": StepPlan(1),
    "no tokens": StepPlan(1, (GOOD, PrefillRow("x", (), 0, (1,)))),
    "start below 0": StepPlan(1, (GOOD, PrefillRow("x", (5,), -1, (1,)))),
    "table too short": StepPlan(1, (GOOD, PrefillRow("x", (5,) * 5, 0, (1,)))),
    "table too short for a decode row": StepPlan(1, (GOOD,), (DecodeRow("x", 5, 4, (1,), GREEDY),)),
    "empty table": StepPlan(1, (GOOD,), (DecodeRow("x", 5, 0, (), GREEDY),)),
    "block past the pool": StepPlan(1, (GOOD, PrefillRow("x", (5,), 0, (BLOCKS,)))),
    "block below 0": StepPlan(1, (GOOD,), (DecodeRow("x", 5, 4, (1, -1), GREEDY),)),
    "token past the vocabulary": StepPlan(1, (GOOD, PrefillRow("x", (5, 96), 0, (1,)))),
    "token below 0": StepPlan(1, (GOOD,), (DecodeRow("x", -1, 0, (1,), GREEDY),)),
    "past the context": StepPlan(1, (GOOD,), (DecodeRow("x", 5, CONTEXT_TOKENS, tuple(range(1, 18)), GREEDY),)),
    "two rows at one place": StepPlan(1, (GOOD,), (DecodeRow("x", 5, 1, (0,), GREEDY),)),
}


@pytest.mark.parametrize("plan", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_plan_is_refused_and_changes_nothing(engine, plan):
    runner, pool = engine
    before = bits(pool)
    with pytest.raises(InvariantError):
        runner.run(plan)
    assert torch.equal(bits(pool), before)


def test_only_the_rows_own_places_are_written(engine):
    runner, pool = engine
    before = bits(pool)
    runner.run(StepPlan(1, (PrefillRow("a", (5, 6, 7), 0, (11, 3)),)))
    runner.run(StepPlan(2, (PrefillRow("a", (5, 6), 3, (11, 3)),), (DecodeRow("b", 4, 0, (8,), GREEDY),)))
    changed = (bits(pool) != before).any(-1).any(1).any(1).nonzero().tolist()  # [block, token]
    assert changed == [[3, 0], [8, 0], [11, 0], [11, 1], [11, 2], [11, 3]]


def test_a_model_that_computes_nan_is_an_error_not_a_token(engine):
    runner, _ = engine
    with pytest.raises(EngineError, match="not numbers for a at 3"):
        runner.run(StepPlan(1, (), (DecodeRow("a", 5, 2, (1,), GREEDY),)))  # its first tokens were never written


@pytest.mark.parametrize("layers_each", [1, 4])
def test_exported_blocks_go_on_in_another_pool_as_if_nothing_had_happened(engine, layers_each):
    source, source_pool = engine
    spec = source_pool.layout.spec
    ids = tuple(range(3, 25))
    stays = Prompt("stays", ids, 12)
    run_all(source, source_pool, [stays], chunk_tokens=5, at_once=1)

    leaves = Prompt("leaves", ids, 12, table=tuple(range(20, 29)))
    while not leaves.sampled:
        step(source, [leaves], 5)
    blocks = leaves.table[: spec.blocks_for(len(ids))]
    target_pool = KvPool(source_pool.layout)
    poison(target_pool)
    target = Runner(source._decoder, target_pool, CONTEXT_TOKENS)
    new_blocks = tuple(range(8, 8 - len(blocks), -1))
    for first_layer in range(0, spec.layers, layers_each):
        layers = min(layers_each, spec.layers - first_layer)
        slot = memoryview(bytearray(b"\xff" * (len(blocks) * layers * spec.layer_bytes + 64)))
        source_pool.export_blocks(ExportBlocks(1, 0, blocks, first_layer, layers, len(ids)), slot)
        assert bytes(slot[-64:]) == b"\xff" * 64
        target_pool.import_blocks(ImportBlocks(1, 0, new_blocks, first_layer, layers), slot)
    expected = bits(source_pool)[list(blocks)]
    expected[-1, :, :, len(ids) % BLOCK_TOKENS :] = 0
    assert torch.equal(bits(target_pool)[list(new_blocks)], expected)

    leaves.table = (*new_blocks, 20, 21, 22, 23)
    while not leaves.is_done:
        step(target, [leaves], 5)
    assert leaves.output_ids == stays.output_ids


def test_transfers_that_do_not_fit_are_refused_and_change_nothing(engine):
    _, pool = engine
    spec, before = pool.layout.spec, bits(pool)
    slot = memoryview(bytearray(b"\xff" * 2 * spec.block_bytes))
    export = ExportBlocks(1, 0, (3, 4), 0, spec.layers, 8)
    for change in (
        {"blocks": ()},
        {"blocks": (3, BLOCKS)},
        {"blocks": (-1, 3)},
        {"blocks": (1, 2, 3)},
        {"first_layer": 1},
        {"first_layer": -1},
        {"layers": 0},
        {"valid_tokens": -1},
        {"valid_tokens": 9},
    ):
        wrong = replace(export, **change)
        with pytest.raises(InvariantError):
            pool.export_blocks(wrong, slot)
        if "valid_tokens" not in change:
            with pytest.raises(InvariantError):
                pool.import_blocks(ImportBlocks(1, 0, wrong.blocks, wrong.first_layer, wrong.layers), slot)
    with pytest.raises(InvariantError):
        pool.import_blocks(ImportBlocks(1, 0, (3, 3), 0, spec.layers), slot)
    assert torch.equal(bits(pool), before)
    assert bytes(slot) == b"\xff" * len(slot)


def test_a_random_continuation_does_not_depend_on_the_batch_or_the_chunks(engine):
    sampling = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, seed=11, max_tokens=1, top_logprobs=2)
    names = ["a", "b", "c", "d"]

    def outputs(*, chunk_tokens: int, at_once: int) -> list[list[int]]:
        prompts = [
            Prompt(name, tuple(range(3 + n, 17 + 3 * n)), 15, replace(sampling, seed=n)) for n, name in enumerate(names)
        ]
        run_all(*engine, prompts, chunk_tokens=chunk_tokens, at_once=at_once)
        assert all(math.isfinite(one.logprob.logprob) for prompt in prompts for one in prompt.sampled)
        return [prompt.output_ids for prompt in prompts]

    alone = outputs(chunk_tokens=100, at_once=1)
    assert outputs(chunk_tokens=3, at_once=4) == alone
    assert outputs(chunk_tokens=7, at_once=2) == alone
    assert len({tuple(ids) for ids in alone}) == 4
