"""A row's numbers do not depend on its batch mates, to the last bit: in fp32 as the engine is, and where a library
splits its sums by the number of rows, because products then go through tiles of one size."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvoy.core.errors import ConfigError
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import GREEDY, SamplingParams
from kvoy.engine import model, row_invariance
from kvoy.engine.engine import Engine
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.messages import EngineSettings
from kvoy.engine.row_invariance import FixedRows, RowInvariance, is_row_invariant, prove, tile_rows_for
from kvoy.engine.runner import Runner
from kvoy.engine.slab import nameless_file
from tests.engine.running import FAMILIES, Prompt, family, load, logits, run_all, step

SETTINGS = EngineSettings(
    model=str(FAMILIES / "gemma3"),
    dtype="fp32",
    block_tokens=4,
    pool_bytes=1 << 20,
    slot_bytes=0,
    slots=2,
    threads=1,
    deterministic=True,
)
RANDOM = SamplingParams(temperature=0.8, top_k=0, top_p=0.95, seed=7, max_tokens=1)
ROWS = 40
CHUNK = PrefillRow("chunk", tuple(range(100, 153)), 0, (0, 1, 2, 3), GREEDY)


@pytest.fixture(scope="module", params=["packed", "plain"])
def decoder_and_pool(request, smollm2) -> tuple[model.Decoder, KvPool]:
    """SmolLM2, packed where the machine can, and with the library's own products, which hold no such promise."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(model, "try_packing", lambda _: False)
        decoder, pool = load(smollm2, blocks=200, block_tokens=16)
    decoder.compute_rows_alike(RowInvariance(lambda _: None))
    return decoder, pool


def histories(numbers: random.Random) -> list[tuple[int, ...]]:
    lengths = [numbers.choice((1, 2, 15, 16, 17, 33, 48)) for _ in range(ROWS)]
    return [tuple(numbers.randrange(49_152) for _ in range(length + 1)) for length in lengths]


def test_logits_are_the_same_alone_in_any_batch_and_beside_chunks(decoder_and_pool):
    decoder, pool = decoder_and_pool
    numbers = random.Random(3)
    prompts = histories(numbers)
    tables = [tuple(range(4 * row + 4, 4 * row + 8)) for row in range(ROWS)]
    chunks = [PrefillRow(str(row), ids[:-1], 0, tables[row]) for row, ids in enumerate(prompts)]
    logits(decoder, pool, StepPlan(0, tuple(chunks)))
    rows = [DecodeRow(str(row), ids[-1], len(ids) - 1, tables[row], GREEDY) for row, ids in enumerate(prompts)]
    alone = [logits(decoder, pool, StepPlan(1, (), (row,)))[0] for row in rows]
    for size in (2, 3, 8, 32, 33, ROWS):
        chosen = numbers.sample(range(ROWS), size)
        plan = StepPlan(2, decode=tuple(rows[row] for row in chosen))
        together = logits(decoder, pool, plan)
        beside_a_chunk = logits(decoder, pool, replace(plan, prefill=(CHUNK,)))[1:]
        for place, row in enumerate(chosen):
            assert torch.equal(together[place], alone[row]), (size, row)
            assert torch.equal(beside_a_chunk[place], alone[row]), (size, row)


def test_a_chunk_is_the_same_alone_and_in_company(decoder_and_pool):
    decoder, pool = decoder_and_pool
    alone = logits(decoder, pool, StepPlan(1, (CHUNK,)))
    bits = pool.layer(29).values[:4].clone()
    other = PrefillRow("other", tuple(range(7, 90)), 0, tuple(range(10, 16)), GREEDY)
    row = DecodeRow("row", 5, 0, (20,), GREEDY)
    together = logits(decoder, pool, StepPlan(2, (other, CHUNK), (row,)))
    assert torch.equal(together[1], alone[0])
    assert torch.equal(pool.layer(29).values[:3], bits[:3])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "mistral_window"])
