"""The table of errors: complete, and the same on both sides of a wire."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy.core import errors
from kvoy.core.types import RejectReason
from kvoy.transport import status

EVERY = [
    errors.InvalidRequest("Bad.", "messages[0].content", "too_large"),
    errors.InvalidRequest("Bad."),
    errors.NotFound("No such model.", "model"),
    errors.Overloaded("Full.", "queue_full", 2.5),
    errors.Unavailable("None.", "draining"),
    errors.DeadlinePassed("Late."),
    errors.ConfigError("Mend it."),
    errors.ModelError("Torn file."),
    errors.PeerError("Gone.", "decode_lost"),
    errors.EngineError("Dead."),
    errors.InvariantError("Bug."),
    errors.KvoyError("Something."),
]


def test_every_class_has_a_row():
    def kinds(kind):
        yield kind
        for sub in kind.__subclasses__():
            yield from kinds(sub)

    ours = {kind for kind in kinds(errors.KvoyError) if kind.__module__ == errors.__name__}
    assert ours == set(status._ROWS)
    assert {type(error) for error in EVERY} == ours


@pytest.mark.parametrize("error", EVERY, ids=repr)
def test_errors_cross_whole(error):
    wire = status.to_wire(error)
    again = status.from_wire(wire.code, wire.details, wire.metadata, "peer:1")
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@given(st.sampled_from(EVERY), st.text(max_size=2000), st.text(max_size=50))
def test_what_crosses_is_always_fit_for_headers(error, message, param):
    changed = (
        errors.InvalidRequest(message, param, param)
        if error.args[0] == "Bad."
        else type(error)(message, "x")
        if isinstance(error, errors.Overloaded)
        else type(error)(message)
    )
    wire = status.to_wire(changed)
    assert len(wire.details) <= status.MAX_MESSAGE_CHARS
    for _, value in wire.metadata:
        assert value.isascii()
        assert value.isprintable()


@pytest.mark.parametrize(
    ("error", "code", "http_status", "http_code"),
    [
        (errors.InvalidRequest("m", "p"), grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request"),
        (errors.InvalidRequest("m", "p", "too_large"), grpc.StatusCode.INVALID_ARGUMENT, 400, "too_large"),
        (errors.NotFound("m", "model"), grpc.StatusCode.NOT_FOUND, 404, "model_not_found"),
        (errors.NotFound("m"), grpc.StatusCode.NOT_FOUND, 404, "not_found"),
        (errors.Overloaded("m", "queue_full"), grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "queue_full"),
        (errors.Unavailable("m"), grpc.StatusCode.UNAVAILABLE, 503, "unavailable"),
        (errors.DeadlinePassed("m"), grpc.StatusCode.DEADLINE_EXCEEDED, 408, "deadline"),
        (errors.PeerError("m"), grpc.StatusCode.UNAVAILABLE, 502, "peer_error"),
        (errors.EngineError("m"), grpc.StatusCode.INTERNAL, 500, "engine_error"),
        (errors.InvariantError("m"), grpc.StatusCode.INTERNAL, 500, "internal_error"),
    ],
)
def test_the_table(error, code, http_status, http_code):
    assert status.to_wire(error).code is code
    told = status.http_error(error)
    assert (told.status, told.code, told.message) == (http_status, http_code, "m")
    assert told.param == getattr(error, "param", None)
    assert told.retry_after_s == getattr(error, "retry_after_s", None)


def test_a_class_of_ones_own_is_told_as_its_nearest_kin():
    class TornFile(errors.ModelError):
        pass

    assert status.http_error(TornFile("m")).code == "model_error"


@pytest.mark.parametrize(
    ("code", "details", "kind", "says"),
    [
        (grpc.StatusCode.UNAVAILABLE, "refused", errors.PeerError, "peer:1 cannot be reached"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", errors.DeadlinePassed, "did not answer in the time allowed"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "limit", errors.Overloaded, "limit"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max", errors.InvalidRequest, "too large"),
        (grpc.StatusCode.INVALID_ARGUMENT, "bad", errors.InvalidRequest, "bad"),
        (grpc.StatusCode.NOT_FOUND, "x", errors.NotFound, "x"),
        (grpc.StatusCode.UNKNOWN, "boom", errors.PeerError, "boom"),
        (grpc.StatusCode.CANCELLED, "", errors.PeerError, "CANCELLED"),
    ],
)
def test_what_grpc_says_by_itself(code, details, kind, says):
    for metadata in (None, (), (("kvoy-error", "from-the-future"),), (("retry-after", "soon"),)):
        error = status.from_wire(code, details, metadata, "peer:1")
        assert type(error) is kind
        assert says in str(error)


def test_binary_metadata_and_broken_numbers_do_no_harm():
    metadata = (("kvoy-error", "overloaded"), ("retry-after", b"\xffx"), ("other-bin", b"\x00\xff"))
    error = status.from_wire(grpc.StatusCode.RESOURCE_EXHAUSTED, "m", metadata, "peer:1")
    assert error.retry_after_s == 1.0


@pytest.mark.parametrize("reason", [*RejectReason, "busy", "refused_by_decode", "decode_lost", "cancelled", "new"])
def test_reasons_make_errors_that_keep_them(reason):
    error = status.error_for_reason(reason, "It did not work.")
    assert status.reason_of(error) == reason
    assert str(error) == "It did not work."
