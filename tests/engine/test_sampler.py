"""Sampling: the right distribution, the same draw everywhere, and an error rather than a token from NaN."""

import math

import pytest
import torch

from kvoy.core.errors import EngineError
from kvoy.core.types import GREEDY, SamplingParams
from kvoy.engine.batch import SampleAt
from kvoy.engine.sampler import draw, sample

VOCAB = 50


def params(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, **more) -> SamplingParams:
    return SamplingParams(temperature, top_k, top_p, seed, max_tokens=1, **more)


def tokens_of(row: torch.Tensor, sampling: SamplingParams, count: int) -> list[int]:
    """The row sampled at ``count`` positions."""
    wanted = [SampleAt("a", sampling, position) for position in range(count)]
    return [one.token_id for one in sample(row.expand(count, -1), wanted)]


@pytest.fixture
def row() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def test_the_draw_is_the_same_on_every_machine_and_release():
    assert draw(0, 0) == 0.0564663990004608
    assert draw(1, 0) == 0.6487508310490744
    assert draw(2**64 - 1, 12345) == 0.9877791309092729


def test_draws_are_uniform():
    draws = torch.tensor([draw(seed, position) for seed in range(100) for position in range(100)], dtype=torch.float64)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = torch.histc(draws, bins=20, min=0, max=1)
    assert (counts - 500).abs().max() < 5 * math.sqrt(500)
    pairs = draws.view(100, 100)
    assert abs(float(torch.corrcoef(torch.stack((pairs[:-1].flatten(), pairs[1:].flatten())))[0, 1])) < 0.05


def test_greedy_takes_the_best_whatever_the_seed(row):
    wanted = [SampleAt("a", GREEDY, 5), SampleAt("b", params(temperature=0.0, top_k=3, seed=9), 5)]
    assert [one.token_id for one in sample(torch.stack((row, row)), wanted)] == [int(row.argmax())] * 2


@pytest.mark.parametrize("sampling", [params(), params(temperature=0.5), params(temperature=2.0)])
def test_frequencies_follow_the_softmax(row, sampling):
    count = 20_000
    expected = (row.double() / sampling.temperature).softmax(0) * count
    found = torch.bincount(torch.tensor(tokens_of(row, sampling, count)), minlength=VOCAB)
    likely = expected > 5
    chi_squared = float(((found - expected)[likely] ** 2 / expected[likely]).sum())
    freedom = int(likely.sum())
    assert chi_squared < freedom + 5 * math.sqrt(2 * freedom)


def test_top_k_keeps_the_k_best_and_their_ties(row):
    best = row.topk(5).indices.tolist()
    assert set(tokens_of(row, params(temperature=5.0, top_k=5), 2000)) == set(best)
    row[best[4]] = row[best[3]]
    assert set(tokens_of(row, params(temperature=5.0, top_k=4), 2000)) == set(best)
    assert len(set(tokens_of(row, params(temperature=50.0, top_k=10 * VOCAB), 2000))) > 40


def nucleus(row: torch.Tensor, top_p: float) -> set[int]:
    """By definition: the fewest best tokens whose probability reaches top_p."""
    probabilities = row.double().softmax(0)
    kept, total = set(), 0.0
    for token in probabilities.argsort(descending=True).tolist():
        if total >= top_p:
            break
        kept.add(token)
        total += float(probabilities[token])
    return kept


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.8])
def test_top_p_keeps_the_smallest_set_that_reaches_p(row, top_p):
    flat = row / 3
    assert set(tokens_of(flat, params(top_p=top_p), 5000)) == nucleus(flat, top_p)


def test_top_p_counts_within_what_top_k_left(row):
    best = row.topk(4).indices
    kept = {int(best[token]) for token in nucleus(row[best], 0.7)}
    assert set(tokens_of(row, params(top_k=4, top_p=0.7), 5000)) == kept


def test_top_p_over_a_wide_flat_vocabulary():
    wide = torch.zeros(5000)
    wide[:2500] = 1.0
    assert max(tokens_of(wide, params(top_p=0.5), 300)) < 2500
    assert max(tokens_of(wide, params(top_p=0.9), 300)) >= 2500


def test_a_token_depends_on_seed_and_position_only(row):
    sampling = params(temperature=1.5, seed=42)
    alone = tokens_of(row, sampling, 40)
    others = [SampleAt("x", params(seed=7), 3), SampleAt("y", GREEDY, 4), SampleAt("z", params(top_k=2), 5)]
    for position in range(40):
        mixed = sample(row.expand(4, -1), [*others, SampleAt("a", sampling, position)])
        assert mixed[3].token_id == alone[position]
    assert tokens_of(row, params(temperature=1.5, seed=43), 40) != alone
    assert len(set(alone)) > 5


def test_a_rounding_of_the_logits_does_not_move_the_token():
    """Two nearly equal logits may change places on another machine; the draw still falls on the same token."""
    row = torch.zeros(VOCAB)
    nudged = row + torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 1e-6
    assert tokens_of(row, params(), 500) == tokens_of(nudged, params(), 500)


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e6, 1e300])
def test_extreme_temperatures(row, temperature):
    tokens = tokens_of(row, params(temperature=temperature), 300)
    assert set(tokens) == {int(row.argmax())} if temperature < 1 else len(set(tokens)) > 40


def test_tokens_of_probability_zero_are_never_drawn():
    row = torch.full((VOCAB,), -math.inf)
    row[[3, 17]] = 0.0
    assert set(tokens_of(row, params(), 300)) == {3, 17}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, params()])
def test_logits_that_are_not_numbers_are_an_error(row, bad, sampling):
    broken = row.clone()
    broken[7] = bad
    with pytest.raises(EngineError, match="not numbers for broken at 9"):
        sample(torch.stack((row, broken)), [SampleAt("fine", GREEDY, 3), SampleAt("broken", sampling, 9)])


def test_logprobs_are_of_the_model_itself(row):
    expected = row.double().log_softmax(0)
    wanted = [
        SampleAt("none", GREEDY, 1),
        SampleAt("chosen", params(temperature=3.0, top_k=9, seed=5, top_logprobs=0), 1),
        SampleAt("best", params(temperature=0.0, top_logprobs=4), 1),
        SampleAt("all", params(top_logprobs=10 * VOCAB), 1),
    ]
    none, chosen, best, every = sample(row.expand(4, -1), wanted)
    assert none.logprob is None
    assert chosen.logprob.token_id == chosen.token_id
    assert chosen.logprob.logprob == pytest.approx(float(expected[chosen.token_id]), abs=1e-5)
    assert chosen.logprob.top == ()
    assert [token for token, _ in best.logprob.top] == row.topk(4).indices.tolist()
    assert [value for _, value in best.logprob.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-5)
    assert best.logprob.top[0] == (best.token_id, best.logprob.logprob)
    assert len(every.logprob.top) == VOCAB


def test_nothing_to_sample():
    assert sample(torch.empty(0, VOCAB), []) == []
