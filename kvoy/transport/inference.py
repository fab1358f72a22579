"""kvoy.v1.Inference on the server's side: what a router must offer, and its gRPC face.

Knows nothing of how an answer comes about. Changes with proto/kvoy/v1/inference.proto and codec/inference.py.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from kvoy.core.generate import GenerateCall, GenerateChunk, TokenizeCall
from kvoy.core.types import ModelInfo
from kvoy.transport.codec import inference as codec
from kvoy.transport.codec.fields import parse
from kvoy.transport.rpc import Method, Registration, ServerStream, Unary
from kvoy.transport.streams import closing
from kvoy.v1 import inference_pb2 as pb

NAME = "kvoy.v1.Inference"


class InferenceHandler(Protocol):
    """Raises KvoyErrors. An iterator is closed (aclose, or CancelledError where it waits) when the client goes away."""

    def generate(self, call: GenerateCall) -> AsyncIterator[GenerateChunk]:
        """``call`` has passed kvoy.core.generate.check; ``call.timeout_s`` is the client's deadline, if it set one."""
        ...

    async def tokenize(self, call: TokenizeCall) -> tuple[int, ...]: ...

    async def list_models(self) -> list[ModelInfo]: ...


def inference_service(handler: InferenceHandler) -> Registration:
    """The gRPC face of ``handler``."""
    face = _Face(handler)
    methods: dict[str, Method] = {
        "Generate": ServerStream(face.generate),
        "Tokenize": Unary(face.tokenize),
        "ListModels": Unary(face.list_models),
    }
    return Registration(NAME, methods)


class _Face:
    """Bytes to dataclasses and back."""

    def __init__(self, handler: InferenceHandler) -> None:
        self._handler = handler

    async def generate(self, wire: bytes, timeout_s: float | None) -> AsyncIterator[bytes]:
        call = codec.generate_call_from_proto(parse(pb.GenerateRequest, wire), timeout_s)
        chunks = self._handler.generate(call)
        async with closing(chunks):
            async for chunk in chunks:
                yield codec.generate_chunk_to_proto(chunk).SerializeToString()

    async def tokenize(self, wire: bytes) -> bytes:
        call = codec.tokenize_call_from_proto(parse(pb.TokenizeRequest, wire))
        return codec.tokens_to_proto(await self._handler.tokenize(call)).SerializeToString()

    async def list_models(self, wire: bytes) -> bytes:
        parse(pb.ListModelsRequest, wire)
        return codec.models_to_proto(await self._handler.list_models()).SerializeToString()
