"""Callers of the other pods' services: prefill, control and inference. Decode is in decode_client.py, the kvstore in
kv_store.py, handoffs are in kv_stream.py.

Every call has a deadline; every failure is a KvoyError (status.py has the table). Knows no policy: no retries here.
"""

import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Self

import grpc

from kvoy.core.errors import InvalidRequest
from kvoy.core.frames import HandoffKey
from kvoy.core.generate import GenerateCall, GenerateChunk, TokenizeCall, check, check_tokenize
from kvoy.core.types import ModelInfo, Pod, PrefillWork
from kvoy.transport import control, inference, prefill
from kvoy.transport.calls import decoded, server_stream, translated, unary
from kvoy.transport.channels import CHANNEL_OPTIONS, Channels, open_channel
from kvoy.transport.codec import control as control_codec
from kvoy.transport.codec import inference as inference_codec
from kvoy.transport.codec import prefill as prefill_codec
from kvoy.transport.codec.fields import parse
from kvoy.transport.prefill import PrefillEvent
from kvoy.v1 import control_pb2, inference_pb2, prefill_pb2

LONGEST_CALL_S = 3600.0
"""Of calls whose caller names no limit: nothing waits for ever."""
TOKENIZE_TIMEOUT_S = 30.0
DEADLINE_SLACK_S = 1.0
"""The pod ends the work at the request's deadline and says so; the call's own deadline is only for a pod that hangs."""


class PrefillClient:
    """Gives work to prefill pods."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    async def run(self, address: str, work: PrefillWork) -> AsyncGenerator[PrefillEvent, None]:
        """WorkStarted, then PrefillReport. An async generator: closing it (contextlib.aclosing) takes the work back.
        Errors: what the pod raised, or PeerError if it cannot be reached or dies (``reason`` as in WorkFailed)."""
        now = time.time()
        key = HandoffKey(work.request.request_id, work.reservation.epoch)
        left_s = LONGEST_CALL_S if work.request.deadline is None else max(0.0, work.request.deadline - now)
        wire = prefill_codec.work_to_proto(work, now).SerializeToString()
        path = f"/{prefill.NAME}/Run"
        answers = server_stream(self._channels.to(address), address, path, wire, left_s + DEADLINE_SLACK_S)

        def event(answer: bytes) -> PrefillEvent:
            return prefill_codec.prefill_event_from_proto(parse(prefill_pb2.RunResponse, answer), key)

        async with aclosing(answers):
            async for answer in answers:
                yield decoded(address, event, answer)


class ControlClient:
    """Asks pods about themselves. PeerError or DeadlinePassed when one does not answer within ``timeout_s``."""

    def __init__(self, channels: Channels, timeout_s: float = 2.0) -> None:
        self._channels = channels
        self._timeout_s = timeout_s

    async def get_pod(self, address: str) -> Pod:
        """The pod at ``address``, now."""
        return decoded(address, _pod, await self._ask(address, "GetPod"))

    async def list_pods(self, address: str) -> list[Pod]:
        """Every pod that the pod at ``address`` finds in the directory."""
        return decoded(address, _pods, await self._ask(address, "ListPods"))

    async def _ask(self, address: str, method: str) -> bytes:
        return await unary(self._channels.to(address), address, f"/{control.NAME}/{method}", b"", self._timeout_s)


class InferenceClient:
    """The router as an asyncio client sees it; keeps its own connection."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = open_channel(address)

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk, None]:
        """The answer, piece by piece. An async generator: closing it cancels the request."""
        timeout_s = call.timeout_s or LONGEST_CALL_S
        answers = server_stream(self._channel, self._address, _GENERATE, _generate_wire(call), timeout_s)
        async with aclosing(answers):
            async for answer in answers:
                yield decoded(self._address, _chunk, answer)

    async def tokenize(self, call: TokenizeCall) -> tuple[int, ...]:
        """Token ids, as Generate would see them."""
        wire = _tokenize_wire(call)
        answer = await unary(self._channel, self._address, _TOKENIZE, wire, TOKENIZE_TIMEOUT_S)
        return decoded(self._address, _tokens, answer)

    async def list_models(self) -> list[ModelInfo]:
        """The models that can be named in a request."""
        answer = await unary(self._channel, self._address, _LIST_MODELS, b"", TOKENIZE_TIMEOUT_S)
        return decoded(self._address, _models, answer)

    async def close(self) -> None:
        """Cancels what is still running."""
        await self._channel.close()


class BlockingInferenceClient:
    """The router as a program without asyncio sees it; a context manager."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)

    def generate(self, call: GenerateCall) -> Generator[GenerateChunk, None, None]:
        """The answer, piece by piece. A generator: closing it cancels the request."""
        method: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(_GENERATE)
        with translated(self._address):
            answers = method(_generate_wire(call), timeout=call.timeout_s or LONGEST_CALL_S)
            try:
                for answer in answers:
                    yield decoded(self._address, _chunk, answer)
            finally:
                answers.cancel()

    def tokenize(self, call: TokenizeCall) -> tuple[int, ...]:
        """Token ids, as Generate would see them."""
        return decoded(self._address, _tokens, self._ask(_TOKENIZE, _tokenize_wire(call)))

    def list_models(self) -> list[ModelInfo]:
        """The models that can be named in a request."""
        return decoded(self._address, _models, self._ask(_LIST_MODELS, b""))

    def _ask(self, path: str, wire: bytes) -> bytes:
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(path)
        with translated(self._address):
            return method(wire, timeout=TOKENIZE_TIMEOUT_S)

    def close(self) -> None:
        """Cancels what is still running."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_GENERATE = f"/{inference.NAME}/Generate"
_TOKENIZE = f"/{inference.NAME}/Tokenize"
_LIST_MODELS = f"/{inference.NAME}/ListModels"


@contextmanager
def _fields_that_fit() -> Generator[None, None, None]:
    """What protobuf cannot hold (a lone surrogate in a text, say) is the caller's mistake."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"The request cannot be sent: {error}.") from error


def _generate_wire(call: GenerateCall) -> bytes:
    check(call)
    with _fields_that_fit():
        return inference_codec.generate_call_to_proto(call).SerializeToString()


def _tokenize_wire(call: TokenizeCall) -> bytes:
    check_tokenize(call)
    with _fields_that_fit():
        return inference_codec.tokenize_call_to_proto(call).SerializeToString()


def _pod(wire: bytes) -> Pod:
    return control_codec.pod_from_proto(parse(control_pb2.GetPodResponse, wire).pod)


def _pods(wire: bytes) -> list[Pod]:
    return control_codec.pods_from_proto(parse(control_pb2.ListPodsResponse, wire))


def _chunk(wire: bytes) -> GenerateChunk:
    return inference_codec.generate_chunk_from_proto(parse(inference_pb2.GenerateResponse, wire))


def _tokens(wire: bytes) -> tuple[int, ...]:
    return inference_codec.tokens_from_proto(parse(inference_pb2.TokenizeResponse, wire))


def _models(wire: bytes) -> list[ModelInfo]:
    return inference_codec.models_from_proto(parse(inference_pb2.ListModelsResponse, wire))
