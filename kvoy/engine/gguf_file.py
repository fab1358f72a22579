"""Reads the structure of a GGUF file: metadata and where each tensor lies. Dequantising is weights.py's.

Own parser, because a start must not take the seconds that a generic reader spends on a vocabulary of 262,144
strings, and because every length is checked against the file: a truncated or corrupt one is a ModelError, never
a crash. Little-endian versions 2 and 3; the whole file is mapped, nothing is copied until asked for. Torch-free.
"""

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvoy.core.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor: ``shape`` in [out, in] order (GGUF writes it the other way round), and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    type_code: int
    """A gguf.GGMLQuantizationType."""
    start: int
    size_bytes: int


class GgufFile:
    """A mapped GGUF file. ``metadata`` holds every value by key; tensors by name in ``tensors``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}; fetch the file again") from error
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise self._corrupt("its header cannot be read") from error

    def view(self, place: TensorPlace) -> memoryview:
        """The raw bytes of a tensor, not copied."""
        return memoryview(self._bytes)[place.start : place.start + place.size_bytes]

    def _parse(self) -> None:
        if self._bytes[:4] != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file; fetch it again, or give another")
        version = _U32.unpack_from(self._bytes, 4)[0]
        if version not in VERSIONS:
            raise ModelError(
                f"{self.path} is GGUF version {version}, or not little-endian; kvoy reads versions 2 and 3"
            )
        tensor_count, value_count = struct.unpack_from("<QQ", self._bytes, 8)
        position = 24
        metadata: dict[str, object] = {}
        for _ in range(self._fits(value_count, position)):
            key, position = self._string(position)
            metadata[key], position = self._value(position)
        self.metadata: Mapping[str, object] = metadata
        self.tensors = self._tensors(position, tensor_count)

    def _tensors(self, position: int, count: int) -> dict[str, TensorPlace]:
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(f"{self.path} is one part of a split model; merge the parts with llama-gguf-split --merge")
        described: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(self._fits(count, position)):
            name, position = self._string(position)
            dimensions = _U32.unpack_from(self._bytes, position)[0]
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise self._corrupt(f"tensor {name!r} has {dimensions} dimensions")
            sizes = struct.unpack_from(f"<{dimensions}Q", self._bytes, position + 4)
            type_code, offset = struct.unpack_from("<IQ", self._bytes, position + 4 + 8 * dimensions)
            if not all(sizes):
                raise self._corrupt(f"tensor {name!r} has no items")
            position += 16 + 8 * dimensions
            described.append((name, tuple(reversed(sizes)), type_code, offset))
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._corrupt(f"general.alignment is {alignment!r}")
        base = -(-position // alignment) * alignment
        return {name: self._place(name, shape, code, base + offset) for name, shape, code, offset in described}

    def _place(self, name: str, shape: tuple[int, ...], type_code: int, start: int) -> TensorPlace:
        block_items, block_bytes = self._block_size(name, type_code)
        if shape[-1] % block_items:
            raise self._corrupt(f"tensor {name!r} has rows of {shape[-1]} items, not a multiple of {block_items}")
        size_bytes = math.prod(shape) // block_items * block_bytes
        if start + size_bytes > len(self._bytes):
            raise ModelError(
                f"{self.path} is truncated: tensor {name!r} ends at byte {start + size_bytes:,} of "
                f"{len(self._bytes):,}; fetch the file again"
            )
        return TensorPlace(name, shape, type_code, start, size_bytes)

    def _block_size(self, name: str, type_code: int) -> tuple[int, int]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415 - 0.15 s that a start may not need

        try:
            items, size_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_code)]
        except (ValueError, KeyError):
            raise ModelError(f"{self.path}: tensor {name!r} has the unknown type {type_code}") from None
        return items, size_bytes

    def _value(self, position: int) -> tuple[object, int]:
        kind = _U32.unpack_from(self._bytes, position)[0]
        position += 4
        if kind == _STRING:
            return self._string(position)
        if kind == _ARRAY:
            return self._array(position)
        code = self._scalar(kind)
        return struct.unpack_from(f"<{code}", self._bytes, position)[0], position + struct.calcsize(code)

    def _array(self, position: int) -> tuple[object, int]:
        kind, count = struct.unpack_from("<IQ", self._bytes, position)
        position += 12
        if kind == _STRING:
            return self._strings(position, self._fits(count, position, 8))
        if kind == _ARRAY:
            raise self._corrupt("it holds an array of arrays")
        code = self._scalar(kind)
        size = struct.calcsize(code)
        values = struct.unpack_from(f"<{self._fits(count, position, size)}{code}", self._bytes, position)
        return values, position + count * size

    def _strings(self, position: int, count: int) -> tuple[tuple[str, ...], int]:
        # The hot loop of a start (262,144 strings in a Gemma file), hence the local names.
        source, end = self._bytes, len(self._bytes)
        length_at: Callable[[mmap.mmap, int], tuple[int]] = _U64.unpack_from
        texts: list[str] = []
        for _ in range(count):
            start = position + 8
            position = start + length_at(source, position)[0]
            if position > end:
                raise self._corrupt("a string ends after the file")
            texts.append(source[start:position].decode())
        return tuple(texts), position

    def _string(self, position: int) -> tuple[str, int]:
        texts, position = self._strings(position, 1)
        return texts[0], position

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._corrupt(f"it holds a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _fits(self, count: int, position: int, item_bytes: int = 1) -> int:
        """``count``, unless so many items cannot follow ``position``."""
        if count * item_bytes > len(self._bytes) - position:
            raise self._corrupt(f"it announces {count:,} items, more than its bytes can hold")
        return count

    def _corrupt(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is corrupt or truncated: {why}; fetch the file again")
