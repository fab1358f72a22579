"""The staging slab: shared, sized alike at both ends, nameless, gone when closed."""

import os
import subprocess
import sys

import pytest

from kvoy.core.errors import InvariantError
from kvoy.core.types import KvDtype, KvSpec
from kvoy.engine import slab as slab_module
from kvoy.engine.slab import DEFAULT_SLOT_BYTES, Slab, nameless_file, slot_bytes

SPEC = KvSpec(layers=3, kv_heads=2, head_dim=8, block_tokens=4, dtype=KvDtype.FP32)


@pytest.fixture(params=["memory file", "temporary file"])
def fd(request, monkeypatch, tmp_path):
    if request.param == "temporary file":
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.setattr(slab_module.tempfile, "tempdir", str(tmp_path))
    descriptor = nameless_file()
    assert list(tmp_path.iterdir()) == []
    return descriptor


def test_slots_are_zero_at_first_and_do_not_overlap(fd):
    slab = Slab(fd, slots=3, slot_bytes=100)
    assert bytes(slab.slot(1)) == bytes(100)
    slab.slot(1)[:] = b"\x07" * 100
    assert bytes(slab.slot(0)) == bytes(slab.slot(2)) == bytes(100)
    for outside in (-1, 3):
        with pytest.raises(InvariantError):
            slab.slot(outside)
    slab.close()


def test_another_process_that_inherits_the_file_sees_the_same_bytes(fd):
    inherited = os.dup(fd)
    slab = Slab(fd, slots=2, slot_bytes=64)
    slab.slot(0)[:5] = b"there"
    child = (
        "import sys; from kvoy.engine.slab import Slab; slab = Slab(int(sys.argv[1]), 2, 64);"
        "assert bytes(slab.slot(0)[:5]) == b'there'; slab.slot(1)[:4] = b'back'"
    )
    subprocess.run([sys.executable, "-c", child, str(inherited)], pass_fds=[inherited], check=True)
    os.close(inherited)
    assert bytes(slab.slot(1)[:4]) == b"back"
    slab.close()


def test_slots_that_are_held_outlive_close_which_may_be_called_twice(fd):
    slab = Slab(fd, slots=2, slot_bytes=64)
    held = slab.slot(1)
    held[:4] = b"held"
    slab.close()
    slab.close()
    assert bytes(held[:4]) == b"held"
    with pytest.raises(ValueError, match="released"):
        slab.slot(0)


def test_a_child_that_is_not_meant_to_inherit_it_does_not(fd):
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_the_slot_size_is_whole_layers_or_by_default_whole_blocks_of_two_mebibytes():
    default = slot_bytes(0, SPEC)
    assert default % SPEC.block_bytes == 0
    assert DEFAULT_SLOT_BYTES <= default < DEFAULT_SLOT_BYTES + SPEC.block_bytes
    assert slot_bytes(SPEC.block_bytes, SPEC) == SPEC.block_bytes
    assert slot_bytes(SPEC.layer_bytes * 2 + 1, SPEC) == SPEC.layer_bytes * 2
    assert slot_bytes(1, SPEC) == SPEC.layer_bytes
