"""From logits to tokens: greedy or random, with log probabilities for those who ask. Stateless.

The random draw of a request depends on nothing but its seed and the position of the token, so that any pod, release
or machine that gets there again draws the same number (``draw``). The draw is looked up in the cumulative distribution
in vocabulary order, not by rank: two logits that change places by a rounding then move the outcome by a rounding only.

Parameters travel with the step's other numbers (kvoy.engine.packing), the choice is made where the logits are, and
what comes back is one run of numbers: a device is waited for once.
"""

import hashlib
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvoy.core.errors import EngineError
from kvoy.core.step import Sampled
from kvoy.core.types import TokenLogprob
from kvoy.engine.batch import SampleAt
from kvoy.engine.packing import Packed, Section

_FIRST_CANDIDATES = 1024
"""On a CPU top-p looks among this many best tokens; only when they do not reach p is a whole vocabulary sorted."""


def sample(logits: Tensor, wanted: Sequence[SampleAt]) -> list[Sampled]:
    """A token for each row of logits [rows, vocab], fp32, in the host's memory."""
    packed = Packed()
    sampling = Sampling.of(wanted, packed)
    memory = bytearray(max(packed.size_bytes, 1))
    packed.write(memoryview(memory))
    return sampling.read(sampling.launch(logits, torch.frombuffer(memory, dtype=torch.uint8)).tolist())


