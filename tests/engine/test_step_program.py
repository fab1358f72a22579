"""Steps as one program are, bit for bit, what they are op by op: in every kind of model, whatever the step holds."""

import random
from dataclasses import replace

import pytest
import torch

from kernels import tiled_linear
from kvoy.core.step import DecodeRow, PrefillRow, StepPlan
from kvoy.core.types import GREEDY, KvDtype, KvSpec
from kvoy.engine import step_program
from kvoy.engine.kv_cache import KvLayout, KvPool
from kvoy.engine.model import Decoder
from kvoy.engine.quant import ByRows
from kvoy.engine.row_invariance import RowOp
from kvoy.engine.spec import LayerSpec, ModelSpec, RopeSpec, weight_shapes
from kvoy.engine.step_program import StepPrograms
from tests.engine.running import logits, poison

BLOCK_TOKENS = 4
ROWS = 150
BLOCKS_EACH = 10
ROPES = [RopeSpec(tuple(base ** (-i / 16) for i in range(16))) for base in (10_000.0, 100.0)]
LLAMA = ModelSpec(
    family="llama",
    layers=(LayerSpec(ROPES[0]),) * 3,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn=96,
    vocab_tokens=160,
    context_tokens=BLOCK_TOKENS * BLOCKS_EACH,
    norm_eps=1e-5,
    activation="silu",
    embedding_scale=1.0,
    attention_scale=32**-0.5,
)
QWEN2 = replace(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=True)
QWEN3 = replace(LLAMA, family="qwen3", qk_norm=True)
MISTRAL = replace(LLAMA, family="mistral", layers=(LayerSpec(ROPES[0], 7),) * 3)
GEMMA3 = replace(
    QWEN3,
    family="gemma3",
    layers=(LayerSpec(ROPES[1], 7), LayerSpec(ROPES[0]), LayerSpec(ROPES[1], 7)),
    activation="gelu_tanh",
    embedding_scale=8.0,
    post_norms=True,
    tied_embeddings=True,
)
SPECS = {spec.family: spec for spec in (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA3)}


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(7)
    torch.set_num_threads(2)


def make(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    weights = {
        name: torch.ones(shape) + 0.1 * torch.randn(shape)
        if name.endswith("norm")
        else torch.randn(shape).to(dtype) / 8
        for name, shape in weight_shapes(spec).items()
    }
    return Decoder(spec, weights)


def make_pool(spec: ModelSpec, dtype: KvDtype = KvDtype.BF16) -> KvPool:
    kv_spec = KvSpec(len(spec.layers), spec.kv_heads, spec.head_dim, BLOCK_TOKENS, dtype)
    return KvPool(KvLayout(kv_spec, ROWS * BLOCKS_EACH))


class Requests:
    """Of many lengths, their KV in the pool."""

    def __init__(self, decoder: Decoder, pool: KvPool) -> None:
        numbers = random.Random(5)
        blocks = list(range(ROWS * BLOCKS_EACH))
        numbers.shuffle(blocks)
        self.tables = [tuple(blocks[BLOCKS_EACH * row : BLOCKS_EACH * (row + 1)]) for row in range(ROWS)]
        self._lengths = [numbers.randrange(1, BLOCK_TOKENS * BLOCKS_EACH - 3) for _ in range(ROWS)]
        ids = [tuple(numbers.randrange(decoder.spec.vocab_tokens) for _ in range(length)) for length in self._lengths]
        poison(pool)
        chunks = tuple(PrefillRow(str(row), ids[row], 0, self.tables[row]) for row in range(ROWS))
        logits(decoder, pool, StepPlan(0, chunks))

    def chunks(self, sizes: list[int]) -> tuple[PrefillRow, ...]:
        """Each the start of a prompt, in blocks of a request from the end, which no step of few rows has."""
        tables = self.tables[-len(sizes) :]
        return tuple(
            PrefillRow(f"chunk {place}", (5 + place,) * size, 0, tables[place], GREEDY)
            for place, size in enumerate(sizes)
        )

    def step(self, rows: range, later: int = 0) -> StepPlan:
        decodes = (
            DecodeRow(str(row), (7 * row + later) % 160, self._lengths[row] + later, self.tables[row], GREEDY)
            for row in rows
        )
        return StepPlan(1, (), tuple(decodes))


def op_by_op(decoder: Decoder, pool: KvPool, plan: StepPlan) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "_programs_for", lambda *_: None)
        return logits(decoder, pool, plan)


def count_programs(monkeypatch) -> list[int]:
    """Tokens of each step that a program ran from now on."""
    rows: list[int] = []
    run = StepPrograms.run

    def counted(self, hidden, angles, batch):
        rows.append(hidden.shape[0])
        return run(self, hidden, angles, batch)

    monkeypatch.setattr(StepPrograms, "run", counted)
    return rows


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("pool_dtype", [KvDtype.BF16, KvDtype.FP32, KvDtype.INT8])
def test_a_step_of_any_rows_has_the_bits_it_has_op_by_op(monkeypatch, spec, pool_dtype):
    decoder, pool = make(spec), make_pool(spec, pool_dtype)
    requests, ran = Requests(decoder, pool), count_programs(monkeypatch)
    for first, size in enumerate((1, 33, 2, 16, 17, 128, 1, 33)):
        plan = requests.step(range(first, first + size))
        found = logits(decoder, pool, plan)
        assert not found.isnan().any()
        assert torch.equal(found, op_by_op(decoder, pool, plan))
    assert ran == [1, 33, 2, 16, 17, 128, 1, 33]


