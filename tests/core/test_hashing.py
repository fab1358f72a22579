"""Block ids are the same everywhere, and no two different blocks share one."""

import pytest

from kvoy.core.errors import InvariantError
from kvoy.core.hashing import block_ids


def ids(tokens, block_tokens=4, fingerprint="f", salt="", parent=b""):
    return block_ids(tokens, block_tokens, fingerprint, salt, parent=parent)


def test_ids_are_the_same_in_every_process_and_release():
    assert [block_id.hex() for block_id in ids(range(8), salt="tenant")] == [
        "7d717d439db8cd1e6cca38844c9072b6",
        "392e3d26110c3241d43fb8b23d2f9750",
    ]


def test_only_full_blocks_have_ids():
    assert ids(range(3)) == []
    assert len(ids(range(4))) == len(ids(range(7))) == 1
    assert ids(range(11)) == ids(range(8))


def test_an_id_names_all_tokens_before_it():
    one, two = ids([1, 2, 3, 4, 5, 6, 7, 8]), ids([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[1] != two[1]


def test_the_next_turn_goes_on_from_a_parent():
    whole = ids(range(16))
    assert ids(range(8, 16), parent=whole[1]) == whole[2:]


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "g"},
        {"salt": "s"},
        {"fingerprint": "", "salt": "f"},
        {"parent": bytes(16)},
        {"block_tokens": 2},
    ],
)
def test_every_part_of_the_key_counts(other):
    assert ids(range(4), **other)[-1] != ids(range(4))[-1]


def test_parts_cannot_run_into_each_other():
    assert ids(range(4), fingerprint="ab", salt="c") != ids(range(4), fingerprint="a", salt="bc")
    assert ids([1, 256]) == ids([1, 256, 5])
    assert ids([1, 2, 3, 4]) != ids([1 + (2 << 8), 0, 3, 4])


def test_a_parent_that_is_no_id_is_a_bug():
    with pytest.raises(InvariantError):
        ids(range(4), parent=b"short")
