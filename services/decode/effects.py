"""Carries out the orders of a decode pod's brain: engine and kvstore (shared), frames in and out, words to routers and
prefill pods."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvoy.core.actions import (
    DecodeAction,
    DropFrame,
    EndFetch,
    ImportFrame,
    LendFrame,
    NoteExposed,
    SayOutputs,
    SayRejected,
    SayReserved,
    SayToSender,
)
from kvoy.core.errors import PeerError
from kvoy.core.events import FrameBad, Imported
from kvoy.engine.messages import ImportBlocks
from kvoy.runtime.engine_effects import EngineEffects
from kvoy.transport.payloads import InPlace
from services.decode.fetch_calls import FetchCalls
from services.decode.ingest import Ingest, Taken
from services.decode.sessions import Sessions

log = logging.getLogger(__name__)


class DecodeEffects:
    """Everything here returns at once. ``exposed`` takes the seconds of NoteExposed."""

    def __init__(
        self,
        shared: EngineEffects,
        sessions: Sessions,
        ingest: Ingest,
        fetches: FetchCalls,
        *,
        tasks: asyncio.TaskGroup,
        post: Callable[[FrameBad | Imported], None],
        exposed: Callable[[float], None],
    ) -> None:
        self._shared = shared
        self._sessions = sessions
        self._ingest = ingest
        self._fetches = fetches
        self._tasks = tasks
        self._post = post
        self._exposed = exposed

    def perform(self, action: DecodeAction) -> None:
        match action:
            case ImportFrame(_, header, stream):
                self._import(action, self._ingest.take(stream, header))
            case DropFrame(header, stream):
                self._ingest.take(stream, header)
            case SayToSender():
                self._ingest.say(action)
            case SayReserved() | SayRejected() | SayOutputs():
                self._sessions.say(action)
            case LendFrame(_, _, slot, payload_bytes):
                self._fetches.lend(action, self._shared.slot(slot, payload_bytes))
            case EndFetch():
                self._fetches.end(action)
            case NoteExposed(seconds):
                self._exposed(seconds)
            case _:
                self._shared.perform(action)

    def _import(self, action: ImportFrame, payload: Taken) -> None:
        lying = payload.in_place()
        if lying is None:
            self._tasks.create_task(self._fetch(action, payload))
        else:
            self._shared.import_blocks(_order(action, lying), partial(self._imported, action, payload, lying))

    def _imported(self, action: ImportFrame, payload: Taken, _: InPlace, is_right: bool) -> None:
        """The engine has taken it from where it lies."""
        if is_right:
            payload.count()
            self._post(Imported(action.transfer_id))
        else:
            self._post(FrameBad(action.transfer_id))

    async def _fetch(self, action: ImportFrame, payload: Taken) -> None:
        """The one copy of a frame on this side, into the slab that the engine reads; it is verified there."""
        slot = self._shared.slot(action.slot, payload.nbytes)
        try:
            is_right = await payload.fetch(slot)
        except PeerError as error:
            log.info("a frame did not come: %s", error)
            self._post(FrameBad(action.transfer_id, is_lost=True))
            return
        if not is_right:
            self._post(FrameBad(action.transfer_id))
            return
        self._shared.import_blocks(_order(action))


def _order(action: ImportFrame, lying: InPlace | None = None) -> ImportBlocks:
    header = action.header
    order = ImportBlocks(action.transfer_id, action.slot, action.blocks, header.first_layer, header.layers, action.run)
    return order if lying is None else replace(order, place=lying.place, checksum=lying.checksum)
