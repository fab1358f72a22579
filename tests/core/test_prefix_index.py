"""The prefix index follows events, forgets where they are missing, and stays within its bound."""

from hypothesis import given
from hypothesis import strategies as st

from kvoy.core.prefix_index import PrefixIndex
from kvoy.core.types import BlockEvent

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


def event(pod: str, seq: int, stored: tuple[bytes, ...] = (), removed: tuple[bytes, ...] = (), generation: int = 1):  # type: ignore[no-untyped-def]
    return BlockEvent(pod, generation, seq, stored, removed)


def test_it_counts_leading_blocks_for_each_pod() -> None:
    index = PrefixIndex(100)
    index.apply(event("p", 1, (A, B, C)))
    index.apply(event("q", 1, (A, C)))
    assert index.match((A, B, C)) == {"p": 3, "q": 1}
    assert index.match((B, C)) == {"p": 2}
    assert index.match((D, A)) == {}
    assert index.match(()) == {}


def test_removed_blocks_are_gone() -> None:
    index = PrefixIndex(100)
    index.apply(event("p", 1, (A, B)))
    index.apply(event("p", 2, (), (A,)))
    assert index.match((A, B)) == {}
    assert index.match((B,)) == {"p": 1}


def test_a_missing_event_forgets_what_was_known_but_takes_what_is_told() -> None:
    index = PrefixIndex(100)
    index.apply(event("p", 1, (A, B)))
    index.apply(event("p", 3, (C,)))
    assert index.gaps == 1
    assert index.match((A,)) == {}
    assert index.match((C,)) == {"p": 1}
    index.apply(event("p", 4, (A,)))
    assert index.gaps == 1
    assert index.match((A,)) == {"p": 1}


def test_a_pod_that_started_again_starts_from_nothing() -> None:
    index = PrefixIndex(100)
    index.apply(event("p", 5, (A,), generation=1))
    index.apply(event("p", 1, (B,), generation=2))
    assert index.gaps == 0
    assert index.match((A,)) == {}
    assert index.match((B,)) == {"p": 1}
    index.apply(event("p", 6, (A,), generation=1))
    assert index.match((A,)) == {}, "a late event of the earlier start"


def test_an_event_told_twice_changes_nothing() -> None:
    index = PrefixIndex(100)
    index.apply(event("p", 1, (A,)))
    index.apply(event("p", 2, (), (A,)))
    index.apply(event("p", 1, (A,)))
    assert index.match((A,)) == {}


def test_a_forgotten_pod_may_come_back() -> None:
    index = PrefixIndex(100)
    index.apply(event("p", 1, (A,)))
    index.forget("p")
    index.forget("p")
    assert (len(index), index.match((A,))) == (0, {})
    index.apply(event("p", 2, (B,)))
    assert index.match((B,)) == {"p": 1}


def test_past_its_bound_the_largest_pod_forgets_its_oldest() -> None:
    index = PrefixIndex(3)
    index.apply(event("p", 1, (A, B, C)))
    index.apply(event("q", 1, (A,)))
    assert len(index) == 3
    assert index.match((A,)) == {"q": 1}
    assert index.match((B, C)) == {"p": 2}


pods = st.sampled_from(["p", "q", "r"])
blocks = st.lists(st.sampled_from([A, B, C, D]), max_size=4).map(tuple)
events = st.builds(event, pods, st.integers(1, 6), blocks, blocks, st.integers(1, 3))


@given(st.lists(events, max_size=40), st.integers(1, 6), blocks)
def test_both_directions_agree_and_matches_are_prefixes(told: list[BlockEvent], bound: int, chain: tuple[bytes, ...]):  # type: ignore[no-untyped-def]
    index = PrefixIndex(bound)
    for each in told:
        index.apply(each)
        index.check()
    for pod_id, depth in index.match(chain).items():
        assert all(index.match((block_id,)).get(pod_id) for block_id in chain[:depth])
        if depth < len(chain):
            assert pod_id not in index.match((chain[depth],))
