"""Every value survives the wire; nothing hostile survives the codec, and its refusal names the field."""

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy.core.errors import InvalidRequest
from kvoy.core.serve import Reserve
from kvoy.core.types import GREEDY, PrefillWork, Priority, Request
from kvoy.transport import events
from kvoy.transport.codec import control, decode, fields, inference, kv, prefill, shared
from kvoy.v1 import control_pb2, decode_pb2, inference_pb2, kv_pb2, prefill_pb2, types_pb2
from tests.transport import values


def crossed(message):
    """The message after a trip over the wire."""
    return fields.parse(type(message), message.SerializeToString())


def same(value, to_proto, from_proto):
    assert from_proto(crossed(to_proto(value))) == value


@given(values.generate_calls)
def test_generate_call(value):
    same(value, inference.generate_call_to_proto, inference.generate_call_from_proto)


@given(values.chunks)
def test_generate_chunk(value):
    same(value, inference.generate_chunk_to_proto, inference.generate_chunk_from_proto)


@given(values.tokenize_calls)
def test_tokenize_call(value):
    same(value, inference.tokenize_call_to_proto, inference.tokenize_call_from_proto)


@given(values.token_ids, st.lists(values.models, max_size=3))
def test_tokens_and_models(token_ids, models):
    same(token_ids, inference.tokens_to_proto, inference.tokens_from_proto)
    assert inference.tokens_to_proto(token_ids).count == len(token_ids)
    same(models, inference.models_to_proto, inference.models_from_proto)


@given(values.works)
def test_prefill_work(value):
    same(
        value,
        lambda work: prefill.work_to_proto(work, values.NOW),
        lambda message: prefill.work_from_proto(message, values.NOW),
    )


@given(values.prefill_events)
def test_prefill_event(value):
    same(value, prefill.prefill_event_to_proto, lambda message: prefill.prefill_event_from_proto(message, values.KEY))


@given(values.router_messages)
def test_router_message(value):
    same(
        value,
        lambda message: decode.router_message_to_proto(message, values.NOW),
        lambda message: decode.router_message_from_proto(message, values.NOW),
    )


@given(values.decode_messages)
def test_decode_message(value):
    same(value, decode.decode_message_to_proto, decode.decode_message_from_proto)


@given(values.openings, values.headers, values.commits)
def test_sender_messages(opening, header, commit):
    same(opening, kv.opening_to_proto, kv.opening_from_proto)
    same(header, kv.header_to_proto, kv.header_from_proto)
    same(commit, kv.commit_to_proto, kv.commit_from_proto)


@given(values.fetches)
def test_fetches(value):
    same(value, kv.fetch_to_proto, kv.fetch_from_proto)


@given(values.receiver_messages)
def test_receiver_message(value):
    same(value, kv.receiver_message_to_proto, kv.receiver_message_from_proto)


@given(values.text.filter(bool), values.kv_specs, values.id_lists, values.store_stats)
def test_store_messages(fingerprint, spec, block_ids, stat):
    for to_proto in (kv.lookup_to_proto, kv.get_to_proto):
        message = crossed(to_proto(fingerprint, spec, block_ids))
        assert kv.chain_from_proto(message) == (fingerprint, spec, block_ids)
    same(stat, kv.store_stat_to_proto, kv.store_stat_from_proto)


@given(values.pods, values.block_events, values.load_events)
def test_pods_and_events(pod, block_event, load_event):
    same(pod, control.pod_to_proto, control.pod_from_proto)
    same([pod], control.pods_to_proto, control.pods_from_proto)
    assert events.block_event_from_bytes(events.block_event_to_bytes(block_event)) == block_event
    assert events.load_event_from_bytes(events.load_event_to_bytes(load_event)) == load_event


# --- deadlines ------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_a_deadline_travels_as_seconds_left(ahead_s, skew_s):
    """The receiver's clock is another one: what crosses is how long is left."""
    request = Request("r", (1,), GREEDY, "f", deadline=values.NOW + ahead_s)
    here, there = values.NOW, values.NOW + skew_s
    message = crossed(decode.router_message_to_proto(Reserve(request), here))
    arrived = decode.router_message_from_proto(message, there)
    assert arrived.request.deadline == pytest.approx(there + max(ahead_s, shared.SOON_S), abs=1e-3)


def test_a_passed_deadline_is_not_taken_for_none():
    late = Request("r", (1,), GREEDY, "f", deadline=values.NOW - 5)
    message = prefill.work_to_proto(PrefillWork(late, values.RESERVATION), values.NOW)
    assert message.timeout_s > 0
    assert prefill.work_from_proto(message, values.NOW).request.deadline is not None


# --- hostile --------------------------------------------------------------------------------------


