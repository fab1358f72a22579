"""A block pool under any order of use: it agrees with a model that only counts, and never evicts a parent first."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvoy.core.block_pool import BlockPool

TOTAL = 7
CHAINS = [[bytes([chain, depth]) for depth in range(5)] for chain in range(3)]


class Pool(RuleBasedStateMachine):
    """Handles on chains of blocks; ``known`` is what Announce would have told the world."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.handles = []
        self.known = set()

    @rule(chain=st.sampled_from(CHAINS), blocks=st.integers(0, 6), keep=st.integers(0, 3))
    def allocate(self, chain, blocks, keep):
        available, matchable = self.pool.available, self.pool.match(chain[:blocks])
        allocated = self.pool.allocate(blocks, chain, keep)
        if allocated is None:
            assert self.pool.available == available
            assert available - blocks < keep or available < blocks
            return
        handle, matched = allocated
        assert (len(handle), matched) == (blocks, matchable)
        assert self.pool.available >= keep
        self.handles.append((handle, chain, [matched]))

    @rule(pick=st.integers(0, 9), more=st.integers(1, 3))
    def extend(self, pick, more):
        if self.handles:
            handle, _, _ = self.handles[pick % len(self.handles)]
            available, before = self.pool.available, list(handle.table)
            assert self.pool.extend(handle, more) == (more <= available)
            assert handle.table[: len(before)] == before

    @rule(pick=st.integers(0, 9))
    def register_next(self, pick):
        if self.handles:
            handle, chain, filled = self.handles[pick % len(self.handles)]
            index = filled[0]
            if index < min(len(handle), len(chain)):
                self.pool.register(handle, index, chain[index], chain[index - 1] if index else b"")
                filled[0] += 1
                assert self.pool.find_exact(chain[index]) == handle.table[index]

    @rule(pick=st.integers(0, 9))
    def share(self, pick):
        if self.handles:
            handle, chain, filled = self.handles[pick % len(self.handles)]
            if len(handle) > max(filled[0], len(chain)):
                pin = self.pool.share(handle, len(handle) - 1, 1)
                self.handles.append((pin, [], [0]))

    @rule(pick=st.integers(0, 9))
    def free(self, pick):
        if self.handles:
            handle, _, _ = self.handles.pop(pick % len(self.handles))
            self.pool.free(handle)

    @rule()
    def announce(self):
        stored, removed = self.pool.take_changes()
        assert self.known.isdisjoint(stored)
        assert self.known.issuperset(removed)
        self.known = (self.known | set(stored)) - set(removed)
        assert self.known == {
            block_id for chain in CHAINS for block_id in chain if self.pool.find_exact(block_id) is not None
        }
        for chain in CHAINS:
            assert len(self.known & set(chain)) == self.pool.match(chain), "a chain lost its middle"

    @invariant()
    def adds_up(self):
        self.pool.check()
        held = {block for handle, _, _ in self.handles for block in handle.table}
        assert self.pool.used == len(held)

    def teardown(self):
        for handle, _, _ in self.handles:
            self.pool.free(handle)
        self.pool.check()
        assert (self.pool.used, self.pool.available) == (0, TOTAL)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
