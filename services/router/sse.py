"""JSON and server-sent events as bytes. Knows nothing of what they say."""

from pydantic_core import to_json as _to_json

DONE = b"data: [DONE]\n\n"


def to_json(value: object) -> bytes:
    return _to_json(value, inf_nan_mode="null")


def event(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
