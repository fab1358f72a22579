"""The few statistics of the benches: medians, spreads, and ratios that are taken within a round before any median.

Two engines measured within the same minute saw the same machine; a quotient of two medians may compare a quiet minute
with a busy one. Knows only numbers.
"""

from collections.abc import Sequence
from statistics import median


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the rounds of ours / theirs. Both hold one figure a round, in the same order."""
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} figures cannot be paired with {len(theirs)}")
    return median(mine / other for mine, other in zip(ours, theirs, strict=True))


def spread(figures: Sequence[float]) -> float:
    """(largest - smallest) / median: how far the rounds lie apart; 0 for a single one."""
    return (max(figures) - min(figures)) / median(figures)
