"""What the codec's modules share: checks of single fields, enum tables, and messages whose fields are all plain.

Each check returns the value it was given or raises InvalidRequest with the field's name in the sentence.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from kvoy.core.errors import InvalidRequest
from kvoy.core.generate import MAX_TOKEN_ID

MAX_ID_CHARS = 256
"""Of request ids and leases: they are kept in tables and written to logs."""
MAX_BLOCK_ID_BYTES = 64

E = TypeVar("E", bound=Enum)
M = TypeVar("M", bound=Message)
D = TypeVar("D")


class EnumTable(Generic[E]):
    """A proto enum and ours, one to one. The proto numbers are those of the generated module."""

    def __init__(self, pairs: Mapping[E, int]) -> None:
        self._numbers = dict(pairs)
        self._values = {number: value for value, number in pairs.items()}

    def number(self, value: E) -> int:
        """The proto number of ``value``."""
        return self._numbers[value]

    def value(self, number: int, field: str) -> E:
        """Ours for the proto ``number``; 0 (unspecified) and unknown ones are errors."""
        try:
            return self._values[number]
        except KeyError:
            known = ", ".join(str(n) for n in sorted(self._values))
            raise InvalidRequest(f"{field} is {number}, which means nothing here; known are {known}.", field) from None

    def optional(self, number: int, field: str) -> E | None:
        """The same, but 0 (unspecified) is None."""
        return None if number == 0 else self.value(number, field)


def parse(message_type: type[M], wire: bytes | memoryview) -> M:
    """The message in ``wire``."""
    message = message_type()
    try:
        message.ParseFromString(bytes(wire))
    except DecodeError as error:
        name = message_type.DESCRIPTOR.full_name
        raise InvalidRequest(f"The bytes received are not a {name} message.") from error
    return message


def identifier(value: str, field: str) -> str:
    """A request id or lease: not empty, not huge."""
    if not value:
        raise InvalidRequest(f"{field} is empty; it must name something.", field)
    return short(value, field)


def short(value: str, field: str) -> str:
    """A string that will be kept: not huge."""
    if len(value) > MAX_ID_CHARS:
        raise InvalidRequest(f"{field} has {len(value)} characters; at most {MAX_ID_CHARS} are allowed.", field)
    return value


def token_ids(values: Iterable[int], field: str) -> tuple[int, ...]:
    """Token ids; whether the model has them is checked where the model is known."""
    ids = tuple(values)
    if ids and max(ids) > MAX_TOKEN_ID:
        raise InvalidRequest(f"{field} holds {max(ids)}, which no vocabulary reaches.", field)
    return ids


def token_id(value: int, field: str) -> int:
    """One token id."""
    return token_ids((value,), field)[0]


def at_least(value: int, low: int, field: str) -> int:
    """An integer with a lower bound."""
    if value < low:
        raise InvalidRequest(f"{field} is {value}; it must be at least {low}.", field)
    return value


def finite(value: float, field: str) -> float:
    """A number that is neither NaN nor infinite, nor negative: times, durations, temperatures."""
    if not math.isfinite(value) or value < 0:
        raise InvalidRequest(f"{field} is {value}; it must be a number of at least 0.", field)
    return value


def block_id(value: bytes, field: str) -> bytes:
    """The id of a block."""
    if not 0 < len(value) <= MAX_BLOCK_ID_BYTES:
        raise InvalidRequest(
            f"{field} holds an id of {len(value)} bytes; 1 to {MAX_BLOCK_ID_BYTES} are allowed.", field
        )
    return value


def block_ids(values: Iterable[bytes], field: str) -> tuple[bytes, ...]:
    """Ids of blocks."""
    return tuple(block_id(value, field) for value in values)


def plain_to_proto(value: object, message_type: type[M], **more: Any) -> M:
    """The message for a dataclass whose fields are all in it, by the same names and as plain numbers or strings.
    ``more`` fills the message's other fields."""
    fields = {name: getattr(value, name) for name in plain_names(type(value))}
    return message_type(**fields, **more)


def plain_from_proto(value_type: type[D], message: Message) -> D:
    """The dataclass for such a message; fields are finite and not negative."""
    values = {name: getattr(message, name) for name in plain_names(value_type)}
    for name, value in values.items():
        if isinstance(value, float):
            finite(value, name)
    return value_type(**values)


def plain_names(value_type: type) -> tuple[str, ...]:
    """Names of the dataclass fields that are plain numbers or strings, in order."""
    return tuple(f.name for f in dataclasses.fields(value_type) if f.type in (int, float, str))
