"""One pod: its brain, the engine that obeys it, what it was told and what it has announced.

A killed pod is replaced by one that knows nothing. What orders to others do is theirs (``perform``); here are those to
the engine, and the staging slab: what is read from a slot or put there is a copy.
"""

from kvoy.core import events as ev


class Pod:
    def __init__(self, name, fresh_brain, fresh_engine, lanes, log, perform):
        self.name = name
        self._fresh_brain, self._fresh_engine = fresh_brain, fresh_engine
        self._lanes, self._log, self._perform = lanes, log, perform
        self._start()

    def _start(self):
        self.brain, self.engine = self._fresh_brain(), self._fresh_engine()
        self._announced = set()
        self._handled = []
        """(event, now, actions) of the brain."""

    def replace(self):
        """The pod is killed and another one takes its place."""
        self._lanes.drop(self._engine_lane)
        self._start()

    def tell(self, event):
        now = self._lanes.now
        self.engine.now = now
        self._log.append((self.name, event))
        actions = self.brain.handle(event, now)
        self._handled.append((event, now, actions))
        for action in actions:
            self._log.append((self.name, action))
            self._perform(action)
        self.brain.check()

    def tick(self):
        """Tell the brain if a deadline has come."""
        at = self.brain.next_deadline()
        if at is not None and at <= self._lanes.now:
            self.tell(ev.Tick())
            at = self.brain.next_deadline()
            assert at is None or at > self._lanes.now, "a deadline that has come is not over after its tick"

    def order(self, action):
        """The engine obeys when its turn comes, and the brain is told."""
        self.engine.order(action)
        self._lanes.later(self._engine_lane, self._work)

    def announce(self, stored, removed):
        assert self._announced.isdisjoint(stored)
        assert self._announced.issuperset(removed)
        self._announced.difference_update(removed)
        self._announced.update(stored)

    def read_slot(self, slot):
        return _copied(self.engine.slots[slot])

    def fill_slot(self, slot, blocks, dtype):
        self.engine.slots[slot], self.engine.slot_dtypes[slot] = _copied(blocks), dtype

    def assert_nothing_held(self):
        assert self.brain.is_idle
        load = self.brain.load
        held = (load.blocks_used_by_requests, load.slots_used, load.requests_running, load.requests_waiting)
        assert held == (0, 0, 0, 0)
        assert (load.leases, load.tokens_waiting) == (0, 0)

    def assert_replays(self):
        """A fresh brain that is told the same does the same."""
        brain = self._fresh_brain()
        for event, now, actions in self._handled:
            assert brain.handle(event, now) == actions

    @property
    def _engine_lane(self):
        return f"engine {self.name}"

    def _work(self):
        self.tell(self.engine.work())


def _copied(blocks):
    return [{layer: list(kv) for layer, kv in block.items()} for block in blocks]
