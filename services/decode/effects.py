"""Carries out the orders of a decode pod's brain: engine and kvstore (shared), frames, words to routers and senders."""

from kvoy.core.actions import DecodeAction, DropFrame, ImportFrame, SayOutputs, SayRejected, SayReserved, SayToSender
from kvoy.engine.messages import ImportBlocks
from kvoy.runtime.engine_effects import EngineEffects
from services.decode.ingest import Ingest
from services.decode.sessions import Sessions


class DecodeEffects:
    """Everything here returns at once."""

    def __init__(self, shared: EngineEffects, sessions: Sessions, ingest: Ingest) -> None:
        self._shared = shared
        self._sessions = sessions
        self._ingest = ingest

    def perform(self, action: DecodeAction) -> None:
        match action:
            case ImportFrame():
                self._import(action)
            case DropFrame(header, stream):
                self._ingest.take(stream, header)
            case SayToSender():
                self._ingest.say(action)
            case SayReserved() | SayRejected() | SayOutputs():
                self._sessions.say(action)
            case _:
                self._shared.perform(action)

    def _import(self, action: ImportFrame) -> None:
        """The one copy of a frame on this side: out of the message, into the slab that the engine reads."""
        payload = self._ingest.take(action.stream, action.header)
        self._shared.slot(action.slot, len(payload))[:] = payload
        header = action.header
        order = ImportBlocks(
            action.transfer_id, action.slot, action.blocks, header.first_layer, header.layers, action.run
        )
        self._shared.import_blocks(order)
