"""Sends the answers of one call over HTTP: as one JSON body, or as server-sent events.

The status line waits for the first piece, so that a refusal by a pod is still an HTTP error; what goes wrong later is
an event. A client that goes away takes its request down at once, in every phase: its ``http.disconnect`` is waited for
beside the answers.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from kvoy.core.errors import KvoyError
from kvoy.core.generate import GenerateChunk
from services.router import sse
from services.router.answers import Answers, Indexed, merged
from services.router.http_errors import error_body, error_response, told
from services.router.openai_reply import Replier

_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """Nobody is left to answer."""


@dataclass(slots=True)
class Client:
    """The other end of one HTTP exchange, its body read."""

    receive: Receive
    send: Send
    gone: bool = False

    @asynccontextmanager
    async def watched(self, answers: Answers) -> AsyncIterator[None]:
        """While inside, the answers are cancelled when the client goes away; inside, that is ClientGone."""
        watch = asyncio.create_task(self._watch(answers))
        try:
            yield
        except KvoyError:
            if self.gone:
                raise ClientGone from None
            raise
        finally:
            watch.cancel()
            await asyncio.wait({watch})

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, body: bytes, *, more: bool) -> None:
        """Waits while the client does not read."""
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def _watch(self, answers: Answers) -> None:
        message: Message = {}
        while message.get("type") != "http.disconnect":
            message = await self.receive()
        self.gone = True
        answers.cancel()


@dataclass(frozen=True, slots=True)
class Reply:
    """An ASGI response. ``headers`` go onto whatever is sent."""

    answers: Answers
    replier: Replier
    headers: dict[str, str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(receive, send)
        try:
            async with self.answers, client.watched(self.answers):
                first = await self.answers.take()
                await (self._stream(client, first) if self.replier.ask.stream else self._whole(client, first))
        except ClientGone:
            return
        except KvoyError as error:
            await error_response(told(error), self.headers)(scope, receive, send)

    async def _whole(self, client: Client, batch: list[Indexed]) -> None:
        parts: list[list[GenerateChunk]] = [[] for _ in self.replier.prompts]
        while batch:
            for index, chunk in batch:
                parts[index].append(chunk)
            batch = await self.answers.take()
        body = sse.to_json(self.replier.whole([merged(chunks) for chunks in parts]))
        await client.start([*_JSON, (b"content-length", str(len(body)).encode()), *self._sent()])
        await client.write(body, more=False)

    async def _stream(self, client: Client, batch: list[Indexed]) -> None:
        await client.start([*_EVENTS, *self._sent()])
        try:
            while batch:
                await client.write(self._events(batch), more=True)
                batch = await self.answers.take()
        except KvoyError as error:
            if client.gone:
                raise
            await client.write(sse.event(error_body(told(error))) + sse.DONE, more=False)
            return
        usage = sse.event(self.replier.usage_chunk()) if self.replier.ask.include_usage else b""
        await client.write(usage + sse.DONE, more=False)

    def _events(self, batch: list[Indexed]) -> bytes:
        return b"".join([sse.event(chunk) for index, piece in batch for chunk in self.replier.chunks(index, piece)])

    def _sent(self) -> list[tuple[bytes, bytes]]:
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
