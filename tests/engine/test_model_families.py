"""The one decoder against transformers, family by family: whole prompts, chunks, decode rows, blocks in any order."""

import json
import random
from dataclasses import replace

import pytest
import torch

from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import GREEDY, KvDtype
from kvoy.engine.model import Decoder
from kvoy.engine.weights import load_weights
from tests.engine.running import FAMILIES, family, load, logits, poison

NAMES = sorted(path.name for path in FAMILIES.iterdir() if (path / "expected.json").is_file())
BLOCK_TOKENS = 4
BLOCKS = 60


def expected(name: str) -> dict:
    return json.loads((FAMILIES / name / "expected.json").read_text())


def shuffled_table(blocks: int) -> tuple[int, ...]:
    return tuple(random.Random(3).sample(range(BLOCKS), blocks))


def close(actual: torch.Tensor, wanted: object) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(wanted), rtol=2e-4, atol=2e-4)


def test_all_families_have_vectors():
    assert {"llama", "qwen2", "qwen3", "mistral_window", "gemma3", "llama_llama3", "llama_yarn"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_whole_prompts_in_one_step_equal_transformers(name):
    case = expected(name)
    decoder, pool = load(family(name), blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
    poison(pool)
    free = list(shuffled_table(BLOCKS))
    rows = []
    for position in case["positions"]:
        table = tuple(free.pop() for _ in range(pool.layout.spec.blocks_for(position + 1)))
        rows.append(PrefillRow(str(position), tuple(case["input_ids"][: position + 1]), 0, table, GREEDY))
    close(logits(decoder, pool, StepPlan(1, tuple(rows))), case["logits"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk_tokens", [1, 3, 8, 11])
def test_chunks_equal_transformers(name, chunk_tokens):
    case = expected(name)
    decoder, pool = load(family(name), blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
    poison(pool)
    ids = tuple(case["input_ids"])
    table = shuffled_table(pool.layout.spec.blocks_for(len(ids)))
    ends = sorted({*range(chunk_tokens, len(ids), chunk_tokens), *(position + 1 for position in case["positions"])})
    found = {}
    for start, end in zip([0, *ends], ends, strict=False):
        row = PrefillRow("a", ids[start:end], start, table, GREEDY)
        found[end - 1] = logits(decoder, pool, StepPlan(1, (row,)))[0]
    close(torch.stack([found[position] for position in case["positions"]]), case["logits"])


@pytest.mark.parametrize("name", NAMES)
def test_decode_rows_beside_chunks_equal_transformers(name):
    """One request decodes token by token while, in the same steps, another's prompt is prefilled in chunks."""
    case = expected(name)
    decoder, pool = load(family(name), blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
    poison(pool)
    ids = tuple(case["input_ids"])
    blocks = pool.layout.spec.blocks_for(len(ids))
    table, other = shuffled_table(2 * blocks)[:blocks], shuffled_table(2 * blocks)[blocks:]
    found = {}
    for position, token in enumerate(ids):
        chunk = PrefillRow("b", ids[position : position + 1], position, other, GREEDY if position % 2 else None)
        decode = DecodeRow("a", token, position, table, GREEDY)
        both = logits(decoder, pool, StepPlan(1, (chunk,), (decode,)))
        assert both.shape[0] == 1 + position % 2
        found[position] = both[-1]
        if position % 2:
            close(both[0], both[1])
    close(torch.stack([found[position] for position in case["positions"]]), case["logits"])


@pytest.mark.parametrize("name", NAMES)
def test_bf16_stays_near_fp32(name):
    case = expected(name)
    decoder, pool = load(family(name), blocks=BLOCKS, block_tokens=BLOCK_TOKENS, dtype=KvDtype.BF16)
    ids = tuple(case["input_ids"])
    row = PrefillRow("a", ids, 0, shuffled_table(pool.layout.spec.blocks_for(len(ids))), GREEDY)
    last = torch.tensor(case["logits"][case["positions"].index(len(ids) - 1)])
    found = logits(decoder, pool, StepPlan(1, (row,)))[0]
    assert found.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(found, last, dim=0) > 0.98


def test_without_packing_the_logits_are_the_same(monkeypatch):
    monkeypatch.setattr("kvoy.engine.model.try_packing", lambda _: False)
    case = expected("qwen2")
    decoder, pool = load(family("qwen2"), blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
    ids = tuple(case["input_ids"])
    row = PrefillRow("a", ids, 0, shuffled_table(pool.layout.spec.blocks_for(len(ids))), GREEDY)
    last = case["logits"][case["positions"].index(len(ids) - 1)]
    close(logits(decoder, pool, StepPlan(1, (row,)))[0], last)


def test_final_softcap_bounds_the_logits():
    decoder, pool = load(family("llama"), blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
    plan = StepPlan(1, (PrefillRow("a", (5, 6, 7), 0, (4,), GREEDY),))
    plain = logits(decoder, pool, plan)
    decoder.spec = replace(decoder.spec, final_logit_softcap=2.0)
    close(logits(decoder, pool, plan), 2.0 * torch.tanh(plain / 2.0))


def test_weights_are_taken_over_one_by_one():
    files = family("gemma3")
    weights = load_weights(files, torch.float32)
    Decoder(files.spec(), weights)
    assert not weights
