"""The life of a request, told as stories: what happens, what the router does about it."""

import pytest

from kvoy.core.errors import InvariantError
from kvoy.core.request import RequestBrain, RequestParams
from kvoy.core.request_events import (
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
    Failure,
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
    DecodeReport,
    FinishReason,
    KvDtype,
    KvSpec,
    PrefillReport,
    RejectReason,
    RequestOutput,
    Reservation,
    Role,
)

SPEC = KvSpec(layers=2, kv_heads=1, head_dim=4, block_tokens=16, dtype=KvDtype.FP32)
NOW = 1000.0


def reservation(epoch: int = 1, held_blocks: int = 0) -> Reservation:
    return Reservation("r", epoch, f"lease-{epoch}", "decode:1", held_blocks, SPEC)


def output(*token_ids: int, finish: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("r", token_ids, (), finish, DecodeReport(received_blocks=3) if finish else None)


def brain(prefill_here: bool = False, deadline: float | None = None, **params: float) -> RequestBrain:
    return RequestBrain(RequestParams(**params), prefill_here, deadline)  # type: ignore[arg-type]


def play(subject: RequestBrain, *events: Event, now: float = NOW) -> list[object]:
    """The actions of the last event."""
    actions: list[object] = []
    for event in events:
        actions = list(subject.handle(event, now))
        subject.check()
    return actions


def reserved(**params: float) -> RequestBrain:
    subject = brain(**params)
    play(subject, Admitted(), DecodePicked("d1"), ReservedByDecode(1, reservation()), PrefillPicked("p1"))
    return subject


def prefilling(**params: float) -> RequestBrain:
    subject = reserved(**params)
    play(subject, PrefillStarted(2))
    return subject


def test_a_request_that_goes_well() -> None:
    subject = brain()
    assert play(subject, Admitted()) == [PickDecode(())]
    assert play(subject, DecodePicked("d1")) == [AskReserve(1, "d1")]
    assert play(subject, ReservedByDecode(1, reservation())) == [PickPrefill((), SPEC)]
    assert play(subject, PrefillPicked("p1")) == [RunPrefill(2, "p1", reservation())]
    assert subject.state is RequestState.RESERVED
    assert play(subject, PrefillStarted(2)) == []
    assert subject.state is RequestState.PREFILLING
    assert play(subject, PrefillDone(2, PrefillReport(cached_tokens=16))) == []
    assert subject.state is RequestState.HANDING_OFF
    assert play(subject, Outputs(1, output(5))) == [Emit(output(5))]
    assert subject.state is RequestState.DECODING
    last = output(6, 2, finish=FinishReason.STOP)
    assert play(subject, Outputs(1, last)) == [Emit(last), End(RequestState.FINISHED, FinishReason.STOP)]
    assert subject.account.tokens == 3
    assert subject.account.prefill == PrefillReport(cached_tokens=16)
    assert subject.account.decode == DecodeReport(received_blocks=3)


def test_a_decode_pod_that_prefills_itself_needs_no_other_pod() -> None:
    subject = brain(prefill_here=True)
    play(subject, Admitted(), DecodePicked("d1"))
    assert play(subject, ReservedByDecode(1, reservation(held_blocks=2))) == []
    assert subject.account.held_tokens == 32
    last = output(7, finish=FinishReason.LENGTH)
    assert play(subject, Outputs(1, last)) == [Emit(last), End(RequestState.FINISHED, FinishReason.LENGTH)]


def test_tokens_may_overtake_the_report_and_the_end_waits_for_it() -> None:
    subject = prefilling()
    last = output(5, finish=FinishReason.LENGTH)
    assert play(subject, Outputs(1, last)) == [Emit(last)]
    assert subject.next_deadline() == NOW + 2.0
    end = End(RequestState.FINISHED, FinishReason.LENGTH)
    assert play(subject, PrefillDone(2, PrefillReport(chunks=1))) == [end]
    assert subject.account.prefill == PrefillReport(chunks=1)


def test_the_end_does_not_wait_for_the_report_for_ever() -> None:
    subject = prefilling(settle_s=2.0)
    play(subject, Outputs(1, output(5, finish=FinishReason.STOP)))
    assert play(subject, Tick(), now=NOW + 1.9) == []
    end = End(RequestState.FINISHED, FinishReason.STOP)
    assert play(subject, Tick(), now=NOW + 2.0) == [CancelPrefill(2), end]


@pytest.mark.parametrize("lost", [PrefillLost(2, "gone"), PrefillFailed(2, "draining", "bye")])
def test_a_report_lost_after_tokens_came_costs_only_the_report(lost: Event) -> None:
    subject = prefilling()
    play(subject, Outputs(1, output(5)))
    assert play(subject, lost) == []
    last = output(6, finish=FinishReason.STOP)
    assert play(subject, Outputs(1, last)) == [Emit(last), End(RequestState.FINISHED, FinishReason.STOP)]


def test_a_lost_prefill_pod_means_a_new_epoch_and_another_pod() -> None:
    subject = prefilling()
    assert play(subject, PrefillLost(2, "gone")) == [RenewReservation(1)]
    assert subject.state is RequestState.RESERVED
    assert play(subject, ReservedByDecode(1, reservation(epoch=2, held_blocks=4))) == [PickPrefill((), SPEC)]
    renewed = reservation(epoch=2, held_blocks=4)
    assert play(subject, PrefillPicked("p2")) == [RunPrefill(3, "p2", renewed)]
    assert play(subject, PrefillLost(2, "said twice")) == []


def test_a_full_prefill_pod_is_not_asked_again() -> None:
    subject = reserved()
    assert play(subject, PrefillFailed(2, "busy", "its queue is full")) == [RenewReservation(1)]
    assert play(subject, ReservedByDecode(1, reservation(2))) == [PickPrefill(("p1",), SPEC)]
    none = NoPod(Role.PREFILL, NoPodReason.EXCLUDED, "Every prefill pod has been tried.")
    end = End(RequestState.FAILED, failure=Failure.BUSY, message="its queue is full")
    assert play(subject, none) == [CancelDecode(1), end]


def test_prefill_is_tried_a_bounded_number_of_times() -> None:
    subject = reserved(prefill_tries=2)
    play(subject, PrefillLost(2, "gone"), ReservedByDecode(1, reservation(2)), PrefillPicked("p1"))
    end = End(RequestState.FAILED, failure=Failure.UNAVAILABLE, message="gone again")
    assert play(subject, PrefillLost(3, "gone again")) == [CancelDecode(1), end]


@pytest.mark.parametrize(("reason", "failure"), [("deadline", Failure.DEADLINE), ("invalid", Failure.INTERNAL)])
def test_some_failures_of_prefill_are_final(reason: str, failure: Failure) -> None:
    end = End(RequestState.FAILED, failure=failure, message="no")
    assert play(prefilling(), PrefillFailed(2, reason, "no")) == [CancelDecode(1), end]


def test_a_full_decode_pod_is_not_asked_again() -> None:
    subject = brain()
    play(subject, Admitted(), DecodePicked("d1"))
    assert play(subject, Rejected(1, RejectReason.BUSY, "full")) == [PickDecode(("d1",))]
    assert play(subject, DecodePicked("d2")) == [AskReserve(2, "d2")]
    assert play(subject, Rejected(2, RejectReason.BUSY, "full too")) == [PickDecode(("d1", "d2"))]
    none = NoPod(Role.DECODE, NoPodReason.EXCLUDED, "Every decode pod has been tried.")
    assert play(subject, none) == [End(RequestState.REFUSED, failure=Failure.BUSY, message="full too")]


def test_a_prompt_too_large_for_every_pod_is_the_clients_mistake() -> None:
    subject = brain()
    play(subject, Admitted())
    none = NoPod(Role.DECODE, NoPodReason.TOO_LARGE, "too large")
    assert play(subject, none) == [End(RequestState.REFUSED, failure=Failure.INVALID, message="too large")]


def test_a_decode_pod_lost_before_the_first_token_is_replaced() -> None:
    subject = prefilling()
    assert play(subject, DecodeLost(1, "gone")) == [CancelPrefill(2), PickDecode(())]
    assert subject.state is RequestState.QUEUED
    assert play(subject, DecodePicked("d2")) == [AskReserve(3, "d2")]
    assert play(subject, PrefillFailed(2, "cancelled", "as asked")) == []


def test_a_decode_pod_lost_after_tokens_fails_the_request() -> None:
    subject = prefilling()
    play(subject, PrefillDone(2, PrefillReport()), Outputs(1, output(5)), Outputs(1, output(6)))
    message = "The answer broke off after 2 tokens: the decode pod is gone."
    end = End(RequestState.FAILED, failure=Failure.UNAVAILABLE, message=message)
    assert play(subject, DecodeLost(1, "the decode pod is gone.")) == [end]


def test_a_lease_that_ran_out_is_worth_another_try_at_the_same_pod() -> None:
    subject = prefilling()
    actions = play(subject, Rejected(1, RejectReason.LEASE_EXPIRED, "too slow"))
    assert actions == [CancelPrefill(2), PickDecode(())]
    assert play(subject, DecodePicked("d1")) == [AskReserve(3, "d1")]


def test_a_pod_that_ends_the_request_by_itself_is_replaced() -> None:
    subject = prefilling()
    actions = play(subject, Outputs(1, output(finish=FinishReason.CANCELLED)))
    assert actions == [CancelPrefill(2), PickDecode(())]


def test_without_a_pod_the_request_waits_a_while() -> None:
    subject = brain(hold_s=5.0)
    none = NoPod(Role.DECODE, NoPodReason.ABSENT, "There is no decode pod.")
    assert play(subject, Admitted(), none) == []
    assert play(subject, PodsChanged(), now=NOW + 1) == [PickDecode(())]
    assert play(subject, none, now=NOW + 1) == []
    assert subject.next_deadline() == NOW + 5
    end = End(RequestState.REFUSED, failure=Failure.UNAVAILABLE, message="There is no decode pod.")
    assert play(subject, Tick(), now=NOW + 5) == [end]


def test_without_patience_a_missing_pod_is_told_at_once() -> None:
    subject = reserved(hold_s=0.0)
    play(subject, PrefillLost(2, "gone"), ReservedByDecode(1, reservation(2)))
    none = NoPod(Role.PREFILL, NoPodReason.ABSENT, "There is no prefill pod.")
    end = End(RequestState.FAILED, failure=Failure.UNAVAILABLE, message="There is no prefill pod.")
    assert play(subject, none) == [CancelDecode(1), end]


def test_tokens_that_come_while_prefill_is_being_replaced_are_welcome() -> None:
    """The commit had arrived before the prefill pod was lost: the decode pod needs no other one."""
    subject = prefilling()
    play(subject, PrefillLost(2, "gone"))
    assert play(subject, Outputs(1, output(5))) == [Emit(output(5))]
    assert play(subject, ReservedByDecode(1, reservation(2))) == []
    assert subject.state is RequestState.DECODING


def test_a_stop_string_ends_the_request_and_frees_the_decode_pod() -> None:
    subject = prefilling()
    play(subject, PrefillDone(2, PrefillReport()), Outputs(1, output(5)))
    end = End(RequestState.FINISHED, FinishReason.STOP)
    assert play(subject, StopStringFound()) == [CancelDecode(1), end]
    assert play(subject, Outputs(1, output(6))) == []


def test_a_stop_string_in_the_last_tokens_wins_over_length() -> None:
    subject = prefilling()
    play(subject, Outputs(1, output(5, finish=FinishReason.LENGTH)))
    assert play(subject, StopStringFound()) == []
    end = End(RequestState.FINISHED, FinishReason.STOP)
    assert play(subject, PrefillDone(2, PrefillReport())) == [end]


def test_the_deadline_frees_everything_prefill_first() -> None:
    subject = RequestBrain(RequestParams(), prefill_here=False, deadline=NOW + 3)
    play(subject, Admitted(), DecodePicked("d1"), ReservedByDecode(1, reservation()), PrefillPicked("p1"))
    assert subject.next_deadline() == NOW + 3
    prefill, decode, end = play(subject, Tick(), now=NOW + 3)
    assert (prefill, decode) == (CancelPrefill(2), CancelDecode(1))
    assert isinstance(end, End)
    assert end.failure is Failure.DEADLINE


def test_a_complete_answer_is_finished_even_if_the_deadline_comes_first() -> None:
    subject = RequestBrain(RequestParams(), prefill_here=False, deadline=NOW + 1)
    play(subject, Admitted(), DecodePicked("d1"), ReservedByDecode(1, reservation()), PrefillPicked("p1"))
    play(subject, Outputs(1, output(5, finish=FinishReason.STOP)))
    actions = play(subject, Tick(), now=NOW + 1)
    assert actions == [CancelPrefill(2), End(RequestState.FINISHED, FinishReason.STOP)]


def test_nothing_is_said_after_the_end() -> None:
    subject = prefilling()
    assert play(subject, CancelledByClient()) == [CancelPrefill(2), CancelDecode(1), End(RequestState.CANCELLED)]
    assert play(subject, CancelledByClient(), Outputs(1, output(5)), Tick(), PodsChanged(), StopStringFound()) == []
    assert subject.next_deadline() is None


def test_what_cannot_happen_raises_with_the_whole_story() -> None:
    with pytest.raises(InvariantError, match="StopStringFound cannot happen while queued"):
        brain().handle(StopStringFound(), NOW)
