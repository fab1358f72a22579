"""Which pods a request goes to: a choice from a snapshot, as pure as arithmetic.

Owns the costs and the tie-break. Must not know how the snapshot came about (kvoy.core.pod_table, prefix_index) or what
follows the choice (kvoy.core.request). Costs are in tokens: of prompt to compute or to ship, or worth as much. The
queue is part of the cost, so a hot prefix spreads by itself when its pod fills up; snapshots are old, so what this
router has placed since counts too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvoy.core.pod_table import PodView
from kvoy.core.request_events import NoPodReason
from kvoy.core.types import KvSpec, Role
from kvoy.core.wire import fits


@dataclass(frozen=True, slots=True)
class RoutingParams:
    """What costs how much."""

    decode_request_tokens: int = 64
    """A request in a decode pod's batch, in tokens of prefix that need not be shipped."""
    prefill_request_tokens: int = 32
    """A request in a prefill pod's queue, on top of its prompt."""


@dataclass(frozen=True, slots=True)
class Need:
    """What is to be placed."""

    fingerprint: str
    prompt_tokens: int
    exclude: tuple[str, ...] = ()
    """Pod ids that have been tried."""
    turn: int = 0
    """Counts requests: pods of equal cost take turns."""


@dataclass(frozen=True, slots=True)
class Route:
    """The pod, and why: its cost and how much of the prompt it has cached."""

    pod_id: str
    cost_tokens: float
    matched_blocks: int


@dataclass(frozen=True, slots=True)
class NoRoute:
    """There is none; the message is a sentence for whoever asked."""

    reason: NoPodReason
    message: str


Matches = Mapping[str, int]
"""Pod id → leading blocks of the prompt that it has cached (PrefixIndex.match)."""

_Rank = tuple[bool, float, bool]
"""Lower is better: whether something speaks against the pod, its cost, and what decides between equal costs."""


def choose_decode(views: Sequence[PodView], need: Need, matches: Matches, params: RoutingParams) -> Route | NoRoute:
    """The decode pod that saves most shipping for the company it has; one with room before one without."""

    def rank(view: PodView) -> _Rank:
        free_blocks = _capacity_blocks(view) - view.pod.load.blocks_used_by_requests
        lacks_room = free_blocks < _blocks(view, need.prompt_tokens + 1)
        return lacks_room, _unmatched(view, need, matches) + params.decode_request_tokens * view.requests, False

    return _choose(Role.DECODE, views, need, matches, rank)


def choose_prefill(
    views: Sequence[PodView], need: Need, matches: Matches, kv_spec: KvSpec, params: RoutingParams
) -> Route | NoRoute:
    """The prefill pod that will be done first, of equals one whose KV needs no turning. ``kv_spec`` is the pool of the
    decode pod."""

    def rank(view: PodView) -> _Rank:
        others = max(0, view.pod.load.tokens_waiting - view.own_tokens)
        queue = view.own_tokens + others + params.prefill_request_tokens * view.requests
        return False, _unmatched(view, need, matches) + queue, view.pod.kv_spec != kv_spec

    fitting = [view for view in views if view.pod.kv_spec is not None and fits(view.pod.kv_spec, kv_spec)]
    if views and not fitting:
        return NoRoute(NoPodReason.ABSENT, f"No prefill pod makes KV that the decode pod can take ({kv_spec}).")
    return _choose(Role.PREFILL, fitting, need, matches, rank)


def _choose(
    role: Role,
    views: Sequence[PodView],
    need: Need,
    matches: Matches,
    rank: Callable[[PodView], _Rank],
) -> Route | NoRoute:
    usable = [view for view in views if view.usable and _serves(view, need.fingerprint)]
    if not usable:
        return NoRoute(NoPodReason.ABSENT, _absence(role, views, need.fingerprint))
    fitting = [view for view in usable if _capacity_blocks(view) >= _blocks(view, need.prompt_tokens)]
    if not fitting:
        most = max(view.pod.load.blocks_total * _block_tokens(view) for view in usable)
        told = f"The prompt has {need.prompt_tokens} tokens, but no {role} pod has room for more than {most}."
        return NoRoute(NoPodReason.TOO_LARGE, told)
    left = [view for view in fitting if view.pod.pod_id not in need.exclude]
    if not left:
        return NoRoute(NoPodReason.EXCLUDED, f"Every {role} pod has been tried.")
    ranked = [(rank(view), view.pod.pod_id) for view in left]
    best = min(found for found, _ in ranked)
    equals = sorted(pod_id for found, pod_id in ranked if found == best)
    pod_id = equals[need.turn % len(equals)]
    return Route(pod_id, best[1], matches.get(pod_id, 0))


def _serves(view: PodView, fingerprint: str) -> bool:
    return view.pod.model is not None and view.pod.model.fingerprint == fingerprint and view.pod.kv_spec is not None


def _block_tokens(view: PodView) -> int:
    return view.pod.kv_spec.block_tokens if view.pod.kv_spec else 1


def _capacity_blocks(view: PodView) -> float:
    return view.pod.load.blocks_total or math.inf  # a pod that has not told its load yet


def _blocks(view: PodView, tokens: int) -> int:
    return -(-tokens // _block_tokens(view))


def _unmatched(view: PodView, need: Need, matches: Matches) -> int:
    """Prompt tokens that are not in the pod's cache; the last token never counts as cached."""
    cached = matches.get(view.pod.pod_id, 0) * _block_tokens(view)
    return need.prompt_tokens - min(cached, need.prompt_tokens - 1)


def _absence(role: Role, views: Sequence[PodView], fingerprint: str) -> str:
    if not views:
        return f"There is no {role} pod. Start one, or wait until one has loaded the model."
    if not any(_serves(view, fingerprint) for view in views):
        return f"No {role} pod serves this model; those that are listed serve another one or another revision of it."
    return f"No {role} pod can be used now: {len(views)} listed, all starting, leaving or not answering."
