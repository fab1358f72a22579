"""From logits to tokens: greedy or random, with log probabilities for those who ask. Stateless.

The random draw of a request depends on nothing but its seed and the position of the token, so that any pod, release
or machine that gets there again draws the same number (``draw``). The draw is looked up in the cumulative distribution
in vocabulary order, not by rank: two logits that change places by a rounding then move the outcome by a rounding only.
"""

import hashlib
import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from kvoy.core.errors import EngineError
from kvoy.core.step import Sampled
from kvoy.core.types import TokenLogprob
from kvoy.engine.batch import SampleAt

_FIRST_CANDIDATES = 1024
"""top-p looks among this many best tokens before it sorts a whole vocabulary."""


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
    """Temperature, then top-k, then top-p over what top-k left; tokens that tie with the last one kept are kept."""
    temperatures = torch.tensor([at.sampling.temperature for at in wanted], dtype=torch.float64).unsqueeze(1)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperatures  # the best is 0 even at tiny temperatures
    for row, at in enumerate(wanted):
        threshold = _threshold(scaled[row], at.sampling.top_k, at.sampling.top_p)
        scaled[row].masked_fill_(scaled[row] < threshold, -math.inf)
    cumulative = scaled.exp_().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    draws = torch.tensor([draw(at.sampling.seed, at.position) for at in wanted], dtype=torch.float64).unsqueeze(1)
    found = torch.searchsorted(cumulative, draws * total, right=True)
    last_possible = torch.searchsorted(cumulative, total)  # for a draw that rounds up to the total
    return torch.minimum(found, last_possible).flatten().tolist()


def _threshold(scaled: Tensor, top_k: int, top_p: float) -> float:
    """The lowest scaled logit that top-k and top-p keep, of one row [vocab]; -inf keeps all."""
    vocab = scaled.shape[0]
    kept = scaled.topk(min(top_k, vocab)).values if top_k else None
    if top_p >= 1:
        return -math.inf if kept is None else float(kept[-1])
    if kept is not None:
        return _top_p_threshold(kept, torch.logsumexp(kept, 0), top_p)
    total = torch.logsumexp(scaled, 0)
    candidates = scaled.topk(min(_FIRST_CANDIDATES, vocab)).values
    if float((candidates - total).exp_().sum()) < top_p:
        candidates = scaled.sort(descending=True).values
    return _top_p_threshold(candidates, total, top_p)


def _top_p_threshold(best_first: Tensor, total: Tensor, top_p: float) -> float:
    """The logit of the last token of the smallest leading set whose probability reaches ``top_p``."""
    reached = (best_first - total).exp_().cumsum(0)
    last = int(torch.searchsorted(reached, top_p))
    return float(best_first[min(last, best_first.shape[0] - 1)])


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
