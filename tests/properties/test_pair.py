"""Prefill and decode wired together: whatever is late, lost, damaged or taken back, tokens are right and nothing stays.

The machine asks, cancels, cuts streams, damages headers and payloads, kills the prefill pod, lets time pass, takes the
kvstore away; between that, lanes move in any order. The pods may differ in block size and number format. Both brains
prove their invariants after each event (see World); at the end everything settles.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvoy.core import events as ev
from kvoy.core.decode import DecodeParams
from kvoy.core.prefill import PrefillParams
from kvoy.core.wire import WirePolicy
from tests.core.toy import NARROW, SPEC, WIDE, continuation, request
from tests.core.world import World, damaged_header

SLOT_BYTES = (SPEC.layer_bytes, SPEC.block_bytes, 2 * SPEC.block_bytes, 3 * SPEC.block_bytes)
SPECS = (SPEC, SPEC, WIDE, NARROW)
"""A layer of any of them fits the smallest slot."""


def pool_blocks(blocks, spec):
    """As many tokens as so many blocks of SPEC hold."""
    return blocks * SPEC.block_tokens // spec.block_tokens


class Pair(RuleBasedStateMachine):
    """Small pools and few slots, so that everything is contended."""

    @initialize(
        prefill_blocks=st.integers(7, 20),
        decode_blocks=st.integers(12, 24),
        slots=st.sampled_from((1, 2, 3, 4, 5, 12)),
        slot_bytes=st.sampled_from(SLOT_BYTES),
        decode_slot_bytes=st.sampled_from(SLOT_BYTES),
        use_store=st.booleans(),
        chunk_tokens=st.sampled_from((4, 8, 12)),
        max_batch=st.integers(1, 4),
        spec=st.sampled_from(SPECS),
        decode_spec=st.sampled_from(SPECS),
        wire=st.sampled_from(WirePolicy),
    )
    def start(self, *, chunk_tokens, max_batch, wire, prefill_blocks, decode_blocks, spec, decode_spec, **sizes):
        self.world = World(
            **sizes,
            spec=spec,
            decode_spec=decode_spec,
            prefill_blocks=pool_blocks(prefill_blocks, spec),
            decode_blocks=pool_blocks(decode_blocks, decode_spec),
            prefill=PrefillParams(
                chunk_tokens=max(chunk_tokens, spec.block_tokens), max_queue=4, max_admitted=3, wire=wire
            ),
            decode=DecodeParams(chunk_tokens=chunk_tokens, max_batch=max_batch, max_waiting=6, store_backlog_blocks=6),
        )
        self.asked = 0

    @rule(
        prompt=st.integers(1, 24),
        first=st.sampled_from((1, 1, 9)),
        max_tokens=st.integers(1, 24),
        stops_at=st.none() | st.integers(0, 5),
        local=st.sampled_from((False, False, True)),
        deadline_s=st.none() | st.floats(0.01, 20.0),
    )
    def ask(self, *, prompt, first, max_tokens, stops_at, local, deadline_s):
        self.asked += 1
        deadline = None if deadline_s is None else self.world.now + deadline_s
        asked = request(f"q{self.asked}", prompt, first=first, max_tokens=max_tokens, deadline=deadline)
        if stops_at is not None:
            known = continuation(asked.token_ids, asked.sampling)
            stop = known[min(stops_at, len(known) - 1)]
            asked = request(
                f"q{self.asked}", prompt, first=first, max_tokens=max_tokens, deadline=deadline, stop=(stop,)
            )
        self.world.ask(asked, local=local)

    @rule(seed=st.integers(0, 2**16), turns=st.integers(10, 80))
    def go_on(self, seed, turns):
        draw = random.Random(seed)
        for _ in range(turns):
            names = self.world.choices()
            if names:
                self.world.do(draw.choice(names))

    @rule(pick=st.integers(0, 100))
    def cancel(self, pick):
        names = sorted(self.world.clients)
        if names:
            self.world.cancel(names[pick % len(names)])

    @rule(pick=st.integers(0, 100))
    def renew(self, pick):
        names = sorted(name for name, client in self.world.clients.items() if client.works)
        if names:
            self.world.renew(names[pick % len(names)])

    @rule()
    def keep_leases(self):
        self.world.to_d(ev.LeasesKept(tuple(self.world.clients)))

    @rule(pick=st.integers(0, 100), half=st.booleans())
    def cut(self, pick, half):
        numbers = [number for number, stream in self.world.streams.items() if stream.is_open]
        if numbers:
            self.world.cut(numbers[pick % len(numbers)], half=half)

    @rule(count=st.integers(1, 3), lie=st.none() | st.integers(0, 8))
    def damage(self, count, lie):
        left = [count]

        def damage(header):
            left[0] -= 1
            return damaged_header(header, lie) if left[0] >= 0 else None

        self.world.damage = damage

    @rule(count=st.integers(1, 3))
    def spoil(self, count):
        left = [count]

        def spoil(_):
            left[0] -= 1
            return left[0] >= 0

        self.world.spoil = spoil

    @rule(dice=st.integers(1, 4))
    def kill_p(self, dice):
        if dice == 4:
            self.world.kill_p()

    @rule(pick=st.integers(0, 100))
    def cut_fetch(self, pick):
        numbers = [number for number, call in self.world.calls.items() if call.is_open]
        if numbers:
            self.world.cut_call(numbers[pick % len(numbers)])

    @rule(count=st.integers(0, 3))
    def spoil_lent(self, count):
        left = [count]

        def spoil(_):
            left[0] -= 1
            return left[0] >= 0

        self.world.spoil_lent = spoil

    @rule(lends=st.booleans())
    def lends_or_is_never_heard_of(self, lends):
        self.world.lends = lambda _: lends

    @rule(seconds=st.sampled_from((0.03, 0.2)) | st.floats(0.01, 40.0))
    def wait(self, seconds):
        self.world.advance(seconds)

    @rule(is_away=st.booleans())
    def store_comes_and_goes(self, is_away):
        self.world.store_is_away = is_away

    @rule(pick=st.integers(0, 100))
    def store_evicts(self, pick):
        if self.world.store:
            del self.world.store[sorted(self.world.store)[pick % len(self.world.store)]]

    @rule(pod=st.sampled_from(("p", "d")), dice=st.integers(1, 20))
    def drain(self, pod, dice):
        if dice == 20:
            tell = self.world.to_p if pod == "p" else self.world.to_d
            tell(ev.DrainAsked())

    def teardown(self):
        if hasattr(self, "world"):
            self.world.settle()
            self.world.assert_clean()
            self.world.assert_replays()


TestPair = Pair.TestCase
TestPair.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def drawn_world(draw, **more):
    spec, decode_spec = draw.choice(SPECS), draw.choice(SPECS)
    return World(
        spec=spec,
        decode_spec=decode_spec,
        prefill_blocks=pool_blocks(draw.choice((8, 16)), spec),
        decode_blocks=pool_blocks(draw.choice((10, 16)), decode_spec),
        prefill=PrefillParams(chunk_tokens=8, wire=draw.choice(list(WirePolicy)), max_resends=20),
        slots=draw.choice((1, 2, 4, 12)),
        slot_bytes=draw.choice(SLOT_BYTES),
        decode_slot_bytes=draw.choice(SLOT_BYTES),
        use_store=draw.random() < 0.5,
        **more,
    )


def drawn_request(draw, index):
    return request(f"q{index}", draw.randint(1, 24), first=draw.choice((1, 1, 5)), max_tokens=draw.randint(1, 8))


@pytest.mark.parametrize("seed", range(40))
def test_without_faults_everything_is_answered(seed):
    """Mixed requests, shared prefixes, few slots; no faults, so none may fail."""
    draw = random.Random(seed)
    world = drawn_world(draw)
    for index in range(8):
        world.ask(drawn_request(draw, index), local=draw.random() < 0.3)
        for _ in range(draw.randint(0, 30)):
            if names := world.choices():
                world.do(draw.choice(names))
    world.settle(pick=draw.choice)
    world.assert_clean()
    assert world.p.counters.done == world.p.counters.submitted
    assert world.d.counters.finished_length == world.d.counters.asked
    assert world.d.counters.frames_received == world.p.counters.frames_shipped


@pytest.mark.parametrize("seed", range(60))
def test_no_broken_stream_and_no_damage_fails_a_request(seed):
    """Streams break all the time, on one side or both, frames are damaged in header or payload, epochs are renewed,
    prefill pods killed."""
    draw = random.Random(seed)
    patient = DecodeParams(chunk_tokens=8, max_batch=4, lease_s=300.0)
    world = drawn_world(draw, max_renewals=1000, decode=patient)
    world.damage = lambda header: damaged_header(header, draw.choice((None, 0, 3))) if draw.random() < 0.1 else None
    world.spoil = lambda _: draw.random() < 0.1
    world.spoil_lent = lambda _: draw.random() < 0.1
    world.lends = lambda _: draw.random() < 0.9
    for index in range(8):
        world.ask(drawn_request(draw, index))
        for _ in range(draw.randint(0, 60)):
            if names := world.choices():
                world.do(draw.choice(names))
            open_streams = [number for number, stream in world.streams.items() if stream.is_open]
            if open_streams and draw.random() < 0.1:
                world.cut(draw.choice(open_streams), half=draw.random() < 0.5)
            if draw.random() < 0.1:
                world.advance(draw.choice((0.03, 0.1, 0.6)))
            if draw.random() < 0.02:
                world.renew(f"q{draw.randint(0, index)}")
            if draw.random() < 0.02:
                world.kill_p()
    world.settle(pick=draw.choice)
    world.assert_clean()
    world.assert_replays()
    assert world.d.counters.finished_length == world.d.counters.asked
