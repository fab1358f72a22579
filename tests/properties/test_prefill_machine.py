"""A prefill pod among liars: decode pods and routers that say anything at any time, who give of their blocks what they
like, as the kvstore does.

Only the pod's own engine, store link and transport keep the contract: each order is answered exactly once. Whatever
else is said, each work ends exactly once, no slot is used twice at a time, and in the end nothing is held.
"""

import random
from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvoy.core import actions as do
from kvoy.core import events as ev
from kvoy.core.frames import Ack, Committed, HandoffKey, Nack, Refused, Welcome
from kvoy.core.prefill import PrefillBrain, PrefillParams
from kvoy.core.step import Sampled, StepResult
from kvoy.core.types import PrefillWork
from tests.core.toy import CONTEXT_TOKENS, FINGERPRINT, SPEC, request, reservation

NAMES = ("a", "b", "c", "d")


class Prefill(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(4, 14),
        slots=st.sampled_from((1, 2, 3, 4, 12)),
        slot_bytes=st.sampled_from((SPEC.layer_bytes, SPEC.block_bytes, 2 * SPEC.block_bytes)),
        use_store=st.booleans(),
    )
    def start(self, blocks, slots, slot_bytes, use_store):
        params = PrefillParams(chunk_tokens=8, max_queue=2, max_admitted=3, silence_s=20.0, max_resends=2)
        self.brain = PrefillBrain(params, SPEC, blocks, slots, slot_bytes, CONTEXT_TOKENS, use_store, FINGERPRINT)
        self.now = 1000.0
        self.engine = deque()
        self.sends = {}
        self.stores = []
        self.awaited = []
        """Fetches from decode pods that somebody waits for."""
        self.submitted, self.ended, self.started = Counter(), Counter(), Counter()
        self.flying = {}
        """Slot of each frame of a work that is not over and not acknowledged, by (key, seq)."""
        self.opened = {}
        """The attempt of each handoff whose stream is open."""
        self.attempts = Counter()
        self.landed = Counter()
        """Frames of each handoff that were acknowledged."""
        self.committing = set()
        self.sent = {}

    # what the pod's own parts do with its orders

    def tell(self, event):
        for action in self.brain.handle(event, self.now):
            self.obey(action)
        self.brain.check()
        assert not any(action.slot in self.writers() for action in self.sends_open()), "a slot is written while read"

    def obey(self, action):
        match action:
            case do.RunStep():
                assert not any(isinstance(order, do.RunStep) for order in self.engine)
                self.engine.append(action)
            case do.ExportBlocks() | do.FetchFromStore():
                assert action.slot not in self.in_use()
                (self.engine if isinstance(action, do.ExportBlocks) else self.stores).append(action)
            case do.ImportSlot():
                self.engine.append(action)
            case do.PutToStore() | do.LookUpStore():
                self.stores.append(action)
            case do.FetchHeld() | do.CancelFetch():
                self.obey_fetch(action)
            case do.OpenHandoff(_, opening):
                self.open(opening)
            case do.SendFrame():
                assert action.attempt == self.opened[action.header.key]
                assert action.header.seq >= self.landed[action.header.key], "it was acknowledged"
                self.flying[action.header.key, action.header.seq] = action.slot
                self.sends.setdefault(action.header.key, deque()).append(action)
            case do.SendCommit(commit):
                assert self.sent[commit.key] == set(range(commit.frames))
                self.committing.add(commit.key)
            case do.CloseHandoff(key):
                del self.opened[key]
            case do.WorkStarted(key):
                self.started[key] += 1
            case do.WorkDone(key) | do.WorkFailed(key):
                self.end(key)

    def end(self, key):
        self.ended[key] += 1
        if self.submitted[key] == self.ended[key]:
            self.opened.pop(key, None)
            self.committing.discard(key)
            self.forget(key, 10**6)

    def obey_fetch(self, action):
        match action:
            case do.FetchHeld(_, _, call):
                assert action.slot not in self.in_use()
                assert not any(order.call.key == call.key for order in self.awaited)
                self.stores.append(action)
                self.awaited.append(action)
            case do.CancelFetch(transfer_id):
                (fetch,) = [order for order in self.awaited if order.transfer_id == transfer_id]
                self.awaited.remove(fetch)

    def open(self, opening):
        assert opening.key not in self.opened
        assert opening.attempt in {0, self.attempts[opening.key]}
        if not opening.attempt:
            self.landed[opening.key] = 0
        self.opened[opening.key] = opening.attempt
        self.attempts[opening.key] = opening.attempt + 1
        self.sent[opening.key] = set(range(self.landed[opening.key]))

    def forget(self, key, through):
        sent = [seq for at, seq in self.flying if at == key and seq <= through]
        self.landed[key] = max([self.landed[key], *(seq + 1 for seq in sent)])
        self.flying = {at: slot for at, slot in self.flying.items() if at[0] != key or at[1] > through}

    def sends_open(self):
        return [action for queue in self.sends.values() for action in queue]

    def writers(self):
        exports = [order.slot for order in self.engine if isinstance(order, do.ExportBlocks)]
        return exports + [order.slot for order in self.stores if isinstance(order, do.FetchFromStore | do.FetchHeld)]

    def in_use(self):
        orders = [*self.engine, *self.stores, *self.sends_open()]
        return {order.slot for order in orders if hasattr(order, "slot")} | set(self.flying.values())

    @rule(turns=st.integers(1, 3))
    def engine_works(self, turns):
        for _ in range(min(turns, len(self.engine))):
            match self.engine.popleft():
                case do.RunStep(plan):
                    sampled = tuple(Sampled(row.request_id, 5) for row in plan.prefill if row.sampling)
                    self.tell(ev.StepDone(StepResult(plan.step_id, sampled, self.now, self.now)))
                case do.ExportBlocks(transfer_id):
                    self.tell(ev.Exported(transfer_id))
                case do.ImportSlot(transfer_id):
                    self.tell(ev.Imported(transfer_id))

    @rule(pick=st.integers(0, 9), share=st.integers(0, 4), damaged=st.booleans())
    def store_answers(self, pick, share, damaged=False):
        if self.stores:
            match self.stores.pop(pick % len(self.stores)):
                case do.LookUpStore(request_id, ids):
                    self.tell(ev.StoreLookedUp(request_id, min(share, len(ids))))
                case do.FetchFromStore(transfer_id, ids):
                    self.tell(ev.StoreFetched(transfer_id, min(share, len(ids))))
                case do.FetchHeld(transfer_id, _, call) as fetch:
                    self.awaited = [other for other in self.awaited if other is not fetch]
                    self.tell(ev.HeldFetched(transfer_id, min(share, call.blocks), damaged))
                case do.PutToStore(transfer_id):
                    self.tell(ev.StorePut(transfer_id))

    @rule(pick=st.integers(0, 9))
    def transport_takes_a_frame(self, pick):
        keys = [key for key, queue in self.sends.items() if queue]
        if keys:
            action = self.sends[keys[pick % len(keys)]].popleft()
            self.sent[action.header.key].add(action.header.seq)
            self.tell(ev.FrameSent(action.header.key, action.header.seq))

    @rule(seed=st.integers(0, 2**16), turns=st.integers(1, 40))
    def all_is_well(self, seed, turns):
        """Everybody keeps the rules for a while."""
        draw = random.Random(seed)
        for _ in range(turns):
            match draw.randrange(6):
                case 0 | 1:
                    self.engine_works(1)
                case 2:
                    self.transport_takes_a_frame(draw.randrange(4))
                case 3:
                    self.acknowledge(draw.randrange(4), draw.randrange(1, 4))
                case 4:
                    self.store_answers(draw.randrange(4), 4)
                case 5 if self.committing:
                    self.tell(ev.ReceiverSaid(draw.choice(sorted(self.committing, key=str)), Committed()))
                case 5 if self.opened:
                    key = draw.choice(sorted(self.opened, key=str))
                    self.tell(ev.ReceiverSaid(key, Welcome(2, self.landed[key])))

    # what others do

    @rule(
        name=st.sampled_from(NAMES),
        step=st.sampled_from((1, 1, 1, 1, 0, -1)),
        prompt=st.integers(1, 30),
        held=st.sampled_from((0, 0, 0, 1, 3)),
        lendable=st.sampled_from((0, 1, 3, 9)),
        first=st.sampled_from((1, 1, 7)),
        deadline_s=st.none() | st.integers(0, 60),
    )
    def submit(self, *, name, step, prompt, held, lendable, first, deadline_s):
        epoch = step + max((key.epoch for key in self.submitted if key.request_id == name), default=0)
        deadline = None if deadline_s is None else self.now + deadline_s
        self.submitted[HandoffKey(name, epoch)] += 1
        reserved = reservation(name, epoch, held, lendable_blocks=lendable)
        work = PrefillWork(request(name, prompt, first=first, deadline=deadline), reserved)
        self.tell(ev.WorkSubmitted(work))

    @rule(pick=st.integers(0, 9), credit=st.integers(0, 4))
    def acknowledge(self, pick, credit):
        """What was sent, rightly."""
        unsent = {(action.header.key, action.header.seq) for action in self.sends_open()}
        sent = [at for at in self.flying if at not in unsent]
        if sent:
            key, seq = sent[pick % len(sent)]
            self.forget(key, seq)
            self.tell(ev.ReceiverSaid(key, Ack(seq, credit)))

    @rule(pick=st.integers(0, 9))
    def ask_again(self, pick):
        if self.flying:
            key, seq = [*self.flying][pick % len(self.flying)]
            self.tell(ev.ReceiverSaid(key, Nack(seq)))

    def key(self, pick):
        keys = [*self.submitted] or [HandoffKey("a", 1)]
        return keys[pick % len(keys)]

    @rule(
        pick=st.integers(0, 99),
        message=st.sampled_from(
            (Committed(), Refused("no"), Welcome(1, 3), Welcome(1, 0), Ack(9, 9), Ack(0, 1), Nack(9))
        ),
    )
    def say_anything(self, pick, message):
        if isinstance(message, Ack):
            self.forget(self.key(pick), message.through_seq)
        self.tell(ev.ReceiverSaid(self.key(pick), message))

    @rule(pick=st.integers(0, 99), again=st.booleans())
    def lose(self, pick, again):
        """The stream, if one is open; or of one that is over, once more."""
        key = self.key(pick)
        sends = self.sends.pop(key, None)
        attempt = self.opened.pop(key, sends[0].attempt if sends else 0)
        self.committing.discard(key)
        self.flying = {at: slot for at, slot in self.flying.items() if at[0] != key}
        self.tell(ev.HandoffLost(key, "reset", attempt))
        if again:
            self.tell(ev.HandoffLost(key, "reset", attempt))

    @rule(pick=st.integers(0, 99))
    def cancel(self, pick):
        self.tell(ev.WorkCancelled(self.key(pick)))

    @rule(seconds=st.sampled_from((0.02, 0.5)) | st.floats(0.1, 15.0))
    def wait(self, seconds):
        self.now += seconds
        self.tell(ev.Tick())
        assert self.brain.next_deadline() is None or self.brain.next_deadline() > self.now

    def teardown(self):
        if not hasattr(self, "brain"):
            return
        for key in [*self.submitted]:
            self.tell(ev.WorkCancelled(key))
        assert not self.awaited, "nobody waits for what a decode pod was to give to a work that is over"
        while self.engine or self.stores or self.sends_open():
            self.engine_works(9)
            self.store_answers(0, 4)
            self.transport_takes_a_frame(0)
        assert self.brain.is_idle
        assert self.brain.next_deadline() is None
        load = self.brain.load
        assert (load.blocks_used_by_requests, load.slots_used, load.requests_running, load.requests_waiting) == (0,) * 4
        assert self.ended == self.submitted
        assert all(times <= self.submitted[key] for key, times in self.started.items())
        counters = self.brain.counters
        failed = sum(getattr(counters, name) for name in counters.__slots__ if name.startswith("failed_"))
        assert counters.done + failed == counters.submitted == self.submitted.total()


TestPrefill = Prefill.TestCase
TestPrefill.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