def draw(seed: int, position: int) -> float:
    """Uniform in [0, 1): the top 53 bits of BLAKE2b-64 over seed and position, both 64-bit little-endian."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def most_packed_bytes(rows: int) -> int:
    """No sampling of so many rows packs more: seven arrays of 8 bytes a row, each filled up to 16 bytes."""
    return 7 * (8 * rows + 16)


@dataclass(frozen=True, slots=True)
class _Filter:
    """The random rows that keep some tokens only."""

    rows: Section  # [filtered] int64, among the random ones
    top_k: Section  # [filtered] int64, the vocabulary's size or more where it is off
    top_p: Section  # [filtered] fp64
    most: int
    """The largest top_k."""
    is_open: bool
    """One of the rows has top_p without top_k."""


@dataclass(frozen=True, slots=True)
class _Random:
    rows: Section  # [random] int64
    temperatures: Section  # [random] fp32
    draws: Section  # [random] fp64
    filter: _Filter | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """What one step samples: ``launch`` asks a device for it, ``read`` understands what came back."""

    wanted: Sequence[SampleAt]
    logprob_rows: Section | None  # [rows that ask for logprobs] int64
    random: _Random | None

    @classmethod
    def of(cls, wanted: Sequence[SampleAt], packed: Packed) -> "Sampling":
        """Adds to ``packed`` what ``launch`` needs of it."""
        asking = array("q", [row for row, at in enumerate(wanted) if at.sampling.top_logprobs is not None])
        return cls(wanted, packed.add(asking) if asking else None, _random(wanted, packed))

    def launch(self, logits: Tensor, memory: Tensor) -> Tensor:
        """[numbers] fp64, from logits [rows, vocab] fp32 and the memory to which ``packed`` was written."""
        if not self.wanted:
            return logits.new_empty((0,), dtype=torch.float64)
        best, tokens = logits.max(-1)
        if self.random is not None:
            tokens = _with_random(tokens, logits, self.random, memory)
        parts = [tokens.double(), best.double()]
        if self.logprob_rows is not None:
            parts += _logprobs(logits, tokens, self.logprob_rows.of(memory), self._alternatives(logits.shape[1]))
        return torch.cat(parts)

    def read(self, numbers: Sequence[float]) -> list[Sampled]:
        """EngineError when a row has no finite best logit (NaN)."""
        count = len(self.wanted)
        for at, best in zip(self.wanted, numbers[count : 2 * count], strict=True):
            if not math.isfinite(best):
                raise EngineError(
                    f"the model computed logits that are not numbers for {at.request_id} at {at.position}"
                )
        tokens = [int(number) for number in numbers[:count]]
        logprobs = self._read_logprobs(tokens, numbers[2 * count :])
        return [
            Sampled(at.request_id, token, logprobs.get(row))
            for row, (at, token) in enumerate(zip(self.wanted, tokens, strict=True))
        ]

    @property
    def _asking(self) -> list[int]:
        return [row for row, at in enumerate(self.wanted) if at.sampling.top_logprobs is not None]

    def _alternatives(self, vocab_tokens: int) -> int:
        """So many are computed for each row that asks."""
        return min(vocab_tokens, max(self.wanted[row].sampling.top_logprobs or 0 for row in self._asking))

    def _read_logprobs(self, tokens: Sequence[int], numbers: Sequence[float]) -> dict[int, TokenLogprob]:
        """By row: the chosen tokens' first, then the alternatives' ids, then their log probabilities."""
        rows = self._asking
        if not rows:
            return {}
        each = (len(numbers) // len(rows) - 1) // 2
        ids, values = numbers[len(rows) :], numbers[len(rows) * (1 + each) :]
        found = {}
        for index, row in enumerate(rows):
            some = slice(index * each, index * each + min(each, self.wanted[row].sampling.top_logprobs or 0))
            top = tuple((int(token), value) for token, value in zip(ids[some], values[some], strict=True))
            found[row] = TokenLogprob(tokens[row], numbers[index], top)
        return found


def _random(wanted: Sequence[SampleAt], packed: Packed) -> _Random | None:
    rows = [row for row, at in enumerate(wanted) if at.sampling.temperature > 0]
    if not rows:
        return None
    random = [wanted[row] for row in rows]
    # At the bounds a distribution is one token, or flat, as far as fp32 can tell; between them nothing overflows.
    temperatures = array("f", [min(max(at.sampling.temperature, 1e-10), 1e10) for at in random])
    draws = array("d", [draw(at.sampling.seed, at.position) for at in random])
    return _Random(packed.add(array("q", rows)), packed.add(temperatures), packed.add(draws), _filter(random, packed))


def _filter(random: Sequence[SampleAt], packed: Packed) -> _Filter | None:
    rows = [row for row, at in enumerate(random) if at.sampling.top_k or at.sampling.top_p < 1]
    if not rows:
        return None
    top_k = [min(random[row].sampling.top_k, 1 << 62) for row in rows]
    return _Filter(
        packed.add(array("q", rows)),
        packed.add(array("q", [count or 1 << 62 for count in top_k])),
        packed.add(array("d", [random[row].sampling.top_p for row in rows])),
        most=max(top_k),
        is_open=not all(top_k),
    )


def _with_random(tokens: Tensor, logits: Tensor, random: _Random, memory: Tensor) -> Tensor:
    """``tokens`` [rows] with those of the random rows drawn."""
    rows = random.rows.of(memory)
    logits = logits.index_select(0, rows)
    temperatures = random.temperatures.of(memory).unsqueeze(1)
    weights = (logits - logits.amax(-1, keepdim=True)).div_(temperatures).exp_()
    if random.filter is not None:
        _drop(weights, random.filter, memory)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, random.draws.of(memory).unsqueeze(1) * total, right=True)
    last_possible = torch.searchsorted(cumulative, total)  # for a draw that rounds up to the total
    chosen = torch.minimum(found, last_possible).flatten().clamp_(max=logits.shape[1] - 1)  # NaN reaches past the end
    return tokens.index_copy(0, rows, chosen)


def _drop(weights: Tensor, kept: _Filter, memory: Tensor) -> None:
    """Zero what top-k, and then top-p within what top-k left, do not keep. Ties of the last one kept are kept."""
    rows, top_k, top_p = kept.rows.of(memory), kept.top_k.of(memory), kept.top_p.of(memory)
    some, vocab = weights.index_select(0, rows), weights.shape[1]
    on_host = not weights.is_cuda
    for_open = (_FIRST_CANDIDATES if on_host else vocab) if kept.is_open else 0
    candidates = min(max(kept.most, for_open), vocab)
    least, is_short = _least_kept(some, some.topk(candidates).values, top_k, top_p)
    if on_host and bool(is_short.any()):  # elsewhere all are candidates, and asking would wait for the device
        again = is_short.nonzero().flatten()
        whole = some[again]
        least[again] = _least_kept(whole, whole.sort(descending=True).values, top_k[again], top_p[again])[0]
    thresholds = weights.new_zeros((weights.shape[0],)).index_copy_(0, rows, least)
    weights.masked_fill_(weights < thresholds.unsqueeze(1), 0)


def _least_kept(weights: Tensor, best: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The least weight kept of each row of weights [rows, vocab], the leading ones of which are ``best`` [rows,
    candidates], and whether these are too few to say."""
    last = (top_k - 1).clamp_(max=best.shape[1] - 1).unsqueeze(1)
    reached = best.cumsum(-1, dtype=torch.float64)
    is_cut = (top_k < weights.shape[1]).unsqueeze(1)
    total = torch.where(is_cut, reached.gather(1, last), weights.sum(-1, dtype=torch.float64, keepdim=True))
    wanted = total * top_p.unsqueeze(1)
    is_short = ~is_cut & (reached[:, -1:] < wanted)
    reaches = torch.where(top_p.unsqueeze(1) < 1, torch.searchsorted(reached, wanted), last)
    return best.gather(1, torch.minimum(reaches, last)).flatten(), is_short.flatten()


def _logprobs(logits: Tensor, tokens: Tensor, rows: Tensor, alternatives: int) -> list[Tensor]:
    """Of the tokens of the given rows, under the model itself, before temperature and filters; then the ids of the
    best tokens of each row, then theirs."""
    log_softmax = logits.index_select(0, rows).log_softmax(-1)
    values, ids = log_softmax.topk(alternatives)
    chosen = log_softmax.gather(1, tokens.index_select(0, rows).unsqueeze(1))
    return [part.double().flatten() for part in (chosen, ids, values)]
