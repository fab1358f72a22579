"""Typed reading of what others wrote: config.json and GGUF metadata.

Owns the sentences for a missing or wrong value; every getter raises ModelError with the source and the name.
Knows no model. Torch-free.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvoy.core.errors import ModelError

REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping from ``source`` (a path, for messages) whose values are not trusted.

    A name that is absent or null takes ``default``; with none given it is required. ``prefix`` goes before
    every name asked for (GGUF: "llama.").
    """

    source: str
    values: Mapping[str, object]
    prefix: str = ""

    @classmethod
    def of_json(cls, path: Path) -> "Fields":
        """The object in a JSON file."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path} must hold a JSON object")
        return cls(str(path), values)

    def has(self, name: str) -> bool:
        return self.values.get(self.prefix + name) is not None

    def integer(self, name: str, default: object = REQUIRED, least: int = 1, most: int = 1 << 31) -> int:
        """An integer from ``least`` to ``most``."""
        value = self._get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._wrong(name, value, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: object = REQUIRED) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self._wrong(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str, default: object = REQUIRED) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: object = REQUIRED) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def texts(self, name: str, default: object = REQUIRED) -> list[str]:
        value = self._get(name, default)
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(x, str) for x in value):
            raise self._wrong(name, value, "a list of strings")
        return list(value)

    def numbers(self, name: str, default: object = REQUIRED) -> list[float]:
        value = self._get(name, default)
        if not isinstance(value, Sequence) or not all(isinstance(x, int | float) for x in value):
            raise self._wrong(name, value, "a list of numbers")
        return [float(x) for x in value]

    def inner(self, name: str) -> "Fields":
        """The object under ``name``; an empty one when it is absent or null."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return Fields(f"{self.source}: {name}", value)

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; none when absent."""
        value = self._get(name, [])
        listed = value if isinstance(value, list) else [value]
        if not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in listed):
            raise self._wrong(name, value, "a token id or a list of them")
        return tuple(listed)

    def _get(self, name: str, default: object) -> object:
        value = self.values.get(self.prefix + name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ModelError(f"{self.source} does not give {self.prefix + name}, which kvoy needs")
        return default

    def _wrong(self, name: str, value: object, wanted: str) -> ModelError:
        return ModelError(f"{self.source}: {self.prefix + name} must be {wanted}, not {value!r:.80}")
