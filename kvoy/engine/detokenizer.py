"""Token ids back to text, one at a time, at a constant cost per token.

Owns what a token means in bytes and when bytes are whole characters. Two kinds of vocabulary: byte-level (GPT-2's
alphabet of printable characters for bytes) and sentencepiece ("▁" is a space, <0x41> a byte, and the space that
encoding put in front is taken off again). Special tokens have no text. Torch-free.

Bytes that never become a character turn into U+FFFD, one for each maximal broken sequence: the characters around
them stay whole. (The tokenizers library breaks every byte of such a run, valid or not.)
"""

import codecs
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field

import tokenizers

from kvoy.core.errors import ModelError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_PIECE = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, inverted: printable Latin-1 stands for itself, the rest follows from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every token. ``strips_space``: a text starts with a space that nobody wrote."""

    backend: tokenizers.Tokenizer
    silent_ids: Collection[int]
    """Special tokens."""
    byte_level: bool
    strips_space: bool
    known: dict[int, bytes] = field(default_factory=dict)
    """Memo, filled as tokens are met."""

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, silent_ids: Collection[int], source: str) -> "Vocabulary":
        """Take the rules from the decoder that ``backend`` carries; ModelError when they are of another kind."""
        # What the library pickles of a decoder is its JSON.
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
        kinds = {step.get("type"): step for step in steps}
        if "ByteLevel" in kinds:
            return cls(backend, silent_ids, byte_level=True, strips_space=False)
        if not kinds.keys() <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} or not kinds:
            raise ModelError(
                f"{source} has a tokenizer whose decoder is {', '.join(map(str, kinds))}; kvoy has no such"
            )
        prepends = "Metaspace" in kinds and kinds["Metaspace"].get("prepend_scheme", "always") != "never"
        return cls(backend, silent_ids, byte_level=False, strips_space=prepends or "Strip" in kinds)

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for special tokens and for ids that the tokenizer does not have (padding of the vocabulary)."""
        piece = self.known.get(token_id)
        if piece is None:
            token = None if token_id in self.silent_ids else self.backend.id_to_token(token_id)
            piece = b"" if token is None else self._bytes_of_token(token)
            self.known[token_id] = piece
        return piece

    def _bytes_of_token(self, token: str) -> bytes:
        if self.byte_level:
            # Added tokens are plain text and may use characters that stand for no byte.
            known = all(character in BYTE_OF for character in token)
            return bytes(BYTE_OF[character] for character in token) if known else token.encode()
        if byte := _BYTE_PIECE.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace(_SPACE_PIECE, " ").encode()


class Detokenizer:
    """The text of one output as it grows. What ``push`` and at last ``flush`` return, joined, is the whole text."""

    __slots__ = ("_at_start", "_decoder", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, continuing: bool) -> None:
        self._vocabulary = vocabulary
        self._at_start = vocabulary.strips_space and not continuing
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that is certain now; the start of a character that is not whole yet waits."""
        return self._trimmed(self._decoder.decode(self._vocabulary.bytes_of(token_id)))

    def flush(self) -> str:
        """What still waits, when no more tokens come."""
        return self._trimmed(self._decoder.decode(b"", final=True))

    def _trimmed(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
