"""A decode pod among liars: prefill pods that send, and ask for, whatever they like, routers that change their minds.

Only the pod's own engine and store link keep the contract: each order is answered exactly once, in order. Whatever is
sent, each request ends exactly once, each payload is taken or dropped, and in the end nothing is held.
"""

import random
from collections import Counter, deque
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvoy.core import actions as do
from kvoy.core import events as ev
from kvoy.core.decode import DecodeBrain, DecodeParams
from kvoy.core.frames import Ack, Commit, Committed, FetchCall, FrameHeader, HandoffKey, Nack, Opening, Refused, Welcome
from kvoy.core.step import Sampled, StepResult
from tests.core.toy import CONTEXT_TOKENS, FINGERPRINT, SPEC, request

NAMES = ("a", "b", "c", "d", "e")


class Decode(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(4, 14),
        slots=st.sampled_from((1, 2, 3, 4, 12)),
        slot_blocks=st.integers(1, 2),
        use_store=st.booleans(),
    )
    def start(self, blocks, slots, slot_blocks, use_store):
        params = DecodeParams(chunk_tokens=8, max_batch=2, max_waiting=3, silence_s=60.0, store_backlog_blocks=3)
        slot_bytes = slot_blocks * SPEC.block_bytes
        self.brain = DecodeBrain(
            params, SPEC, blocks, slots, slot_bytes, CONTEXT_TOKENS, use_store, FINGERPRINT, "decode:1"
        )
        self.slot_blocks = slot_blocks
        self.now = 1000.0
        self.engine = deque()
        self.puts = []
        self.asked, self.ended = Counter(), Counter()
        self.reservations = {}
        self.senders = {}
        """Stream of each handoff that was opened: [key, next seq, next block]."""
        self.attempts = Counter()
        self.frames = {}
        """Every frame that was sent for a lease, by its number."""
        self.lease_of = {}
        self.granted = Counter()
        self.again = []
        """Frames that were asked for again: (stream, seq)."""
        self.calls = {}
        """What is still to be lent by each fetch that is not over: [call, next block]."""
        self.lent = []
        """Fetches whose last frame the transport has not taken yet."""
        self.fetches = 0
        self.payloads = Counter()
        self.streams = 0
        self.used = set()
        self.prompts = {}

    def tell(self, event):
        for action in self.brain.handle(event, self.now):
            self.obey(action)
        self.brain.check()
        assert not +self.payloads, "a payload was neither taken nor dropped"

    def obey(self, action):
        match action:
            case do.RunStep() | do.ExportBlocks():
                assert not isinstance(action, do.RunStep) or not any(isinstance(o, do.RunStep) for o in self.engine)
                assert not isinstance(action, do.ExportBlocks) or action.slot not in self.slots_in_use()
                self.engine.append(action)
            case do.ImportFrame(_, header, stream):
                assert action.slot not in self.slots_in_use()
                assert len(action.blocks) == header.blocks
                self.payloads[stream, header.seq] -= 1
                self.engine.append(action)
            case do.DropFrame(header, stream):
                self.payloads[stream, header.seq] -= 1
            case do.PutToStore():
                self.puts.append(action)
            case do.SayReserved(_, reservation):
                self.reservations[reservation.request_id] = reservation
            case do.SayRejected(_, request_id):
                self.ended[request_id] += 1
            case do.SayOutputs(_, outputs):
                for output in outputs:
                    assert self.ended[output.request_id] < self.asked[output.request_id]
                    self.ended[output.request_id] += output.finish is not None
            case do.SayToSender(_, stream, message):
                self.sender_hears(stream, message)
            case do.LendFrame(header, number, _):
                call, block = self.calls[number]
                name = call.key.request_id
                assert (call.lease, self.ended[name]) == (self.reservations[name].lease, self.asked[name] - 1)
                assert (header.key, header.first_block, header.layers) == (call.key, block, SPEC.layers)
                assert number not in self.lent
                self.calls[number][1] += header.blocks
                self.lent.append(number)
            case do.EndFetch(number, reason):
                call, block = self.calls.pop(number)
                assert reason or block == call.first_block + call.blocks
                self.lent = [other for other in self.lent if other != number]

    def sender_hears(self, stream, message):
        match message:
            case Committed() | Refused():
                self.senders.pop(stream, None)
            case Welcome(credits=credit, next_seq=seq):
                self.granted[stream] = seq + credit
                if stream in self.senders and seq < self.senders[stream][1]:
                    key, block = self.senders[stream][0], self.frames[self.lease_of[stream]][seq].first_block
                    self.senders[stream] = [key, seq, block]
            case Nack(seq=seq) if stream in self.senders:
                self.again.append((stream, seq))
            case Ack(through_seq=through, credits=credit):
                assert through + 1 + credit >= self.granted[stream], "a promise was taken back"
                self.granted[stream] = through + 1 + credit

    def slots_in_use(self):
        return {order.slot for order in [*self.engine, *self.puts] if hasattr(order, "slot")}

    # the pod's own parts

    @rule(turns=st.integers(1, 4), bad=st.sampled_from((False, False, True)))
    def engine_works(self, turns, bad=False):
        for _ in range(min(turns, len(self.engine))):
            match self.engine.popleft():
                case do.RunStep(plan):
                    rows = [row for row in (*plan.prefill, *plan.decode) if row.sampling]
                    sampled = tuple(Sampled(row.request_id, 5 + len(row.block_table)) for row in rows)
                    self.tell(ev.StepDone(StepResult(plan.step_id, sampled, self.now, self.now)))
                case do.ExportBlocks(transfer_id):
                    self.tell(ev.Exported(transfer_id))
                case do.ImportFrame(transfer_id):
                    self.tell(ev.FrameBad(transfer_id) if bad else ev.Imported(transfer_id))

    @rule(pick=st.integers(0, 5))
    def store_answers(self, pick):
        if self.puts:
            self.tell(ev.StorePut(self.puts.pop(pick % len(self.puts)).transfer_id))

    @rule(seed=st.integers(0, 2**16), turns=st.integers(1, 60))
    def all_is_well(self, seed, turns):
        """Everybody keeps the rules for a while."""
        draw = random.Random(seed)
        for _ in range(turns):
            stream = draw.choice([*self.senders]) if self.senders else 0
            match draw.randrange(7):
                case 5:
                    self.take_what_is_lent(draw.randrange(4))
                case 6:
                    self.fetch_or_renew(draw)
                case 0 | 1:
                    self.engine_works(draw.randrange(1, 3), draw.randrange(8) == 0)
                case 2:
                    self.store_answers(draw.randrange(4))
                case 3:
                    waiting = [name for name in NAMES if self.opens_next(name)]
                    if waiting:
                        self.open(draw.choice(waiting), None)
                case 4 if stream:
                    self.go_on_sending(stream)

    def fetch_or_renew(self, draw):
        """A prefill pod is lost, or the next one fetches what has come."""
        name = draw.choice(NAMES)
        if name in self.reservations and self.reservations[name].lendable_blocks:
            self.fetch(name=name, wrong=None, first=0, blocks=0, rightly=True)
        elif draw.randrange(3) == 0:
            self.renew(name)

    def opens_next(self, name):
        reservation = self.reservations.get(name)
        return reservation is not None and reservation.lease not in self.used

    def go_on_sending(self, stream):
        key, seq, block = self.senders[stream]
        wanted = next((again for again in self.again if again[0] == stream), None)
        if wanted is not None:
            self.again.remove(wanted)
            header = self.frames[self.lease_of[stream]].get(wanted[1])
            if header is not None:
                self.arrive(header, True, stream)
            return
        blocks = SPEC.blocks_for(self.prompts[key.request_id])
        if block >= blocks:
            self.tell(ev.CommitArrived(Commit(key, seq, 5, None, self.now), stream))
        elif seq < self.granted[stream]:
            count = min(self.slot_blocks, blocks - block)
            self.senders[stream] = [key, seq + 1, block + count]
            self.arrive(FrameHeader(key, seq, block, count, 0, SPEC.layers, 0, 1, SPEC.dtype), True, stream)

    @rule(
        name=st.sampled_from(NAMES),
        wrong=st.sampled_from((None, None, None, "lease", "epoch", "spec", "fingerprint")),
        first=st.integers(0, 2),
        blocks=st.integers(0, 4),
        rightly=st.booleans(),
    )
    def fetch(self, *, name, wrong, first, blocks, rightly):
        reservation = self.reservations.get(name)
        if reservation is None:
            return
        self.fetches += 1
        if rightly:
            first, blocks = 0, reservation.lendable_blocks
        call = FetchCall(
            HandoffKey(name, reservation.epoch + (wrong == "epoch")),
            "stolen" if wrong == "lease" else reservation.lease,
            "other" if wrong == "fingerprint" else FINGERPRINT,
            replace(SPEC, kv_heads=2) if wrong == "spec" else SPEC,
            first,
            blocks,
        )
        self.calls[self.fetches] = [call, first]
        self.tell(ev.FetchAsked(call, self.fetches))
        assert wrong is None or self.fetches not in self.calls

    @rule(pick=st.integers(0, 9))
    def take_what_is_lent(self, pick):
        if self.lent:
            self.tell(ev.FrameTaken(self.lent.pop(pick % len(self.lent))))

    @rule(pick=st.integers(0, 9))
    def end_fetch(self, pick):
        if self.calls:
            number = [*self.calls][pick % len(self.calls)]
            del self.calls[number]
            self.lent = [other for other in self.lent if other != number]
            self.tell(ev.FetchEnded(number))

    # routers

    @rule(
        name=st.sampled_from(NAMES),
        prompt=st.integers(1, 20),
        first=st.sampled_from((1, 1, 7)),
        max_tokens=st.integers(1, 24),
        stop=st.sampled_from(((), (7,))),
        local=st.sampled_from((False, False, True)),
        source=st.sampled_from(("one", "two")),
        deadline_s=st.none() | st.none() | st.integers(0, 60),
        again=st.sampled_from((False, False, False, True)),
    )
    def reserve(self, *, name, prompt, first, max_tokens, stop, local, source, deadline_s, again):
        deadline = None if deadline_s is None else self.now + deadline_s
        if self.asked[name] > self.ended[name] and not again:
            return
        self.asked[name] += 1
        self.prompts[name] = prompt if self.asked[name] == self.ended[name] + 1 else self.prompts[name]
        asked = request(name, prompt, first=first, max_tokens=max_tokens, stop=stop, deadline=deadline)
        self.tell(ev.ReserveAsked(asked, local, source))

    @rule(name=st.sampled_from(NAMES))
    def renew(self, name):
        self.tell(ev.RenewAsked(name))

    @rule(name=st.sampled_from(NAMES))
    def keep(self, name):
        self.tell(ev.LeasesKept((name, "unknown")))

    @rule(name=st.sampled_from(NAMES))
    def cancel(self, name):
        self.tell(ev.RequestCancelled(name))

    # prefill pods

    @rule(
        name=st.sampled_from(NAMES),
        wrong=st.sampled_from((None, None, None, "lease", "epoch", "spec", "attempt")),
        is_raw=st.sampled_from((True, True, False)),
    )
    def open(self, name, wrong, is_raw=True):
        """The first stream of a lease, or the next one, whether or not the one before it is known to be lost."""
        reservation = self.reservations.get(name)
        if reservation is None:
            return
        self.streams += 1
        self.used.add(reservation.lease)
        key = HandoffKey(name, reservation.epoch + (wrong == "epoch"))
        spec = replace(SPEC, kv_heads=2) if wrong == "spec" else SPEC
        sent = self.frames.setdefault(reservation.lease, {})
        end = max((header.first_block + header.blocks for header in sent.values()), default=reservation.held_blocks)
        self.senders[self.streams] = [key, len(sent), end]
        self.lease_of[self.streams] = reservation.lease
        lease = "stolen" if wrong == "lease" else reservation.lease
        attempt = self.attempts[lease] - (wrong == "attempt")
        self.attempts[lease] += 1
        opening = Opening(key, lease, FINGERPRINT, spec, max(0, attempt), is_raw=is_raw)
        self.tell(ev.HandoffOpened(opening, self.streams))

    @rule(pick=st.integers(0, 9), blocks=st.integers(1, 2), intact=st.sampled_from((True, True, True, False)))
    def send(self, pick, blocks, intact):
        """What an honest pod sends next, if it may or not."""
        if self.senders:
            stream = [*self.senders][pick % len(self.senders)]
            key, seq, block = self.senders[stream]
            if intact:
                self.senders[stream] = [key, seq + 1, block + min(blocks, self.slot_blocks)]
            header = FrameHeader(key, seq, block, min(blocks, self.slot_blocks), 0, SPEC.layers, 0, 1, SPEC.dtype)
            self.arrive(header, intact, stream)

    @rule(
        pick=st.integers(0, 9),
        seq=st.integers(0, 4),
        block=st.integers(0, 5),
        layers=st.sampled_from(((0, 2), (0, 1), (1, 1), (1, 2))),
        epoch=st.integers(0, 2),
        intact=st.booleans(),
    )
    def send_anything(self, *, pick, seq, block, layers, epoch, intact):
        if self.streams:
            stream = pick % self.streams + 1
            name = NAMES[pick % len(NAMES)]
            key = self.senders[stream][0] if stream in self.senders else HandoffKey(name, epoch)
            self.arrive(FrameHeader(key, seq, block, 1, *layers, 0, 1, SPEC.dtype), intact, stream)

    def arrive(self, header, intact, stream):
        if intact and stream in self.lease_of:
            self.frames[self.lease_of[stream]].setdefault(header.seq, header)
        self.payloads[stream, header.seq] += 1
        self.tell(ev.FrameArrived(header, intact, stream))

    @rule(pick=st.integers(0, 9), lie=st.sampled_from((0, 0, 0, 1, -1)))
    def commit(self, pick, lie):
        if self.senders:
            stream = [*self.senders][pick % len(self.senders)]
            key, seq, _ = self.senders[stream]
            self.tell(ev.CommitArrived(Commit(key, max(0, seq + lie), 5, None, self.now), stream))

    @rule(pick=st.integers(0, 9))
    def lose(self, pick):
        if self.senders:
            stream = [*self.senders][pick % len(self.senders)]
            key, *_ = self.senders.pop(stream)
            self.tell(ev.HandoffLost(key, "reset", stream))

    @rule(seconds=st.floats(0.1, 20.0))
    def wait(self, seconds):
        self.now += seconds
        self.tell(ev.Tick())
        assert self.brain.next_deadline() is None or self.brain.next_deadline() > self.now

    def teardown(self):
        if not hasattr(self, "brain"):
            return
        for name in NAMES:
            self.cancel(name)
        for _ in range(200):
            self.engine_works(9)
            self.store_answers(0)
        assert not self.calls
        assert self.brain.is_idle
        assert self.brain.next_deadline() is None
        load = self.brain.load
        held = (
            load.blocks_used_by_requests,
            load.slots_used,
            load.requests_running,
            load.requests_waiting,
            load.leases,
        )
        assert held == (0,) * 5
        assert self.ended == self.asked


TestDecode = Decode.TestCase
TestDecode.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
