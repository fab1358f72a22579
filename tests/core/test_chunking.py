"""What a step prefills: within the budget, in order of arrival, cut on block edges."""

from hypothesis import given
from hypothesis import strategies as st

from kvoy.core.chunking import Chunk, plan_chunks


def test_a_prompt_is_cut_on_block_edges_and_ends_where_it_ends():
    assert plan_chunks([(0, 10)], 8, 4) == [Chunk(0, 0, 8)]
    assert plan_chunks([(8, 10)], 8, 4) == [Chunk(0, 8, 10)]
    assert plan_chunks([(0, 10)], 7, 4) == [Chunk(0, 0, 4)]


def test_several_requests_share_a_step_in_order_of_arrival():
    assert plan_chunks([(8, 11), (0, 20), (0, 2)], 12, 4) == [Chunk(0, 8, 11), Chunk(1, 0, 8)]
    assert plan_chunks([(0, 3), (0, 3), (0, 3)], 8, 4) == [Chunk(0, 0, 3), Chunk(1, 0, 3)]


def test_a_short_rest_fills_what_a_longer_one_cannot_use():
    assert plan_chunks([(0, 6), (0, 9), (4, 6)], 8, 4) == [Chunk(0, 0, 6), Chunk(2, 4, 6)]


def test_nothing_wanted_is_nothing_planned():
    assert plan_chunks([], 8, 4) == []


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=6),
    st.integers(4, 32),
)
def test_the_first_always_gets_on_and_the_budget_holds(rests, budget):
    wanted = [(blocks * 4, blocks * 4 + tokens) for blocks, tokens in rests]
    chunks = plan_chunks(wanted, budget, 4)
    assert sum(chunk.end - chunk.start for chunk in chunks) <= budget
    assert [chunk.index for chunk in chunks] == sorted({chunk.index for chunk in chunks})
    if wanted:
        assert chunks[0].index == 0
    for chunk in chunks:
        start, end = wanted[chunk.index]
        assert chunk.start == start < chunk.end <= end
        assert chunk.end == end or chunk.end % 4 == 0
