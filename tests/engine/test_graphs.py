"""Captured decode steps: which size a step takes, and that being padded to it changes not one bit."""

import pytest
import torch

from kvoy.core.errors import InvariantError
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import GREEDY, SamplingParams
from kvoy.engine.batch import Limits, Padding, lay_out, lay_out_padding
from kvoy.engine.graphs import Buckets
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.runner import Runner
from tests.engine.running import Prompt, family, load, poison, run_all

BLOCK_TOKENS = 4
BLOCKS = 60
CONTEXT_TOKENS = 64
LIMITS = Limits(vocab_tokens=96, context_tokens=CONTEXT_TOKENS, block_tokens=BLOCK_TOKENS, pool_blocks=BLOCKS)


def decodes(count: int, position: int = 5) -> StepPlan:
    rows = (DecodeRow(f"r{row}", row, position, (2 * row, 2 * row + 1), GREEDY) for row in range(count))
    return StepPlan(1, decode=tuple(rows))


@pytest.mark.parametrize(
    ("most_rows", "context_tokens", "rows", "kv_tokens"),
    [
        (0, 100, (), (100,)),
        (1, 1024, (1,), (1024,)),
        (5, 1025, (1, 2, 4, 5), (1024, 1025)),
        (64, 8192, (1, 2, 4, 8, 16, 24, 32, 48, 64), (1024, 4096, 8192)),
        (100, 131072, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100), (1024, 4096, 16384, 65536, 131072)),
    ],
)
def test_the_sizes_there_are(most_rows, context_tokens, rows, kv_tokens):
    assert Buckets.up_to(most_rows, context_tokens) == Buckets(rows, kv_tokens)


def test_sizes_come_the_largest_first():
    sizes = list(Buckets.up_to(5, 2000))
    assert sizes[0] == Padding(5, 2000)
    assert sizes == sorted(sizes, key=lambda size: (size.rows, size.kv_tokens), reverse=True)
    assert len(sizes) == 8


def test_a_step_takes_the_smallest_size_it_fits():
    buckets = Buckets((1, 2, 4, 8), (16, 64))
    for count in range(1, 9):
        for position in (0, 15, 16, 63):
            size = buckets.of(decodes(count, position))
            assert size == Padding(1 << (count - 1).bit_length(), 16 if position < 16 else 64)


def test_sizes_whose_splits_would_take_too_much_memory_are_left_out():
    buckets = Buckets.up_to(64, 131072)
    assert Padding(32, 131072) in list(buckets)
    assert Padding(64, 131072) not in list(buckets)
    assert buckets.of(decodes(40, 100_000)) is None
    assert buckets.of(decodes(40, 1000)) == Padding(48, 1024)


def test_what_is_not_captured():
    buckets = Buckets((1, 2), (16,))
    chunk = PrefillRow("a", (1,), 0, (0,), GREEDY)
    assert buckets.of(decodes(3)) is None
    assert buckets.of(decodes(1, position=16)) is None
    assert buckets.of(StepPlan(1, (chunk,))) is None
    assert buckets.of(StepPlan(1, (chunk,), decodes(1).decode)) is None
    assert Buckets.up_to(0, 64).of(decodes(1)) is None


def test_sections_lie_in_the_same_places_for_every_plan_of_a_size():
    padding = Padding(8, 40)
    empty = lay_out_padding(padding, LIMITS)
    for count in (1, 5, 8):
        layout = lay_out(decodes(count, 6), LIMITS, padding)
        assert layout.packed.size_bytes == empty.packed.size_bytes
        for name in ("token_ids", "positions", "slots", "sample_rows", "chunks", "decodes", "longest_kv"):
            assert getattr(layout, name) == getattr(empty, name)


def test_rows_of_padding_see_and_write_nothing():
    layout = lay_out(decodes(3, 6), LIMITS, Padding(4, 40))
    memory = bytearray(layout.packed.size_bytes)
    layout.packed.write(memoryview(memory))
    arrived = torch.frombuffer(memory, dtype=torch.uint8)
    tables, kv_lengths = layout.decodes.of(arrived)
    assert kv_lengths.tolist() == [7, 7, 7, 0]
    assert tables.tolist() == [[0, 1, *[0] * 14], [2, 3, *[0] * 14], [4, 5, *[0] * 14], [0] * 16]
    assert layout.slots.of(arrived).tolist() == [6, 14, 22, -1]
    assert layout.token_ids.of(arrived).tolist() == [0, 1, 2, 0]
    assert layout.sample_rows.of(arrived).tolist() == [0, 1, 2, 3]
    assert [at.request_id for at in layout.samples] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("padding", [Padding(2, 40), Padding(4, 6)])
def test_a_plan_that_does_not_fit_its_padding_is_refused(padding):
    with pytest.raises(InvariantError):
        lay_out(decodes(3, 6), LIMITS, padding)


def bits(pool: KvPool) -> torch.Tensor:
    return torch.stack([pool.layer(layer).values for layer in range(pool.layout.spec.layers)], 1).view(torch.int32)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2"])
def test_padded_steps_equal_plain_ones_bit_for_bit(name):
    """Tokens, log probabilities and every byte of the pool, over batches of every size up to 7."""
    sampling = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, seed=5, max_tokens=1, top_logprobs=3)

    def outcome(*, captured: bool) -> tuple[list, torch.Tensor]:
        decoder, pool = load(family(name), blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
        poison(pool)
        runner = Runner(decoder, pool, CONTEXT_TOKENS)
        if captured:
            runner.capture(Buckets.up_to(5, CONTEXT_TOKENS))  # steps of 6 and 7 rows are run as they are
        prompts = [
            Prompt(f"p{n}", tuple(range(3, 7 + 3 * n)), 4 + 3 * n, GREEDY if n % 2 else sampling) for n in range(7)
        ]
        run_all(runner, pool, prompts, chunk_tokens=9, at_once=7)
        return [prompt.sampled for prompt in prompts], bits(pool)

    plain, plain_bits = outcome(captured=False)
    padded, padded_bits = outcome(captured=True)
    assert padded == plain
    assert torch.equal(padded_bits, plain_bits)


def test_capturing_writes_nothing():
    decoder, pool = load(family("llama"), blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
    poison(pool)
    before = bits(pool)
    Runner(decoder, pool, CONTEXT_TOKENS).capture(Buckets.up_to(8, CONTEXT_TOKENS))
    assert torch.equal(bits(pool), before)
