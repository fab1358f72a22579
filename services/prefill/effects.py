"""Carries out the orders of a prefill pod's brain: engine and kvstore (shared), fetches, handoffs, words to routers."""

import asyncio
from collections.abc import Callable

from kvoy.core.actions import (
    CancelFetch,
    CloseHandoff,
    FetchHeld,
    OpenHandoff,
    PrefillAction,
    SendCommit,
    SendFrame,
    WorkDone,
    WorkFailed,
    WorkStarted,
)
from kvoy.core.events import HandoffLost, PrefillEvent
from kvoy.core.frames import HandoffKey
from kvoy.runtime.engine_effects import EngineEffects
from kvoy.transport.ports import HandoffConnector
from services.prefill.fetching import Fetching
from services.prefill.handoff import OutgoingHandoff
from services.prefill.servicer import PrefillServicer


class PrefillEffects:
    """One task for each open handoff, in the service's task group."""

    def __init__(
        self,
        shared: EngineEffects,
        servicer: PrefillServicer,
        connector: HandoffConnector,
        fetching: Fetching,
        *,
        tasks: asyncio.TaskGroup,
        post: Callable[[PrefillEvent], None],
    ) -> None:
        self._shared = shared
        self._servicer = servicer
        self._connector = connector
        self._fetching = fetching
        self._tasks = tasks
        self._post = post
        self._handoffs: dict[HandoffKey, OutgoingHandoff] = {}

    def perform(self, action: PrefillAction) -> None:
        """Returns at once."""
        match action:
            case OpenHandoff():
                self._open(action)
            case SendFrame(header):
                self._order(header.key, action)
            case SendCommit(commit):
                self._order(commit.key, action)
            case CloseHandoff(key):
                self._close(key)
            case FetchHeld():
                self._fetching.start(action)
            case CancelFetch(transfer_id):
                self._fetching.cancel(transfer_id)
            case WorkStarted() | WorkDone() | WorkFailed():
                self._servicer.say(action)
            case _:
                self._shared.perform(action)

    def _open(self, action: OpenHandoff) -> None:
        handoff = OutgoingHandoff(self._connector, action, self._shared.slot, self._shared.slot_offset, self._post)
        self._handoffs[handoff.key] = handoff
        handoff.start(self._tasks, self._forget)

    def _order(self, key: HandoffKey, order: SendFrame | SendCommit) -> None:
        """To a handoff that has ended, of which the brain is about to hear, an order is void."""
        if key in self._handoffs:
            self._handoffs[key].order(order)
        elif isinstance(order, SendFrame):
            self._post(HandoffLost(key, "the handoff had ended before the frame was sent", order.attempt))

    def _close(self, key: HandoffKey) -> None:
        if key in self._handoffs:
            self._handoffs.pop(key).cut()

    def _forget(self, handoff: OutgoingHandoff) -> None:
        """It has ended; another of the same key may have been opened meanwhile."""
        if self._handoffs.get(handoff.key) is handoff:
            del self._handoffs[handoff.key]
