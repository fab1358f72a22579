"""Ids to text, one at a time: the pieces joined are the whole, for every kind of vocabulary and every order of ids."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from kvoy.engine.detokenizer import BYTE_OF, Detokenizer, Vocabulary

SPECIAL = AddedToken("<s>", special=True, normalized=False)
THINK = AddedToken("<think> ok", normalized=False)
PIECES = ["\u2581", "\u2581he", "llo", "\u2581\u2581", "x\u2581y", "\u00e9", "a"]


def byte_level() -> tokenizers.Tokenizer:
    tokens = [*BYTE_OF, "he", "\u0120wor", "\u00e6\u0139"]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([SPECIAL, THINK])
    return backend


def sentencepiece(*tail: decoders.Decoder) -> tokenizers.Tokenizer:
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    replace = decoders.Replace("\u2581", " ")
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *tail])
    backend.add_tokens([SPECIAL, THINK])
    return backend


BYTE_LEVEL = byte_level()
WITH_STRIP = sentencepiece(decoders.Strip(" ", 1, 0))
WITHOUT_STRIP = sentencepiece()
BACKENDS = [BYTE_LEVEL, WITH_STRIP, WITHOUT_STRIP]


def vocabulary(backend: tokenizers.Tokenizer) -> Vocabulary:
    return Vocabulary.of(backend, {backend.token_to_id("<s>")}, "test")


def streamed(backend: tokenizers.Tokenizer, ids: list[int], *, continuing: bool = False) -> str:
    detokenizer = Detokenizer(vocabulary(backend), continuing=continuing)
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


@given(st.lists(st.integers(0, 262)))
def test_bytes_in_any_order_decode_as_the_library_does(ids: list[int]) -> None:
    assert streamed(BYTE_LEVEL, ids) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("backend", [WITH_STRIP, WITHOUT_STRIP])
@given(st.lists(st.one_of(st.characters(codec="utf-8"), st.integers(256, 264)), max_size=30))
def test_characters_spelled_in_bytes_decode_as_the_library_does(
    backend: tokenizers.Tokenizer, parts: list[str | int]
) -> None:
    ids = [one for part in parts for one in ([part] if isinstance(part, int) else part.encode())]
    assert streamed(backend, ids) == backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("backend", BACKENDS)
@given(st.lists(st.integers(0, 300)))
def test_only_whole_characters_are_pushed(backend: tokenizers.Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(vocabulary(backend), continuing=False)
    pushed = ""
    for count, token_id in enumerate(ids, 1):
        pushed += detokenizer.push(token_id)
        assert streamed(backend, ids[:count]).startswith(pushed)
    assert pushed + detokenizer.flush() == streamed(backend, ids)


def test_a_character_waits_until_it_is_whole() -> None:
    detokenizer = Detokenizer(vocabulary(WITHOUT_STRIP), continuing=False)
    assert [detokenizer.push(byte) for byte in "\U0001f642!".encode()] == ["", "", "", "\U0001f642", "!"]
    assert detokenizer.push(0xE6) == ""
    assert detokenizer.flush() == "\ufffd"


def test_whole_characters_beside_a_broken_one_stay_whole() -> None:
    assert streamed(WITHOUT_STRIP, [*"\u00e9".encode(), 0xFF, *"\u00e9".encode()]) == "\u00e9\ufffd\u00e9"


def test_special_tokens_have_no_text_and_do_not_break_characters() -> None:
    special = BYTE_LEVEL.token_to_id("<s>")
    first, second = (BYTE_LEVEL.token_to_id(character) for character in ("\u00c3", "\u00a9"))
    assert streamed(BYTE_LEVEL, [special, first, special, second, 9999]) == "\u00e9"


def test_added_tokens_are_plain_text() -> None:
    assert streamed(BYTE_LEVEL, [BYTE_LEVEL.token_to_id("<think> ok")]) == "<think> ok"


def test_the_first_space_is_dropped_at_the_start_of_a_text_only() -> None:
    he, spaces = WITH_STRIP.token_to_id("\u2581he"), WITH_STRIP.token_to_id("\u2581\u2581")
    assert streamed(WITH_STRIP, [he, he]) == "he he"
    assert streamed(WITH_STRIP, [spaces, he]) == "  he"
    assert streamed(WITH_STRIP, [he, he], continuing=True) == " he he"
    assert streamed(WITHOUT_STRIP, [he]) == " he"


@pytest.mark.parametrize(("scheme", "text"), [("first", "he he"), ("always", "he he"), ("never", " he he")])
def test_metaspace_vocabularies(scheme: str, text: str) -> None:
    backend = sentencepiece()
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    he = backend.token_to_id("\u2581he")
    assert streamed(backend, [he, he]) == backend.decode([he, he]) == text


def test_a_long_broken_run_costs_no_more_per_token_and_keeps_nothing_back() -> None:
    detokenizer = Detokenizer(vocabulary(WITHOUT_STRIP), continuing=False)
    pieces = [detokenizer.push(0x80) for _ in range(1000)]
    assert pieces == ["\ufffd"] * 1000
