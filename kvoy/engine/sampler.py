"""From logits to tokens: greedy or random, with log probabilities for those who ask. Stateless.

The random draw of a request depends on nothing but its seed and the position of the token, so that any pod, release
or machine that gets there again draws the same number (``draw``). The draw is looked up in the cumulative distribution
in vocabulary order, not by rank: two logits that change places by a rounding then move the outcome by a rounding only.
"""

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from kvoy.core.errors import EngineError
from kvoy.core.step import Sampled
from kvoy.core.types import TokenLogprob
from kvoy.engine.batch import SampleAt

_FIRST_CANDIDATES = 1024
"""top-p looks among this many best tokens; only when they do not reach p is a whole vocabulary sorted."""


def sample(logits: Tensor, wanted: Sequence[SampleAt]) -> list[Sampled]:
    """A token for each row of logits [rows, vocab], fp32. EngineError when a row has no finite best logit (NaN)."""
    if not wanted:
        return []
    best, greedy = logits.max(-1)
    if not torch.isfinite(best).all():
        at = wanted[int(torch.isfinite(best).logical_not_().nonzero()[0])]
        raise EngineError(f"the model computed logits that are not numbers for {at.request_id} at {at.position}")
    tokens = greedy.tolist()
    random_rows = [row for row, at in enumerate(wanted) if at.sampling.temperature > 0]
    if random_rows:
        chosen = _sample_random(logits[random_rows], [wanted[row] for row in random_rows])
        for row, token in zip(random_rows, chosen, strict=True):
            tokens[row] = token
    logprobs = _logprobs(logits, wanted, tokens)
    return [
        Sampled(at.request_id, token, logprobs.get(row))
        for row, (at, token) in enumerate(zip(wanted, tokens, strict=True))
    ]


def draw(seed: int, position: int) -> float:
    """Uniform in [0, 1): the top 53 bits of BLAKE2b-64 over seed and position, both 64-bit little-endian."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _sample_random(logits: Tensor, wanted: Sequence[SampleAt]) -> list[int]:
    """A token for each row of logits [rows, vocab], every row at a temperature above 0."""
    # At the bounds a distribution is one token, or flat, as far as fp32 can tell; between them nothing overflows.
    temperatures = torch.tensor([min(max(at.sampling.temperature, 1e-10), 1e10) for at in wanted]).unsqueeze(1)
    weights = (logits - logits.amax(-1, keepdim=True)).div_(temperatures).exp_()
    _filter(weights, wanted)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    draws = torch.tensor([draw(at.sampling.seed, at.position) for at in wanted], dtype=torch.float64).unsqueeze(1)
    found = torch.searchsorted(cumulative, draws * total, right=True)
    last_possible = torch.searchsorted(cumulative, total)  # for a draw that rounds up to the total
    return torch.minimum(found, last_possible).flatten().tolist()


def _filter(weights: Tensor, wanted: Sequence[SampleAt]) -> None:
    """Zero what top-k, and then top-p within what top-k left, do not keep. Ties of the last one kept are kept."""
    rows = [row for row, at in enumerate(wanted) if at.sampling.top_k or at.sampling.top_p < 1]
    if not rows:
        return
    most = max(wanted[row].sampling.top_k or _FIRST_CANDIDATES for row in rows)
    best = weights[rows].topk(min(most, weights.shape[1])).values
    for row, best_first in zip(rows, best, strict=True):
        sampling = wanted[row].sampling
        threshold = _threshold(weights[row], best_first, sampling.top_k, sampling.top_p)
        weights[row].masked_fill_(weights[row] < threshold, 0)


def _threshold(weights: Tensor, best_first: Tensor, top_k: int, top_p: float) -> Tensor:
    """The least weight kept, of one row [vocab] whose leading weights are ``best_first``."""
    if top_k:
        weights = best_first = best_first[:top_k]
    if top_p >= 1:
        return best_first[-1]
    wanted = top_p * float(weights.sum(dtype=torch.float64))
    reached = best_first.cumsum(0, dtype=torch.float64)
    if reached[-1] < wanted:
        best_first = weights.sort(descending=True).values
        reached = best_first.cumsum(0, dtype=torch.float64)
    last = int(torch.searchsorted(reached, wanted))
    return best_first[min(last, best_first.shape[0] - 1)]


def _logprobs(logits: Tensor, wanted: Sequence[SampleAt], tokens: Sequence[int]) -> dict[int, TokenLogprob]:
    """By row, for the rows that ask: under the model itself, before temperature and filters."""
    rows = [row for row, at in enumerate(wanted) if at.sampling.top_logprobs is not None]
    if not rows:
        return {}
    log_softmax = logits[rows].log_softmax(-1)
    return {row: _token_logprob(log_softmax[i], tokens[row], wanted[row]) for i, row in enumerate(rows)}


def _token_logprob(log_softmax: Tensor, token: int, at: SampleAt) -> TokenLogprob:
    count = min(at.sampling.top_logprobs or 0, log_softmax.shape[0])
    values, ids = log_softmax.topk(count)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(log_softmax[token]), top)
