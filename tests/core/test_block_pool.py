"""Blocks are held, cached or free; what is cached is found by id, and the leaf goes before its parent."""

import pytest

from kvoy.core.block_pool import BlockPool
from kvoy.core.errors import InvariantError

A, B, C, D = (bytes([n]) * 16 for n in range(1, 5))


def fill(pool, handle, ids):
    for index, block_id in enumerate(ids):
        pool.register(handle, index, block_id, ids[index - 1] if index else b"")


def cache(pool, ids):
    """Leave these blocks as prefix cache."""
    handle, _ = pool.allocate(len(ids), ids)
    fill(pool, handle, ids)
    pool.free(handle)
    pool.check()


def counts(pool):
    return pool.used, pool.cached, pool.available


def test_a_handle_is_freed_exactly_once():
    pool = BlockPool(4)
    handle, matched = pool.allocate(3)
    assert (handle.table, matched) == ([0, 1, 2], 0)
    assert counts(pool) == (3, 0, 1)
    pool.free(handle)
    assert counts(pool) == (0, 0, 4)
    for misuse in (lambda: pool.free(handle), lambda: pool.extend(handle, 1), lambda: pool.share(handle, 0, 1)):
        with pytest.raises(InvariantError, match="has been freed"):
            misuse()


def test_what_cannot_be_had_changes_nothing():
    pool = BlockPool(4)
    handle, _ = pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.allocate(1, keep_available=1) is None
    assert not pool.extend(handle, 2)
    assert counts(pool) == (3, 0, 1)
    assert pool.extend(handle, 1)
    assert handle.table == [0, 1, 2, 3]
    pool.check()


def test_the_longest_prefix_that_is_here_is_shared_and_pinned():
    pool = BlockPool(6)
    cache(pool, [A, B])
    assert pool.match([A, B, C]) == 2
    assert pool.match([B]) == 1
    assert pool.match([C, A]) == 0
    one, matched = pool.allocate(3, [A, B, C])
    two, also = pool.allocate(3, [A, B])
    assert (matched, also) == (2, 2)
    assert one.table[:2] == two.table[:2] == [0, 1]
    assert counts(pool) == (4, 0, 2)
    pool.free(one)
    assert pool.used == 3
    assert pool.allocate(4) is None
    pool.check()


def test_a_prefix_longer_than_what_is_asked_for_is_cut():
    pool = BlockPool(4)
    cache(pool, [A, B, C])
    handle, matched = pool.allocate(2, [A, B, C])
    assert (len(handle), matched) == (2, 2)


def test_cached_blocks_count_as_room_but_pinning_takes_it():
    pool = BlockPool(4)
    cache(pool, [A, B, C])
    assert pool.available == 4
    assert pool.allocate(5, [A, B, C]) is None
    assert pool.allocate(4, [A, B, C], keep_available=1) is None
    handle, matched = pool.allocate(4, [A, B, C])
    assert (matched, pool.available) == (3, 0)
    assert handle.table == [0, 1, 2, 3]


def test_the_leaf_goes_before_its_parent_and_the_longest_unused_chain_first():
    pool = BlockPool(4)
    cache(pool, [A, B])
    cache(pool, [C, D])
    cache(pool, [A])
    pool.take_changes()
    gone = []
    for _ in range(4):
        handle, _ = pool.allocate(1)
        gone += pool.take_changes()[1]
        pool.check()
    assert gone == [B, D, C, A]
    assert handle is not None


def test_two_that_computed_the_same_keep_it_once():
    pool = BlockPool(6)
    one, _ = pool.allocate(2)
    two, _ = pool.allocate(2)
    fill(pool, one, [A, B])
    fill(pool, two, [A])
    assert two.table == [0, 3]
    assert pool.used == 3
    fill(pool, two, [A, B])
    assert two.table == one.table
    pool.free(one)
    pool.free(two)
    assert counts(pool) == (0, 2, 6)
    pool.check()


def test_registering_twice_is_harmless_out_of_order_is_a_bug():
    pool = BlockPool(3)
    handle, _ = pool.allocate(2)
    with pytest.raises(InvariantError, match="ahead of it"):
        pool.register(handle, 1, B, A)
    fill(pool, handle, [A])
    fill(pool, handle, [A, B])
    with pytest.raises(InvariantError, match="second id"):
        pool.register(handle, 1, C, A)
    pool.check()


def test_a_share_outlives_its_handle():
    pool = BlockPool(3)
    handle, _ = pool.allocate(3)
    pin = pool.share(handle, 1, 1)
    pool.free(handle)
    assert (pin.table, pool.used) == ([1], 1)
    pool.free(pin)
    assert counts(pool) == (0, 0, 3)


def test_only_unregistered_blocks_that_exist_are_shared():
    pool = BlockPool(3)
    handle, _ = pool.allocate(2)
    fill(pool, handle, [A])
    for first, blocks in ((0, 1), (1, 2)):
        with pytest.raises(InvariantError, match="cannot be shared"):
            pool.share(handle, first, blocks)


def test_changes_that_cancel_out_are_not_told():
    pool = BlockPool(2)
    cache(pool, [A, B])
    assert pool.take_changes() == ((A, B), ())
    first, _ = pool.allocate(2)
    pool.free(first)
    cache(pool, [A, C])
    assert pool.take_changes() == ((C,), (B,))
    second, _ = pool.allocate(2)
    pool.free(second)
    assert pool.take_changes() == ((), (C, A))
    assert pool.find_exact(A) is None


@pytest.mark.parametrize(
    "broken",
    [
        lambda pool: pool._free.append(0),
        lambda pool: pool._holders.__setitem__(1, 5),
        lambda pool: pool._cached.clear(),
        lambda pool: pool._block_of.pop(A),
        lambda pool: pool._parent_of.__setitem__(A, D),
        lambda pool: pool._id_of.pop(1),
    ],
)
def test_check_sees_what_does_not_add_up(broken):
    pool = BlockPool(4)
    cache(pool, [A, B])
    pool.allocate(1)
    pool.check()
    broken(pool)
    with pytest.raises(InvariantError):
        pool.check()