def test_samples_do_not_depend_on_company_place_or_engine(name):
    decoder, pool = load(family(name), blocks=300, block_tokens=4)
    runner = Runner(decoder, pool, 128)
    numbers = random.Random(1)
    asked = [
        (f"r{n}", tuple(numbers.randrange(3, 90) for _ in range(numbers.randrange(1, 30))), replace(RANDOM, seed=n))
        for n in range(20)
    ]

    def prompts() -> list[Prompt]:
        return [Prompt(name, ids, 16, sampling) for name, ids, sampling in asked]

    alone, together, moved = prompts(), prompts(), prompts()
    run_all(runner, pool, alone, chunk_tokens=64, at_once=1)
    run_all(runner, pool, together[::-1], chunk_tokens=64, at_once=20)
    expected = [prompt.output_ids for prompt in alone]
    assert [prompt.output_ids for prompt in together] == expected
    assert len({tuple(ids) for ids in expected}) > 15

    elsewhere, other_pool = load(family(name), blocks=300, block_tokens=4)
    other = Runner(elsewhere, other_pool, 128)
    for row, prompt in enumerate(moved):
        prompt.table = tuple(range(12 * row, 12 * row + 12))
    for _ in range(7):
        step(runner, moved, 64)
    for layer in range(pool.layout.spec.layers):
        other_pool.layer(layer).values.copy_(pool.layer(layer).values)
    while running := [prompt for prompt in moved[::-1] if not prompt.is_done]:
        step(other, running, 64)
    assert [prompt.output_ids for prompt in moved] == expected


def by_rows(pick: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    """A product whose sums are split in ``pick(rows)`` parts, as libraries do it."""
    weight = torch.randn((40, 96), generator=torch.Generator().manual_seed(2))

    def op(x: Tensor) -> Tensor:
        parts = pick(x.shape[0])
        terms = x.unsqueeze(1) * weight  # [rows, out, in]: elementwise, the same for any number of rows
        return sum((part.double().sum(-1).float() for part in terms.chunk(parts, -1)), torch.zeros(x.shape[0], 40))

    return op


LIKE = torch.empty(96)


@pytest.mark.parametrize(
    ("pick", "tile_rows"),
    [
        (lambda _: 3, None),
        (lambda rows: 2 if rows == 1 else 1, 16),
        (lambda rows: 2 if rows > 8 else 1, 16),
        (lambda rows: 1 + rows % 5, 16),
    ],
)
def test_an_operator_that_looks_at_the_number_of_rows_is_found_out_and_tiled(pick, tile_rows):
    op = by_rows(pick)
    assert is_row_invariant(op, LIKE) is (tile_rows is None)
    assert tile_rows_for(op, LIKE) == tile_rows
    told: list[str] = []
    held = RowInvariance(told.append).hold("down", op, LIKE)
    assert is_row_invariant(held, LIKE)
    assert len(told) == (tile_rows is not None)


def test_where_even_a_tile_knows_its_rows_apart_each_row_is_alone():
    def by_place(x: Tensor) -> Tensor:
        return x * (1 + torch.arange(x.shape[0]).unsqueeze(1) % 3)

    assert tile_rows_for(by_place, LIKE) == 1
    assert is_row_invariant(FixedRows(by_place, 1), LIKE)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 11])
def test_tiles_compute_what_the_whole_does_and_see_one_shape(rows):
    weight = torch.randn(5, 6)
    shapes = []

    def op(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return functional.linear(x, weight)

    x = torch.randn(rows, 6)
    torch.testing.assert_close(FixedRows(op, 4)(x), functional.linear(x, weight))
    assert set(shapes) == {(4, 6)}


def test_a_deterministic_engine_starts_and_says_nothing_of_it():
    told: list[str] = []
    engine = Engine(SETTINGS, nameless_file(), told.append)
    assert engine.ready.pool_blocks > 0
    assert told[0] == "loading gemma3 in fp32"


@pytest.mark.parametrize("change", [{"block_tokens": 1}, {"context_tokens": 1}, {"pool_bytes": 4 * 2 * 16 * 2 * 4 * 4}])
def test_the_smallest_deterministic_engines_start_too(change):
    assert Engine(replace(SETTINGS, **change), nameless_file(), lambda _: None).ready.pool_blocks >= 1


def test_an_engine_whose_rows_differ_does_not_start(monkeypatch):
    normal = row_invariance._sampled

    def otherwise(run, decodes, chunks=()):
        sampled = normal(run, decodes, chunks)
        return sampled[::-1] if len(decodes) == 8 else sampled

    monkeypatch.setattr(row_invariance, "_sampled", otherwise)
    with pytest.raises(ConfigError, match=r"otherwise in a batch of 8 than in one of 33.*leave deterministic out"):
        Engine(SETTINGS, nameless_file(), lambda _: None)


def test_the_proof_leaves_no_row_out():
    decoder, pool = load(family("llama"), blocks=40, block_tokens=4)
    seen: list[StepPlan] = []
    runner = Runner(decoder, pool, 64)

    def run(plan: StepPlan):
        seen.append(plan)
        return runner.run(plan)

    prove(run, pool.layout.blocks, 4, decoder.spec.vocab_tokens)
    assert {len(plan.decode) for plan in seen} == {0, 1, 2, 3, 8, 33}
    assert {(len(plan.decode), len(plan.prefill)) for plan in seen} >= {(33, 0), (33, 1), (2, 1)}
