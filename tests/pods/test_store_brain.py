"""StoreBrain against a naive model: same blocks kept, same victims, every byte accounted for after every call."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvoy.core.errors import InvariantError
from kvoy.core.store import NotTaken, Pin, StoreBrain, StoreKey, Writing
from kvoy.core.types import KvDtype, KvSpec

SPEC = KvSpec(layers=1, kv_heads=1, head_dim=1, block_tokens=4, dtype=KvDtype.FP32)
KEY = StoreKey("f", SPEC)
BLOCK = 100
ROOM = 5

chains = st.text("ab", min_size=1, max_size=5).map(lambda path: [path[: n + 1].encode() for n in range(len(path))])


@dataclass
class Entry:
    """What the model knows of one block; its parent is its id without the last letter."""

    used: int
    written: bool = False
    pins: int = 0


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.brain = StoreBrain(ROOM * BLOCK)
        self.model: dict[bytes, Entry] = {}
        self.turn = 0
        self.writing: list[Writing] = []
        self.pins: list[Pin] = []
        self.ghosts: list[Pin] = []

    def next_turn(self) -> int:
        self.turn += 1
        return self.turn

    def leading(self, chain: list[bytes]) -> list[bytes]:
        found = []
        for block_id in chain:
            if block_id not in self.model or not self.model[block_id].written:
                break
            found.append(block_id)
        return found

    def victim(self, spare: bytes) -> bytes | None:
        leaves = [
            (entry.used, block_id)
            for block_id, entry in self.model.items()
            if entry.written
            and not entry.pins
            and block_id != spare[:-1]
            and not any(other[:-1] == block_id for other in self.model)
        ]
        return min(leaves)[1] if leaves else None

    @rule(chain=chains)
    def reserve_last(self, chain: list[bytes]) -> None:
        block_id, parent = chain[-1], chain[-1][:-1]
        outcome = self.brain.reserve(KEY, block_id, parent, BLOCK)
        if block_id in self.model:
            assert outcome is NotTaken.KNOWN
            self.model[block_id].used = self.next_turn()
            return
        if len(self.model) + len(self.ghost_serials()) == ROOM:
            victim = self.victim(block_id)
            if victim is None:
                assert outcome is NotTaken.NO_ROOM
                return
            del self.model[victim]
        assert isinstance(outcome, Writing)
        self.model[block_id] = Entry(self.next_turn())
        self.writing.append(outcome)

    def ghost_serials(self) -> set[int]:
        return {pin.serial for pin in self.ghosts}

    @precondition(lambda self: self.writing)
    @rule(which=st.integers(0, 9))
    def commit(self, which: int) -> None:
        writing = self.writing.pop(which % len(self.writing))
        self.brain.commit(writing, checksum=hash(writing.block_id) % 1000)
        self.model[writing.block_id].written = True

    @precondition(lambda self: self.writing)
    @rule(which=st.integers(0, 9))
    def abandon(self, which: int) -> None:
        writing = self.writing.pop(which % len(self.writing))
        self.brain.abandon(writing)
        del self.model[writing.block_id]

    @rule(chain=chains)
    def pin(self, chain: list[bytes]) -> None:
        found = self.leading(chain)
        pins = self.brain.pin(KEY, chain)
        assert [pin.block_id for pin in pins] == found
        assert [pin.checksum for pin in pins] == [hash(block_id) % 1000 for block_id in found]
        for block_id in reversed(found):
            self.model[block_id].pins += 1
            self.model[block_id].used = self.next_turn()
        self.pins += pins

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 9))
    def unpin(self, which: int) -> None:
        pin = self.pins.pop(which % len(self.pins))
        self.brain.unpin(pin)
        if pin in self.ghosts:
            self.ghosts.remove(pin)
        else:
            self.model[pin.block_id].pins -= 1

    @precondition(lambda self: self.pins)
    @rule(which=st.integers(0, 9))
    def drop(self, which: int) -> None:
        pin = self.pins[which % len(self.pins)]
        self.brain.drop(pin)
        if pin not in self.ghosts:
            del self.model[pin.block_id]
            self.ghosts += [other for other in self.pins if other.serial == pin.serial]

    @rule(chain=chains)
    def look_up(self, chain: list[bytes]) -> None:
        assert self.brain.lookup(KEY, chain) == len(self.leading(chain))
        assert self.brain.lookup(StoreKey("another", SPEC), chain) == 0

    @invariant()
    def holds(self) -> None:
        self.brain.check()
        written = [block_id for block_id, entry in self.model.items() if entry.written]
        assert self.brain.counters.blocks == len(written)
        assert self.brain.load.blocks_cached == len(written)


StoreMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestStoreBrain = StoreMachine.TestCase


class MixedSizes(RuleBasedStateMachine):
    """Blocks of several models in one slab: nothing overlaps, nothing is lost, all of it comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.brain = StoreBrain(1000)
        self.pins: list[Pin] = []

    @rule(name=st.integers(0, 20), length=st.sampled_from([30, 100, 310]))
    def put(self, name: int, length: int) -> None:
        writing = self.brain.reserve(StoreKey(str(length), SPEC), bytes([name]), b"", length)
        if isinstance(writing, Writing):
            self.brain.commit(writing, 0)

    @rule(name=st.integers(0, 20), length=st.sampled_from([30, 100, 310]))
    def pin(self, name: int, length: int) -> None:
        self.pins += self.brain.pin(StoreKey(str(length), SPEC), [bytes([name])])

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.brain.unpin(self.pins.pop(0))

    @invariant()
    def holds(self) -> None:
        self.brain.check()

    def teardown(self) -> None:
        for pin in self.pins:
            self.brain.unpin(pin)
        assert isinstance(self.brain.reserve(KEY, b"all", b"", 1000), Writing)
        assert self.brain.counters.blocks == 0


