"""Every path of a request up to a depth: TRANSITIONS is exactly what happens, and every path keeps its promises.

Breadth first over (brain, what the router still owes an answer to). Promises: check() after each event, one End and
nothing after it, and whatever a pod was given is either over by the pod's word or taken back once.
"""

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvoy.core.request import RequestBrain, RequestParams
from kvoy.core.request_events import (
    ENDED,
    TRANSITIONS,
    Action,
    Admitted,
    AskReserve,
    CancelDecode,
    CancelledByClient,
    CancelPrefill,
    DecodeLost,
    DecodePicked,
    Emit,
    End,
    Event,
    NoPod,
    NoPodReason,
    Outputs,
    PickDecode,
    PickPrefill,
    PodsChanged,
    PrefillDone,
    PrefillFailed,
    PrefillLost,
    PrefillPicked,
    PrefillStarted,
    Rejected,
    RequestState,
    ReservedByDecode,
    RunPrefill,
    StopStringFound,
    Tick,
)
from kvoy.core.types import (
    FinishReason,
    KvDtype,
    KvSpec,
    PrefillReport,
    RejectReason,
    RequestOutput,
    Reservation,
    Role,
)

SPEC = KvSpec(1, 1, 4, 16, KvDtype.FP32)
DEPTH = 12
DEADLINE = 50.0


@dataclass
class Node:
    """A brain and the world around it: leg numbers that pods work on, and a pick that must be answered first."""

    brain: RequestBrain
    now: float = 0.0
    decode: int | None = None
    prefill: int | None = None
    pick: Action | None = None
    ended: bool = False

    def key(self) -> tuple[object, ...]:
        account = self.brain.account
        tokens = min(account.tokens, 2)
        story = repr(self.brain).split("account=")[0]
        return story, tokens, account.reservations > 0, self.now, self.pick

    def take(self, actions: list[Action]) -> None:
        self.pick = None
        for action in actions:
            assert not self.ended, f"{action} after the end"
            match action:
                case PickDecode() | PickPrefill():
                    self.pick = action
                case AskReserve(leg):
                    assert self.decode is None
                    self.decode = leg
                case RunPrefill(leg):
                    assert self.prefill is None
                    assert self.decode is not None
                    self.prefill = leg
                case CancelDecode(leg):
                    assert self.decode == leg
                    self.decode = None
                case CancelPrefill(leg):
                    assert self.prefill == leg
                    self.prefill = None
                case End():
                    self.ended = True
                case Emit():
                    assert self.brain.account.tokens > 0
        if self.ended:
            assert (self.decode, self.prefill, self.pick) == (None, None, None)


def possible(node: Node) -> list[Event]:
    """What the world can do next. A pick is answered before anything else happens."""
    match node.pick:
        case PickDecode():
            return [DecodePicked("d"), *(NoPod(Role.DECODE, reason, "none") for reason in NoPodReason)]
        case PickPrefill():
            return [PrefillPicked("p"), *(NoPod(Role.PREFILL, reason, "none") for reason in NoPodReason)]
    events: list[Event] = [CancelledByClient(), PodsChanged(), Tick()]
    if node.brain.state is RequestState.DECODING:
        events.append(StopStringFound())
    if node.decode is not None:
        events += _decode_says(node.decode, node.brain.state)
    if node.prefill is not None:
        events += [
            PrefillStarted(node.prefill),
            PrefillDone(node.prefill, PrefillReport()),
            PrefillLost(node.prefill, "lost"),
            *(PrefillFailed(node.prefill, reason, "no") for reason in ("busy", "too_large", "deadline", "draining")),
        ]
    return events


def _decode_says(leg: int, state: RequestState) -> list[Event]:
    events: list[Event] = [
        ReservedByDecode(leg, Reservation("r", 1, "l", "d:1", 0, SPEC)),
        *(Rejected(leg, reason, "no") for reason in RejectReason),
        DecodeLost(leg, "lost"),
    ]
    if state is not RequestState.QUEUED:
        events += [
            Outputs(leg, RequestOutput("r", (1,))),
            Outputs(leg, RequestOutput("r", (1,), finish=FinishReason.LENGTH)),
            Outputs(leg, RequestOutput("r", (), finish=FinishReason.CANCELLED)),
        ]
    return events


def over_by_its_word(event: Event) -> Role | None:
    """The pod whose work ends with this event."""
    match event:
        case Rejected() | DecodeLost():
            return Role.DECODE
        case Outputs(_, output) if output.finish:
            return Role.DECODE
        case PrefillDone() | PrefillFailed() | PrefillLost():
            return Role.PREFILL
    return None


def step(node: Node, event: Event) -> Node:
    after = copy.deepcopy(node)
    if isinstance(event, Tick):
        due = after.brain.next_deadline()
        after.now = due if due is not None else after.now
    ended = over_by_its_word(event)
    after.decode = None if ended is Role.DECODE else after.decode
    after.prefill = None if ended is Role.PREFILL else after.prefill
    actions = after.brain.handle(event, after.now)
    after.brain.check()
    after.take(actions)
    return after


def explore(start: Node, depth: int) -> dict[RequestState, dict[type[Event], set[RequestState]]]:
    seen: set[object] = set()
    found: dict[RequestState, dict[type[Event], set[RequestState]]] = defaultdict(lambda: defaultdict(set))
    frontier = [start]
    for _ in range(depth):
        following = []
        for node in frontier:
            assert copy.deepcopy(node).brain.handle(Tick(), node.now) == [], "a tick before its time does nothing"
            found[node.brain.state][Tick].add(node.brain.state)
            for event in possible(node):
                after = step(node, event)
                found[node.brain.state][type(event)].add(after.brain.state)
                if not after.ended and after.key() not in seen:
                    seen.add(after.key())
                    following.append(after)
        frontier = following
    return found


def arrows(table: Mapping[RequestState, Mapping[type[Event], Collection[RequestState]]]) -> set[str]:
    return {
        f"{state} --{event.__name__}--> {after}"
        for state, row in table.items()
        for event, reached in row.items()
        for after in reached
    }


def begun(prefill_here: bool) -> Node:
    node = Node(RequestBrain(RequestParams(decode_tries=2, prefill_tries=2), prefill_here, DEADLINE))
    node.take(node.brain.handle(Admitted(), 0.0))
    return node


def test_the_table_lists_what_happens_and_nothing_else() -> None:
    found = explore(begun(prefill_here=False), DEPTH)
    for state, row in explore(begun(prefill_here=True), DEPTH).items():
        for event, reached in row.items():
            found[state][event] |= reached
    found[RequestState.QUEUED][Admitted].add(RequestState.QUEUED)
    assert arrows(found) == arrows(TRANSITIONS)


def test_every_state_but_the_ends_has_a_row() -> None:
    assert set(TRANSITIONS) | ENDED == set(RequestState)
