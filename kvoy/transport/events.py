"""What crosses the event bus: subjects and payloads of block and load events. The Bus itself carries bytes."""

from kvoy.core.types import BlockEvent, LoadEvent
from kvoy.transport.codec import control as codec
from kvoy.transport.codec.fields import parse
from kvoy.v1 import control_pb2 as pb

_BLOCKS = "kvoy.blocks."
_LOAD = "kvoy.load."
BLOCK_SUBJECTS = _BLOCKS + ">"
LOAD_SUBJECTS = _LOAD + ">"


def block_subject(pod_id: str) -> str:
    """Where a pod announces its cached blocks."""
    return _BLOCKS + pod_id


def load_subject(pod_id: str) -> str:
    """Where a pod announces its load."""
    return _LOAD + pod_id


def block_event_to_bytes(event: BlockEvent) -> bytes:
    """A payload for ``block_subject``."""
    return codec.block_event_to_proto(event).SerializeToString()


def block_event_from_bytes(payload: bytes) -> BlockEvent:
    """InvalidRequest if the payload is none."""
    return codec.block_event_from_proto(parse(pb.BlockEvent, payload))


def load_event_to_bytes(event: LoadEvent) -> bytes:
    """A payload for ``load_subject``."""
    return codec.load_event_to_proto(event).SerializeToString()


def load_event_from_bytes(payload: bytes) -> LoadEvent:
    """InvalidRequest if the payload is none."""
    return codec.load_event_from_proto(parse(pb.LoadEvent, payload))