MixedSizes.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestMixedSizes = MixedSizes.TestCase


def put(brain: StoreBrain, block_id: bytes, parent_id: bytes = b"", length: int = BLOCK) -> None:
    writing = brain.reserve(KEY, block_id, parent_id, length)
    assert isinstance(writing, Writing)
    brain.commit(writing, 0)


def test_a_chain_longer_than_the_slab_keeps_its_head() -> None:
    brain = StoreBrain(3 * BLOCK)
    for n in range(3):
        put(brain, b"%d" % n, b"%d" % (n - 1) if n else b"")
    assert brain.reserve(KEY, b"3", b"2", BLOCK) is NotTaken.NO_ROOM
    assert brain.lookup(KEY, [b"0", b"1", b"2", b"3"]) == 3


def test_what_is_being_written_is_not_found() -> None:
    brain = StoreBrain(3 * BLOCK)
    writing = brain.reserve(KEY, b"0", b"", BLOCK)
    assert isinstance(writing, Writing)
    assert brain.lookup(KEY, [b"0"]) == 0
    brain.commit(writing, 7)
    assert [pin.checksum for pin in brain.pin(KEY, [b"0"])] == [7]


def test_a_block_larger_than_the_slab_evicts_nobody() -> None:
    brain = StoreBrain(3 * BLOCK)
    put(brain, b"0")
    assert brain.reserve(KEY, b"1", b"", 4 * BLOCK) is NotTaken.NO_ROOM
    assert brain.reserve(KEY, b"1", b"", 0) is NotTaken.NO_ROOM
    assert brain.lookup(KEY, [b"0"]) == 1
    assert brain.counters.refused_blocks == 2


def test_ending_a_handle_twice_is_a_bug() -> None:
    brain = StoreBrain(3 * BLOCK)
    put(brain, b"0")
    (pin,) = brain.pin(KEY, [b"0"])
    brain.unpin(pin)
    with pytest.raises(InvariantError):
        brain.unpin(pin)
    writing = brain.reserve(KEY, b"1", b"0", BLOCK)
    assert isinstance(writing, Writing)
    brain.abandon(writing)
    with pytest.raises(InvariantError):
        brain.commit(writing, 0)
