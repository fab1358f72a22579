"""What crosses the event bus: subjects and payloads of block and load events. The Bus itself carries bytes."""

from kvoy.core.types import BlockEvent, LoadEvent

BLOCK_SUBJECTS = "kvoy.blocks.>"
LOAD_SUBJECTS = "kvoy.load.>"


def block_subject(pod_id: str) -> str:
    """Where a pod announces its cached blocks."""
    raise NotImplementedError


def load_subject(pod_id: str) -> str:
    """Where a pod announces its load."""
    raise NotImplementedError


def block_event_to_bytes(event: BlockEvent) -> bytes:
    """A payload for ``block_subject``."""
    raise NotImplementedError


def block_event_from_bytes(payload: bytes) -> BlockEvent:
    """InvalidRequest if the payload is none."""
    raise NotImplementedError


def load_event_to_bytes(event: LoadEvent) -> bytes:
    """A payload for ``load_subject``."""
    raise NotImplementedError


def load_event_from_bytes(payload: bytes) -> LoadEvent:
    """InvalidRequest if the payload is none."""
    raise NotImplementedError
