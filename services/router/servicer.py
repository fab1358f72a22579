"""The gRPC face of a router: kvoy.v1.Inference over the same Router that HTTP uses."""

from collections.abc import AsyncIterator

from kvoy.core.generate import GenerateCall, GenerateChunk, TokenizeCall
from kvoy.core.types import ModelInfo
from services.router.router import Router


class InferenceServicer:
    """InferenceHandler of kvoy.transport.inference."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateChunk]:
        """One answer; leaving early takes it down."""
        with self._router.counting_refusals():
            opened = await self._router.open([call])
        async with opened as answers:
            while batch := await answers.take():
                for _, chunk in batch:
                    yield chunk

    async def tokenize(self, call: TokenizeCall) -> tuple[int, ...]:
        return await self._router.tokenize(call)

    async def list_models(self) -> list[ModelInfo]:
        return [self._router.model]
