"""A request among pods whose messages are late: whatever happens, it ends once and no pod keeps anything for it."""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvoy.core.request import RequestBrain, RequestParams
from kvoy.core.request_events import (
    ENDED,
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
    RenewReservation,
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


@dataclass
class Leg:
    """One pod's work for the request: what it holds, and the words that are on their way to and from it."""

    role: Role
    number: int
    to_pod: deque[Action] = field(default_factory=deque)
    to_router: deque[Event] = field(default_factory=deque)
    holds: bool = False
    epoch: int = 0
    committed: bool = False


class RequestLife(RuleBasedStateMachine):
    """Rules pick which late word arrives next; pods behave as their brains promise."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.legs: dict[int, Leg] = {}
        self.ends: list[End] = []
        self.tokens: list[int] = []
        self.sent = 0
        self.absent = False
        self.brain = RequestBrain(RequestParams(hold_s=3.0, settle_s=2.0), prefill_here=False, deadline=60.0)
        self.feed(Admitted())

    def feed(self, event: Event) -> None:
        todo: deque[Event] = deque([event])
        while todo:
            for action in self.brain.handle(todo.popleft(), self.now):
                answer = self.perform(action)
                if answer is not None:
                    todo.append(answer)

    def perform(self, action: Action) -> Event | None:
        match action:
            case PickDecode():
                return NoPod(Role.DECODE, NoPodReason.ABSENT, "none") if self.absent else DecodePicked("d")
            case PickPrefill():
                return NoPod(Role.PREFILL, NoPodReason.ABSENT, "none") if self.absent else PrefillPicked("p")
            case AskReserve(leg):
                self.legs[leg] = Leg(Role.DECODE, leg, deque([action]))
            case RunPrefill(leg):
                self.legs[leg] = Leg(Role.PREFILL, leg, deque([action]))
            case RenewReservation(leg) | CancelDecode(leg) | CancelPrefill(leg):
                self.legs[leg].to_pod.append(action)
            case Emit(output):
                self.tokens += output.token_ids
            case End():
                self.ends.append(action)
        return None

    def busy(self, direction: str) -> list[Leg]:
        return [leg for leg in self.legs.values() if getattr(leg, direction)]

    @precondition(lambda self: self.busy("to_pod"))
    @rule(data=st.data())
    def pod_hears(self, data: st.DataObject) -> None:
        leg = data.draw(st.sampled_from(self.busy("to_pod")))
        match leg.to_pod.popleft():
            case AskReserve():
                self.reserve(leg, data.draw(st.sampled_from([None, *RejectReason])))
            case RenewReservation() if leg.holds and not leg.committed:
                self.reserve(leg, None)
            case RunPrefill():
                leg.holds = True
                leg.to_router.append(PrefillStarted(leg.number))
            case CancelDecode() if leg.holds:
                leg.holds = False
                leg.to_router.append(Outputs(leg.number, RequestOutput("r", (), finish=FinishReason.CANCELLED)))
            case CancelPrefill():
                leg.holds = False

    def reserve(self, leg: Leg, reason: RejectReason | None) -> None:
        if reason is not None:
            leg.to_router.append(Rejected(leg.number, reason, "no"))
            return
        leg.holds, leg.epoch = True, leg.epoch + 1
        told = Reservation("r", leg.epoch, "lease", "d:1", 0, SPEC)
        leg.to_router.append(ReservedByDecode(leg.number, told))

    @precondition(lambda self: self.busy("to_router"))
    @rule(data=st.data())
    def router_hears(self, data: st.DataObject) -> None:
        leg = data.draw(st.sampled_from(self.busy("to_router")))
        self.feed(leg.to_router.popleft())

    def working(self, role: Role) -> list[Leg]:
        return [leg for leg in self.legs.values() if leg.role is role and leg.holds]

    @precondition(lambda self: self.working(Role.PREFILL))
    @rule(how=st.sampled_from(["done", "busy", "decode_lost"]))
    def prefill_ends(self, how: str) -> None:
        leg = self.working(Role.PREFILL)[0]
        leg.holds = False
        if how == "done" and self.working(Role.DECODE):
            self.working(Role.DECODE)[-1].committed = True
            leg.to_router.append(PrefillDone(leg.number, PrefillReport()))
        else:
            leg.to_router.append(PrefillFailed(leg.number, how, "no"))

    @precondition(lambda self: any(leg.committed for leg in self.working(Role.DECODE)))
    @rule(finish=st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH]))
    def decode_steps(self, finish: FinishReason | None) -> None:
        leg = next(leg for leg in self.working(Role.DECODE) if leg.committed)
        self.sent += 1
        leg.holds = finish is None
        leg.to_router.append(Outputs(leg.number, RequestOutput("r", (self.sent,), finish=finish)))

    @precondition(lambda self: self.legs)
    @rule(data=st.data())
    def pod_dies(self, data: st.DataObject) -> None:
        leg = data.draw(st.sampled_from(list(self.legs.values())))
        lost = DecodeLost if leg.role is Role.DECODE else PrefillLost
        leg.holds = False
        leg.to_pod.clear()
        leg.to_router.clear()
        self.feed(lost(leg.number, "gone"))

    @rule(absent=st.booleans())
    def pods_change(self, absent: bool) -> None:
        self.absent = absent
        self.feed(PodsChanged())

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @precondition(lambda self: self.brain.state is RequestState.DECODING)
    @rule()
    def stop_string(self) -> None:
        self.feed(StopStringFound())

    @rule()
    def client_leaves(self) -> None:
        self.feed(CancelledByClient())

    @invariant()
    def promises_hold(self) -> None:
        self.brain.check()
        assert len(self.ends) == (self.brain.state in ENDED)
        assert self.tokens == sorted(set(self.tokens)), "each token once, in order"

    def teardown(self) -> None:
        """The client leaves and every word arrives: nobody holds anything."""
        self.feed(CancelledByClient())
        for leg in self.legs.values():
            while leg.to_pod:
                match leg.to_pod.popleft():
                    case AskReserve() | RunPrefill():
                        leg.holds = True
                    case CancelDecode() | CancelPrefill():
                        leg.holds = False
        assert len(self.ends) == 1
        assert not [leg for leg in self.legs.values() if leg.holds]


RequestLife.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRequestLife = RequestLife.TestCase
