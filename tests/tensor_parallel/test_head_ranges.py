"""Shares of heads, and the plan between two pods of different degree: every head once, from one who has it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy.core.errors import InvariantError
from kvoy.core.head_ranges import HeadRange, HeadTransfer, head_transfers, owned_heads

HEADS, DEGREES = st.integers(1, 40), st.integers(1, 16)


def heads_of(owned: HeadRange) -> range:
    return range(owned.first, owned.end)


@given(kv_heads=HEADS, degree=DEGREES)
def test_shares_are_even_and_cover_all_heads_in_order(kv_heads, degree):
    shares = [owned_heads(kv_heads, rank, degree) for rank in range(degree)]
    owners = Counter(head for share in shares for head in heads_of(share))
    assert sorted(owners) == list(range(kv_heads))
    assert [share.first for share in shares] == sorted(share.first for share in shares)
    sizes = {share.heads for share in shares}
    assert max(sizes) - min(sizes) <= 1
    assert max(owners.values()) - min(owners.values()) <= (degree > kv_heads)
    if degree <= kv_heads:
        assert set(owners.values()) == {1}
    else:
        assert sizes == {1}
        assert [share.first for share in shares] == [rank * kv_heads // degree for rank in range(degree)]


@given(kv_heads=HEADS, sender_degree=DEGREES, receiver_degree=DEGREES)
def test_every_receiver_gets_each_of_its_heads_once_from_one_who_has_it(kv_heads, sender_degree, receiver_degree):
    transfers = head_transfers(kv_heads, sender_degree, receiver_degree)
    for receiver in range(receiver_degree):
        got = [head for one in transfers if one.receiver == receiver for head in heads_of(one.range)]
        assert got == list(heads_of(owned_heads(kv_heads, receiver, receiver_degree)))
    for one in transfers:
        has = owned_heads(kv_heads, one.sender, sender_degree)
        assert has.first <= one.range.first < one.range.end <= has.end
    pairs = [(one.sender, one.receiver, one.range.first) for one in transfers]
    assert len(pairs) == len(set(pairs))


@given(kv_heads=HEADS, sender_degree=DEGREES, receiver_degree=DEGREES)
def test_ranks_that_have_the_same_head_share_its_sending(kv_heads, sender_degree, receiver_degree):
    sent = Counter()
    for one in head_transfers(kv_heads, sender_degree, receiver_degree):
        sent[one.sender] += one.range.heads
    for head in range(kv_heads if sender_degree > kv_heads else 0):
        owners = [rank for rank in range(sender_degree) if owned_heads(kv_heads, rank, sender_degree).first == head]
        loads = [sent[rank] for rank in owners]
        assert max(loads) - min(loads) <= 1


@given(kv_heads=HEADS, degree=DEGREES)
def test_ranks_of_equal_degree_send_to_their_like(kv_heads, degree):
    expected = [HeadTransfer(rank, rank, owned_heads(kv_heads, rank, degree)) for rank in range(degree)]
    assert head_transfers(kv_heads, degree, degree) == expected


def test_three_heads_go_from_two_ranks_to_four_in_one_piece_where_they_can():
    assert head_transfers(3, 2, 4) == [
        HeadTransfer(0, 0, HeadRange(0, 1)),
        HeadTransfer(0, 1, HeadRange(0, 1)),
        HeadTransfer(1, 2, HeadRange(1, 1)),
        HeadTransfer(1, 3, HeadRange(2, 1)),
    ]
    assert head_transfers(8, 4, 1) == [HeadTransfer(rank, 0, HeadRange(2 * rank, 2)) for rank in range(4)]
    assert head_transfers(8, 1, 2) == [HeadTransfer(0, rank, HeadRange(4 * rank, 4)) for rank in range(2)]


@pytest.mark.parametrize(("kv_heads", "rank", "degree"), [(0, 0, 1), (4, 2, 2), (4, -1, 2), (4, 0, 0)])
def test_a_rank_that_is_not_there_has_no_share(kv_heads, rank, degree):
    with pytest.raises(InvariantError):
        owned_heads(kv_heads, rank, degree)
