"""Text of an answer: whatever the token borders, what is shown is what a search in the whole text would show."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvoy.core.types import RequestOutput, TokenLogprob
from services.router.stops import StopFinder
from services.router.text import AnswerText, Piece


class Spelling:
    """A detokenizer whose tokens are indexes into a list of byte strings; holds back incomplete characters."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens = tokens
        self._left = b""

    def push(self, token_id: int) -> str:
        self._left += self._tokens[token_id]
        for end in range(len(self._left), 0, -1):
            try:
                text = self._left[:end].decode()
            except UnicodeDecodeError:
                continue
            self._left = self._left[end:]
            return text
        return ""

    def flush(self) -> str:
        left, self._left = self._left, b""
        return left.decode(errors="replace")


def shown_by_search(text: str, stops: list[str]) -> str:
    """The specification: cut at the match that ends first, and of those that end together at the longest."""
    matches = [
        (start + len(stop), start) for stop in stops for start in range(len(text)) if text.startswith(stop, start)
    ]
    return text[: min(matches)[1]] if matches else text


def play(tokens: list[bytes], stops: list[str], group: int = 1) -> tuple[list[Piece], AnswerText]:
    """Every piece of the answer, with ``group`` tokens in each output."""
    text = AnswerText(Spelling(tokens), stops)
    pieces = []
    for start in range(0, len(tokens), group):
        ids = tuple(range(start, min(start + group, len(tokens))))
        text.push(RequestOutput("r", ids, tuple(TokenLogprob(token_id, -1.0) for token_id in ids)))
        pieces.append(text.take())
        if text.stopped:
            return pieces, text
    text.end()
    pieces.append(text.take())
    return pieces, text


letters = st.text(alphabet="ab", min_size=1, max_size=5)


@given(
    st.text(alphabet="abc", max_size=40), st.lists(letters, max_size=4), st.lists(st.integers(1, 4)), st.integers(1, 3)
)
def test_what_is_shown_is_what_a_search_in_the_whole_text_shows(
    whole: str, stops: list[str], cuts: list[int], group: int
) -> None:
    tokens, left = [], whole
    for cut in [*cuts, len(whole)]:
        tokens.append(left[:cut].encode())
        left = left[cut:]
    pieces, text = play(tokens, stops, group)
    assert "".join(piece.text for piece in pieces) == shown_by_search(whole, stops)
    ids = [token_id for piece in pieces for token_id in piece.token_ids]
    assert ids == list(range(text.tokens))
    assert [logprob.token_id for piece in pieces for logprob in piece.logprobs] == ids


@given(st.text(alphabet="ab", max_size=30), st.lists(letters, max_size=3))
def test_no_shown_text_is_ever_taken_back_nor_held_without_need(whole: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    for end, char in enumerate(whole, start=1):
        if finder.feed(char):
            return
        read = whole[:end]
        doubtful = max((size for stop in stops for size in range(len(stop)) if read.endswith(stop[:size])), default=0)
        assert finder.held == doubtful


@given(st.text(max_size=12), st.data())
def test_characters_are_never_split(whole: str, data: st.DataObject) -> None:
    encoded = whole.encode(errors="ignore")
    borders = sorted(data.draw(st.sets(st.integers(0, len(encoded)))) | {0, len(encoded)})
    tokens = [encoded[start:end] for start, end in pairwise(borders)]
    pieces, text = play(tokens, [])
    assert "".join(piece.text for piece in pieces) == encoded.decode()
    assert text.tokens == len(tokens)
    assert not any("\ufffd" in piece.text for piece in pieces if "\ufffd" not in whole)


def test_each_piece_has_the_text_of_exactly_its_tokens() -> None:
    pieces, _ = play([b"one ", b"S", b"TO", b"RY", b" end"], ["STOP"])
    assert [(piece.text, piece.token_ids) for piece in pieces] == [
        ("one ", (0,)),
        ("", ()),
        ("", ()),
        ("STORY", (1, 2, 3)),
        (" end", (4,)),
        ("", ()),
    ]


def test_tokens_up_to_the_one_that_completes_the_stop_string_are_kept() -> None:
    pieces, text = play([b"a", b"bS", b"TOPx", b"never"], ["STOP"])
    assert pieces[-1].text == "b"
    assert pieces[-1].token_ids == (1, 2)
    assert (text.tokens, text.stopped) == (3, True)


def test_tokens_after_the_stop_string_in_the_same_output_are_dropped() -> None:
    pieces, text = play([b"a", b"STOP", b"more"], ["STOP"], group=3)
    assert pieces == [Piece("a", (0, 1), (TokenLogprob(0, -1.0), TokenLogprob(1, -1.0)))]
    assert text.tokens == 2


def test_the_text_of_the_last_token_is_not_shown_when_it_ends_the_answer() -> None:
    text = AnswerText(Spelling([b"hi", b"<end>"]), [])
    text.push(RequestOutput("r", (0, 1)), silent_last=True)
    text.end()
    assert text.take() == Piece("hi", (0, 1))


def test_an_incomplete_character_at_the_end_is_shown_as_such() -> None:
    pieces, _ = play([b"ok", b"\xe2\x82"], [])
    assert [piece.text for piece in pieces] == ["ok", "", "\ufffd"]


def test_what_looked_like_a_stop_string_is_shown_when_the_answer_ends() -> None:
    pieces, _ = play([b"x", b"STO"], ["STOP"])
    assert [(piece.text, piece.token_ids) for piece in pieces] == [("x", (0,)), ("", ()), ("STO", (1,))]
