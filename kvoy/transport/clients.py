"""Callers of the other pods' services: prefill, control and inference. Decode is in decode_client.py, the kvstore in
kv_store.py, handoffs are in kv_stream.py.

Every call has a deadline; every failure is a KvoyError (status.py has the table). Knows no policy: no retries here.
"""

from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

from kvoy.core.generate import GenerateCall, GenerateChunk, TokenizeCall
from kvoy.core.types import ModelInfo, Pod, PrefillWork
from kvoy.transport.channels import Channels
from kvoy.transport.prefill import PrefillEvent


class PrefillClient:
    """Gives work to prefill pods."""

    def __init__(self, channels: Channels) -> None:
        raise NotImplementedError

    def run(self, address: str, work: PrefillWork) -> AsyncIterator[PrefillEvent]:
        """WorkStarted, then PrefillReport. An async generator: closing it (contextlib.aclosing) takes the work back.
        Errors: what the pod raised, or PeerError if it cannot be reached or dies (``reason`` as in WorkFailed)."""
        raise NotImplementedError


class ControlClient:
    """Asks pods about themselves. PeerError when one does not answer within ``timeout_s``."""

    def __init__(self, channels: Channels, timeout_s: float = 2.0) -> None:
        raise NotImplementedError

    async def get_pod(self, address: str) -> Pod:
        """The pod at ``address``, now."""
        raise NotImplementedError

    async def list_pods(self, address: str) -> list[Pod]:
        """Every pod that the pod at ``address`` finds in the directory."""
        raise NotImplementedError


class InferenceClient:
    """The router as an asyncio client sees it; keeps its own connection."""

    def __init__(self, address: str) -> None:
        raise NotImplementedError

    def generate(self, call: GenerateCall) -> AsyncIterator[GenerateChunk]:
        """The answer, piece by piece. An async generator: closing it cancels the request."""
        raise NotImplementedError

    async def tokenize(self, call: TokenizeCall) -> tuple[int, ...]:
        """Token ids, as Generate would see them."""
        raise NotImplementedError

    async def list_models(self) -> list[ModelInfo]:
        """The models that can be named in a request."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancels what is still running."""
        raise NotImplementedError


class BlockingInferenceClient:
    """The router as a program without asyncio sees it; a context manager."""

    def __init__(self, address: str) -> None:
        raise NotImplementedError

    def generate(self, call: GenerateCall) -> Iterator[GenerateChunk]:
        """The answer, piece by piece. A generator: closing it cancels the request."""
        raise NotImplementedError

    def tokenize(self, call: TokenizeCall) -> tuple[int, ...]:
        """Token ids, as Generate would see them."""
        raise NotImplementedError

    def list_models(self) -> list[ModelInfo]:
        """The models that can be named in a request."""
        raise NotImplementedError

    def close(self) -> None:
        """Cancels what is still running."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
