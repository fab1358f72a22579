"""One open handoff of a prefill pod: sends what the brain orders, in order, and reports what the decode pod says.

Owns one stream and ends it. Decides nothing: credits, retries and the end of the request are the brain's.
"""

import asyncio
from collections.abc import Callable

from kvoy.core.actions import OpenHandoff, SendCommit, SendFrame
from kvoy.core.errors import KvoyError
from kvoy.core.events import FrameSent, HandoffLost, ReceiverSaid
from kvoy.core.frames import HandoffKey
from kvoy.transport.ports import HandoffConnector, HandoffStream

_LIMIT_S = 3600.0
"""Bounds a handoff of a request without deadline; leases and dead connections end it long before."""

Report = ReceiverSaid | FrameSent | HandoffLost


class OutgoingHandoff:
    """``slot(index, length)`` gives the bytes of a staging slot, ``offset(index)`` its place in the slab; ``post``
    takes what happens."""

    _task: asyncio.Task[None]

    def __init__(
        self,
        connector: HandoffConnector,
        opening: OpenHandoff,
        slot: Callable[[int, int], memoryview],
        offset: Callable[[int], int],
        post: Callable[[Report], None],
    ) -> None:
        self._connector = connector
        self._open = opening
        self._slot = slot
        self._offset = offset
        self._post = post
        self._orders: asyncio.Queue[SendFrame | SendCommit] = asyncio.Queue()
        self._unanswered = 0

    @property
    def key(self) -> HandoffKey:
        return self._open.opening.key

    def order(self, order: SendFrame | SendCommit) -> None:
        """Sent after all that was ordered before."""
        self._unanswered += isinstance(order, SendFrame)
        self._orders.put_nowait(order)

    def start(self, tasks: asyncio.TaskGroup, on_end: Callable[["OutgoingHandoff"], None]) -> None:
        """Goes on until the decode pod has said its last word, the stream is lost, or it is cut."""
        self._task = tasks.create_task(self._run(), name=f"handoff of {self.key.request_id}")
        self._task.add_done_callback(lambda _: self._end(on_end))

    def cut(self) -> None:
        """Ends it now. If frames are still to be sent, HandoffLost says when their slots are read no more."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            asked = self._open
            stream = await self._connector.open(asked.address, asked.opening, _LIMIT_S, asked.transports)
            try:
                await self._talk(stream)
            finally:
                await stream.close()
        except* KvoyError as failures:
            self._lose(str(failures.exceptions[0]))

    def _end(self, on_end: Callable[["OutgoingHandoff"], None]) -> None:
        """Whatever ended it, and also if it was cut before it began."""
        if self._unanswered:
            self._lose("the handoff had ended before the frame was sent")
        on_end(self)

    def _lose(self, reason: str) -> None:
        self._unanswered = 0
        self._post(HandoffLost(self.key, reason, self._open.opening.attempt))

    async def _talk(self, stream: HandoffStream) -> None:
        async with asyncio.TaskGroup() as both:
            sender = both.create_task(self._send(stream))
            async for message in stream.messages():
                self._post(ReceiverSaid(self.key, message))
            sender.cancel()

    async def _send(self, stream: HandoffStream) -> None:
        while True:
            match await self._orders.get():
                case SendFrame(header, slot, payload_bytes):
                    await stream.send_frame(header, self._slot(slot, payload_bytes), self._offset(slot))
                    self._unanswered -= 1
                    self._post(FrameSent(self.key, header.seq))
                case SendCommit(commit):
                    await stream.send_commit(commit)
