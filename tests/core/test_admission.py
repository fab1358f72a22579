"""Admission bounds requests and prompt tokens in flight, and each ticket comes back once."""

import pytest

from kvoy.core.admission import Admission, AdmissionParams, Refusal, Ticket
from kvoy.core.errors import InvariantError


def test_requests_are_bounded() -> None:
    admission = Admission(AdmissionParams(max_requests=3, max_tokens=1000))
    first = admission.admit(2, 10)
    assert isinstance(first, Ticket)
    refusal = admission.admit(2, 10)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "too_many_requests"
    assert refusal.message == "The router already has 2 requests in flight, of 3 at most. Try again in a moment."
    assert isinstance(admission.admit(1, 10), Ticket)
    admission.release(first)
    assert (admission.requests, admission.tokens) == (1, 10)
    admission.check()


def test_tokens_are_bounded_but_a_large_request_alone_is_taken() -> None:
    admission = Admission(AdmissionParams(max_requests=10, max_tokens=100))
    large = admission.admit(1, 500)
    assert isinstance(large, Ticket)
    refusal = admission.admit(1, 1)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "too_many_tokens"
    admission.release(large)
    assert isinstance(admission.admit(1, 1), Ticket)


def test_a_ticket_comes_back_once() -> None:
    admission = Admission(AdmissionParams())
    ticket = admission.admit(1, 5)
    assert isinstance(ticket, Ticket)
    admission.release(ticket)
    with pytest.raises(InvariantError):
        admission.release(ticket)
    admission.check()
