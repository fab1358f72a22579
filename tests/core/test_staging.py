"""A slot is free when its last use ends; an order is answered once; the earliest time comes first."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy.core.deadlines import Deadlines
from kvoy.core.errors import InvariantError
from kvoy.core.staging import Slots, Transfers, Use


def test_a_slot_with_two_uses_is_free_after_both():
    slots = Slots(2)
    slot = slots.take(Use.EXPORT)
    slots.add(slot, Use.SEND)
    slots.add(slot, Use.PUT)
    assert not slots.end(slot, Use.EXPORT)
    assert not slots.end(slot, Use.PUT)
    assert slots.used == 1
    assert slots.end(slot, Use.SEND)
    assert slots.free == 2
    slots.check()


def test_the_lowest_free_slot_is_taken():
    slots = Slots(3)
    taken = [slots.take(Use.FETCH) for _ in range(3)]
    assert taken == [0, 1, 2]
    slots.end(2, Use.FETCH)
    slots.end(0, Use.FETCH)
    assert slots.take(Use.IMPORT) == 0


def test_misuse_of_a_slot_is_a_bug():
    slots = Slots(1)
    with pytest.raises(InvariantError, match="while it is free"):
        slots.add(0, Use.SEND)
    with pytest.raises(InvariantError, match="not in use"):
        slots.end(0, Use.SEND)
    slots.take(Use.EXPORT)
    with pytest.raises(InvariantError, match="not in use"):
        slots.end(0, Use.ACK)
    with pytest.raises(InvariantError, match="none is free"):
        slots.take(Use.EXPORT)


def test_an_order_is_answered_exactly_once():
    ids = count(1)
    exports, puts = Transfers(ids), Transfers(ids)
    first, second = exports.begin("one"), puts.begin("two")
    assert (first, second) == (1, 2)
    assert exports.end(first) == "one"
    with pytest.raises(InvariantError, match="no such transfer"):
        exports.end(first)
    with pytest.raises(InvariantError, match="no such transfer"):
        exports.end(second)
    assert list(puts) == ["two"]


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 50)), max_size=300))
def test_deadlines_are_a_sorted_table(changes):
    deadlines, model = Deadlines(), {}
    for key, at in changes:
        deadlines.set(key, at)
        model.pop(key, None)
        if at is not None:
            model[key] = at
        assert deadlines.next == min(model.values(), default=None)
    due = []
    while (key := deadlines.pop_due(25)) is not None:
        due.append(key)
    assert due == [key for key, at in sorted(model.items(), key=lambda item: item[1]) if at <= 25]
    assert deadlines.next == min((at for at in model.values() if at > 25), default=None)
