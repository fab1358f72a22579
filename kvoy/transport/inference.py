"""kvoy.v1.Inference on the server's side: what a router must offer, and its gRPC face.

Knows nothing of how an answer comes about. Changes with proto/kvoy/v1/inference.proto and codec/inference.py.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from kvoy.core.generate import GenerateCall, GenerateChunk, TokenizeCall
from kvoy.core.types import ModelInfo
from kvoy.transport.rpc import Registration


class InferenceHandler(Protocol):
    """Raises KvoyErrors. An iterator is closed (aclose, or CancelledError where it waits) when the client goes away."""

    def generate(self, call: GenerateCall) -> AsyncIterator[GenerateChunk]:
        """``call`` has passed kvoy.core.generate.check; ``call.timeout_s`` is the client's deadline, if it set one."""
        ...

    async def tokenize(self, call: TokenizeCall) -> tuple[int, ...]: ...

    async def list_models(self) -> list[ModelInfo]: ...


def inference_service(handler: InferenceHandler) -> Registration:
    """The gRPC face of ``handler``."""
    raise NotImplementedError
