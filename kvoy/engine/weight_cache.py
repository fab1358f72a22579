"""Converted weights as one safetensors file in the cache: written once, mapped by every later start.

Owns the file: its header (known before the first weight is), the checksum in it, and the decision that a file is
sound. Weights are written one at a time, so that a conversion needs memory for one only. Knows no model.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from kvoy.core.errors import ModelError
from kvoy.engine.cache import READ_BYTES, cache_folder, locked, replacing

_CODES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_CHECKSUM_KEY = "xxh3"
_NO_CHECKSUM = "0" * 16


@dataclass(frozen=True, slots=True)
class Stored:
    """How one weight lies in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Safetensors(Protocol):
    """A mapped safetensors file, as the library (which has no types) gives it."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str, /) -> torch.Tensor: ...


def open_safetensors(path: Path) -> Safetensors:
    """Map a file; raises OSError or SafetensorError when it is not whole."""
    stored: Safetensors = safe_open(path, framework="pt")
    return stored


def load_or_write(
    target: Path,
    wanted: dict[str, Stored],
    weights: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    progress: Callable[[str], None],
) -> dict[str, torch.Tensor]:
    """Map ``target``; when it is absent or not sound, write it from ``weights()`` (in the order of ``wanted``) first.

    One process writes, others wait for it.
    """
    if (found := _load(target, wanted)) is not None:
        return found
    with cache_folder(target.parent), locked(target):
        if (found := _load(target, wanted)) is not None:
            return found
        progress(f"converting the weights (once), to {target}")
        with replacing(target) as part:
            _write(part, wanted, weights())
    written = _load(target, wanted)
    if written is None:
        raise ModelError(f"the converted weights in {target} cannot be read back; check that disk, then try again")
    return written


def _write(path: Path, wanted: dict[str, Stored], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    with path.open("wb") as file:
        file.write(_header(wanted, _NO_CHECKSUM))
        checksum = xxhash.xxh3_64()
        for _, weight in weights:
            raw = weight.contiguous().view(torch.uint8).reshape(-1).numpy().data
            checksum.update(raw)
            file.write(raw)
        file.seek(0)
        file.write(_header(wanted, checksum.hexdigest()))


def _header(wanted: dict[str, Stored], checksum: str) -> bytes:
    """Length and JSON of a safetensors header; of the same length for every checksum."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", _CHECKSUM_KEY: checksum}}
    end = 0
    for name, stored in wanted.items():
        start, end = end, end + stored.size_bytes
        entries[name] = {"dtype": _CODES[stored.dtype], "shape": stored.shape, "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 64)
    return struct.pack("<Q", len(text)) + text


def _load(path: Path, wanted: dict[str, Stored]) -> dict[str, torch.Tensor] | None:
    """The weights in ``path``, mapped; None when it is not the file that _write makes of these."""
    try:
        with path.open("rb") as file:
            if not _is_sound(file, wanted):
                return None
        stored = open_safetensors(path)
        return {name: stored.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError):
        return None


def _is_sound(file: BinaryIO, wanted: dict[str, Stored]) -> bool:
    """Reads the whole file: a flipped bit in a weight is otherwise found by no one."""
    expected = _header(wanted, _NO_CHECKSUM)
    header = file.read(len(expected))
    checksum = xxhash.xxh3_64()
    while chunk := file.read(READ_BYTES):
        checksum.update(chunk)
    return header == _header(wanted, checksum.hexdigest())