def test_what_a_step_wrote_the_next_one_reads(monkeypatch):
    decoder, pool, other = make(LLAMA), make_pool(LLAMA), make_pool(LLAMA)
    requests, _ = Requests(decoder, pool), Requests(decoder, other)
    ran = count_programs(monkeypatch)
    for later in range(3):
        plan = requests.step(range(20), later)
        assert torch.equal(logits(decoder, pool, plan), op_by_op(decoder, other, plan))
    assert ran == [20] * 3


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("pool_dtype", [KvDtype.BF16, KvDtype.FP32, KvDtype.INT8])
def test_chunks_and_rows_of_one_step_have_the_bits_they_have_op_by_op(monkeypatch, spec, pool_dtype):
    """Steps differ in how many tokens they have and how many of those are chunks'; memory grows on the way."""
    decoder, pool = make(spec), make_pool(spec, pool_dtype)
    requests, ran = Requests(decoder, pool), count_programs(monkeypatch)
    steps = [([1], 0), ([7, 20], 3), ([7, 20], 3), ([20, 7], 2), ([30] * 6, 12), ([30] * 20, 0), ([2], 128), ([1], 0)]
    for chunks, rows in steps:
        plan = replace(requests.step(range(rows)), prefill=requests.chunks(chunks))
        found = logits(decoder, pool, plan)
        assert not found.isnan().any()
        assert torch.equal(found, op_by_op(decoder, pool, plan))
    assert ran[-len(steps) :] == [sum(chunks) + rows for chunks, rows in steps]


def test_steps_of_few_rows_go_op_by_op_where_another_op_serves_them(monkeypatch):
    decoder, pool = make(LLAMA), make_pool(LLAMA)
    requests = Requests(decoder, pool)
    few, many = (logits(decoder, pool, requests.step(range(rows))) for rows in (2, 3))
    decoder.compute_rows_alike(Held())
    ran = count_programs(monkeypatch)
    assert not torch.equal(logits(decoder, pool, requests.step(range(2))), few)
    assert torch.equal(logits(decoder, pool, requests.step(range(3))), many)
    assert ran == [3]


class Held:
    """Gives every product but the head another one for few rows."""

    def hold(self, name: str, op: RowOp, _example: torch.Tensor) -> RowOp:
        return op if name == "head" else ByRows(lambda x: op(x) * 2, op)


def test_steps_that_are_long_anyway_go_op_by_op(monkeypatch):
    decoder, pool = make(LLAMA), make_pool(LLAMA)
    requests, ran = Requests(decoder, pool), count_programs(monkeypatch)
    monkeypatch.setattr(step_program, "_MOST_TOKENS", 128)
    together = logits(decoder, pool, requests.step(range(129)))
    assert ran == []
    torch.testing.assert_close(logits(decoder, pool, requests.step(range(128))), together[:128], rtol=0, atol=0)
    assert ran == [128]


def test_no_more_programs_are_kept_than_are_likely_to_be_used_again(monkeypatch):
    monkeypatch.setattr(step_program, "_KEPT_PROGRAMS", 3)
    decoder, pool = make(LLAMA), make_pool(LLAMA)
    requests = Requests(decoder, pool)
    for rows in (1, 2, 3, 1, 4, 5):
        logits(decoder, pool, requests.step(range(rows)))
    assert list(decoder._programs[1]._programs) == [(1, 0), (4, 0), (5, 0)]


def test_a_decoder_over_another_pool_works_in_that(monkeypatch):
    decoder, pools = make(LLAMA), [make_pool(LLAMA), make_pool(LLAMA)]
    requests, _ = (Requests(decoder, pool) for pool in pools)
    ran = count_programs(monkeypatch)
    found = [logits(decoder, pool, requests.step(range(5))) for pool in (*pools, pools[0])]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert ran == [5] * 3


@pytest.mark.parametrize("case", ["fp32", "sizes", "no unit"])
def test_what_has_no_compiled_twin_goes_op_by_op(monkeypatch, case):
    if case == "no unit":
        monkeypatch.setattr(tiled_linear, "multiplies", lambda: False)
    spec = replace(LLAMA, ffn=72) if case == "sizes" else LLAMA
    decoder = make(spec, torch.float32 if case == "fp32" else torch.bfloat16)
    pool = make_pool(spec, KvDtype.FP32 if case == "fp32" else KvDtype.BF16)
    requests, ran = Requests(decoder, pool), count_programs(monkeypatch)
    assert not logits(decoder, pool, requests.step(range(5))).isnan().any()
    assert ran == []
