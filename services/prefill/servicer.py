"""The gRPC face of a prefill pod: each Run call becomes an event, and the brain's reports go back to their call.

Owns the table of calls. A key stays in it until the brain has said the last word about it, also when the router
has gone, so that a late word never reaches another call.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import assert_never

from kvoy.core.actions import WorkDone, WorkFailed, WorkStarted
from kvoy.core.errors import InvalidRequest, Unavailable
from kvoy.core.events import PrefillEvent, WorkCancelled, WorkSubmitted
from kvoy.core.frames import HandoffKey
from kvoy.core.types import ModelInfo, PrefillReport, PrefillWork
from kvoy.runtime.engine_pod import check_request
from kvoy.runtime.loop import Inbox
from kvoy.transport.status import error_for_reason

Word = WorkStarted | WorkDone | WorkFailed


class PrefillServicer:
    """PrefillHandler of kvoy.transport.prefill."""

    def __init__(self, inbox: Inbox[PrefillEvent], model: ModelInfo) -> None:
        self._inbox = inbox
        self._model = model
        self._calls: dict[HandoffKey, asyncio.Queue[Word]] = {}
        self._broken = ""

    async def run(self, work: PrefillWork) -> AsyncIterator[WorkStarted | PrefillReport]:
        """One prompt, until the decode pod holds it. Leaving early takes the work back."""
        key = HandoffKey(work.request.request_id, work.reservation.epoch)
        check_request(work.request, self._model)
        if self._broken:
            raise Unavailable(self._broken, "engine_lost")
        if key in self._calls:
            raise InvalidRequest(f"Request {key.request_id} is here already in epoch {key.epoch}.", "request_id")
        words = self._calls[key] = asyncio.Queue()
        try:
            await self._inbox.offer(WorkSubmitted(work))
        except asyncio.CancelledError:
            del self._calls[key]
            raise
        try:
            while key in self._calls or not words.empty():
                yield _told(await words.get())
        finally:
            if key in self._calls:
                self._inbox.post(WorkCancelled(key))

    def say(self, word: Word) -> None:
        """The brain's word goes to its call."""
        words = self._calls[word.key]
        if not isinstance(word, WorkStarted):
            del self._calls[word.key]
        words.put_nowait(word)

    def fail(self, message: str) -> None:
        """The pod is broken: end every call with ``message``, and take no more."""
        self._broken = message
        for key in list(self._calls):
            self.say(WorkFailed(key, "engine_lost", message))


def _told(word: Word) -> WorkStarted | PrefillReport:
    """What the router is told; a failure is raised."""
    match word:
        case WorkStarted():
            return word
        case WorkDone(_, report):
            return report
        case WorkFailed(_, reason, message):
            raise error_for_reason(reason, message)
        case _:
            assert_never(word)
