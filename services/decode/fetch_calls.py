"""The face of a decode pod for prefill pods that lack what it holds: their calls become events, frames go to the call.

Owns which calls the brain has not ended. Who may have what, and how much at once, is the brain's to say.
"""

from kvoy.core.actions import EndFetch, LendFrame
from kvoy.core.events import DecodeEvent, FetchAsked, FetchEnded, FrameTaken
from kvoy.runtime.loop import Inbox
from kvoy.transport.kv_held import HeldCall


class FetchCalls:
    """HeldHandler of kvoy.transport.kv_held."""

    def __init__(self, inbox: Inbox[DecodeEvent]) -> None:
        self._inbox = inbox
        self._calls: dict[int, HeldCall] = {}

    async def asked(self, call: HeldCall) -> None:
        """Waits while too much waits for the brain."""
        self._calls[call.number] = call
        await self._inbox.offer(FetchAsked(call.call, call.number))

    def taken(self, call: HeldCall) -> None:
        """Of a call that the brain has ended it need not hear."""
        if call.number in self._calls:
            self._inbox.post(FrameTaken(call.number))

    async def ended(self, call: HeldCall) -> None:
        """By the peer, unless the brain has ended it."""
        if self._calls.pop(call.number, None) is not None:
            self._inbox.post(FetchEnded(call.number))

    def lend(self, action: LendFrame, payload: memoryview) -> None:
        """Copies the payload. For a call that has ended, of which the brain is about to hear, it is void."""
        if action.number in self._calls:
            self._calls[action.number].lend(action.header, payload)

    def end(self, action: EndFetch) -> None:
        """The brain's last word."""
        call = self._calls.pop(action.number, None)
        if call is not None:
            call.end(action.reason)