def refusal(decode_it: Callable[[], object]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode_it()
    assert str(caught.value).endswith((".", "hold.")) or "." in str(caught.value)
    return caught.value


def reserve(**fields_):
    base = decode.router_message_to_proto(Reserve(values.REQUEST), values.NOW)
    for field, value in fields_.items():
        if field.startswith("sampling_"):
            setattr(base.reserve.sampling, field.removeprefix("sampling_"), value)
        elif field == "token_ids":
            base.reserve.token_ids[:] = value
        else:
            setattr(base.reserve, field, value)
    return base


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"request_id": ""}, "reserve.request_id"),
        ({"request_id": "x" * 257}, "reserve.request_id"),
        ({"token_ids": []}, "reserve.token_ids"),
        ({"token_ids": [1, 2**31]}, "reserve.token_ids"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"priority": 77}, "priority"),
        ({"sampling_temperature": -0.5}, "sampling.temperature"),
        ({"sampling_temperature": float("inf")}, "sampling.temperature"),
        ({"sampling_top_p": 0.0}, "sampling.top_p"),
        ({"sampling_top_p": 1.5}, "sampling.top_p"),
        ({"sampling_max_tokens": 0}, "sampling.max_tokens"),
        ({"sampling_top_logprobs": 21}, "sampling.top_logprobs"),
    ],
)
def test_hostile_reserve(changes, param):
    error = refusal(lambda: decode.router_message_from_proto(crossed(reserve(**changes)), values.NOW))
    assert error.param == param
    assert param in str(error)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (inference_pb2.GenerateRequest(), "prompt"),
        (inference_pb2.GenerateRequest(text=""), "prompt"),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds()), "prompt"),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[2**32 - 1])), "prompt"),
        (inference_pb2.GenerateRequest(chat=inference_pb2.Chat()), "messages"),
        (inference_pb2.GenerateRequest(text="a", max_tokens=0), "max_tokens"),
        (inference_pb2.GenerateRequest(text="a", max_tokens=-3), "max_tokens"),
        (inference_pb2.GenerateRequest(text="a", temperature=-1), "temperature"),
        (inference_pb2.GenerateRequest(text="a", temperature=float("nan")), "temperature"),
        (inference_pb2.GenerateRequest(text="a", top_p=float("nan")), "top_p"),
        (inference_pb2.GenerateRequest(text="a", top_k=-1), "top_k"),
        (inference_pb2.GenerateRequest(text="a", logprobs=21), "logprobs"),
        (inference_pb2.GenerateRequest(text="a", stop=[""]), "stop"),
        (inference_pb2.GenerateRequest(text="a", stop_token_ids=[2**31]), "stop_token_ids"),
        (inference_pb2.GenerateRequest(text="a", priority=9), "priority"),
        (inference_pb2.GenerateRequest(text="a", request_id="x" * 300), "request_id"),
    ],
)
def test_hostile_generate(message, param):
    error = refusal(lambda: inference.generate_call_from_proto(crossed(message)))
    assert error.param == param


def test_an_unspecified_priority_is_standard():
    message = inference_pb2.GenerateRequest(text="a")
    assert inference.generate_call_from_proto(message).priority is Priority.STANDARD


SPEC_MESSAGE = shared.kv_spec_to_proto(values.SPEC)


@pytest.mark.parametrize(
    ("decode_it", "param"),
    [
        (lambda: decode.router_message_from_proto(decode_pb2.ServeRequest(), 0), "event"),
        (lambda: decode.decode_message_from_proto(decode_pb2.ServeResponse()), "event"),
        (
            lambda: decode.decode_message_from_proto(decode_pb2.ServeResponse(rejected=decode_pb2.Rejected())),
            "rejected.reason",
        ),
        (lambda: prefill.prefill_event_from_proto(prefill_pb2.RunResponse(), values.KEY), "event"),
        (lambda: prefill.work_from_proto(prefill_pb2.RunRequest(), 0), "request_id"),
        (lambda: prefill.work_from_proto(prefill_pb2.RunRequest(request_id="r"), 0), "token_ids"),
        (lambda: kv.receiver_message_from_proto(kv_pb2.PushResponse()), "event"),
        (lambda: kv.header_from_proto(kv_pb2.FrameHeader(request_id="r", blocks=0)), "frame.header.blocks"),
        (
            lambda: kv.header_from_proto(kv_pb2.FrameHeader(request_id="r", blocks=1, layers=1, heads=1, dtype=9)),
            "frame.header.dtype",
        ),
        (lambda: kv.opening_from_proto(kv_pb2.HandoffOpening(request_id="r")), "opening.lease"),
        (
            lambda: kv.commit_from_proto(kv_pb2.Commit(request_id="r", first_token_id=2**32 - 1)),
            "commit.first_token_id",
        ),
        (lambda: kv.fetch_from_proto(kv_pb2.FetchRequest(request_id="r")), "lease"),
        (
            lambda: kv.fetch_from_proto(kv_pb2.FetchRequest(request_id="r", lease="l", kv_spec=SPEC_MESSAGE)),
            "blocks",
        ),
        (lambda: kv.chain_from_proto(kv_pb2.LookupRequest()), "key.fingerprint"),
        (
            lambda: kv.chain_from_proto(
                kv_pb2.GetRequest(key=kv_pb2.StoreKey(fingerprint="f", kv_spec=SPEC_MESSAGE), block_ids=[b"x" * 65])
            ),
            "block_ids",
        ),
        (lambda: shared.kv_spec_from_proto(types_pb2.KvSpec()), "kv_spec.layers"),
        (lambda: control.pod_from_proto(control_pb2.Pod(pod_id="p")), "pod.role"),
        (lambda: control.pod_from_proto(control_pb2.Pod(pod_id="p", role=1, pid=-4)), "pod.pid"),
        (lambda: inference.tokenize_call_from_proto(inference_pb2.TokenizeRequest()), "prompt"),
    ],
)
def test_hostile_messages_name_the_field(decode_it, param):
    assert refusal(decode_it).param == param


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_understood_never_a_crash(wire):
    for decode_it in (
        lambda: decode.router_message_from_proto(fields.parse(decode_pb2.ServeRequest, wire), 0),
        lambda: prefill.work_from_proto(fields.parse(prefill_pb2.RunRequest, wire), 0),
        lambda: kv.fetch_from_proto(fields.parse(kv_pb2.FetchRequest, wire)),
        lambda: inference.generate_call_from_proto(fields.parse(inference_pb2.GenerateRequest, wire)),
        lambda: events.block_event_from_bytes(wire),
        lambda: events.load_event_from_bytes(wire),
    ):
        with contextlib.suppress(InvalidRequest):
            decode_it()
