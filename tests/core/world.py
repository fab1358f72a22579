"""A prefill brain and a decode brain, wired by a toy of everything around them, one event at a time.

What may happen next waits in lanes; each lane keeps its order, between lanes anything goes: an engine obeys in order,
a stream delivers in order, and nobody knows which of two comes first. ``do`` lets one thing happen, ``settle`` all of
them. Faults (a damaged frame or payload, a cut stream, a kvstore that is away) are the caller's to choose. After every
event both brains prove their invariants.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial

from kvoy.core import actions as do
from kvoy.core import events as ev
from kvoy.core.decode import DecodeBrain, DecodeParams
from kvoy.core.frames import Committed, FetchCall, HandoffKey, Refused
from kvoy.core.prefill import PrefillBrain, PrefillParams
from kvoy.core.types import FinishReason, PrefillWork
from tests.core.toy import CONTEXT_TOKENS, FINGERPRINT, SPEC, Rounded, ToyEngine, continuation

LAST_MESSAGES = (Committed, Refused)


@dataclass(eq=False)
class Stream:
    """One connection of a handoff. A damaged payload stays what it is; only ``intact`` and FrameBad tell."""

    number: int
    opening: object
    is_open: bool = True
    is_half: bool = False
    """The prefill pod knows that it is over, the decode pod does not."""
    is_welcomed: bool = False
    unanswered: int = 0
    arrivals: dict[int, list] = field(default_factory=dict)


@dataclass(eq=False)
class Call:
    """One fetch of blocks that the decode pod holds."""

    transfer_id: int
    call: FetchCall
    slot: int
    blocks: int = 0
    """So many are in the slot."""
    is_open: bool = True
    is_told: bool = False
    """The prefill pod has its answer."""


@dataclass(eq=False)
class Client:
    """What the router knows of one request."""

    request: object
    is_local: bool
    renewals: int = 0
    tokens: tuple[int, ...] = ()
    ends: list = field(default_factory=list)
    works: dict[HandoffKey, list] = field(default_factory=dict)

    @property
    def is_over(self):
        return bool(self.ends)


class World:
    def __init__(
        self,
        *,
        spec=SPEC,
        decode_spec=None,
        prefill_blocks=16,
        decode_blocks=16,
        slots=4,
        slot_bytes=None,
        decode_slot_bytes=None,
        use_store=False,
        context_tokens=CONTEXT_TOKENS,
        prefill=None,
        decode=None,
        max_renewals=2,
    ):
        slot_bytes = slot_bytes or 2 * spec.block_bytes
        decode_slot_bytes = decode_slot_bytes or slot_bytes
        decode_spec = decode_spec or spec
        self.now = 1000.0
        self.context_tokens = context_tokens
        self.max_renewals = max_renewals
        self.fresh_p_engine = lambda: ToyEngine(spec, prefill_blocks, [[] for _ in range(slots)], slot_bytes)
        self.p_engine = self.fresh_p_engine()
        self.d_engine = ToyEngine(decode_spec, decode_blocks, [[] for _ in range(slots)], decode_slot_bytes)
        self.fresh_p = partial(
            PrefillBrain,
            prefill or PrefillParams(chunk_tokens=8),
            spec, prefill_blocks, slots, slot_bytes, context_tokens, use_store, FINGERPRINT,
        )  # fmt: skip
        self.fresh_d = partial(
            DecodeBrain,
            decode or DecodeParams(chunk_tokens=8, max_batch=4),
            decode_spec, decode_blocks, slots, decode_slot_bytes, context_tokens, use_store, FINGERPRINT, "decode:1",
        )  # fmt: skip
        self.p, self.d = self.fresh_p(), self.fresh_d()
        self.lanes = {}
        self.streams = {}
        self.p_streams = {}
        self.calls = {}
        self.clients = {}
        self.store = {}
        self.store_is_away = False
        self.announced = {"p": set(), "d": set()}
        self.damage = lambda _: None
        """The header that is read instead of this one, whose number may be wrong; None: it came as it was sent."""
        self.spoil = lambda _: False
        """Whether the payload of this frame is not what was sent, though the header is."""
        self.lends = lambda _: True
        """Whether the decode pod ever hears of this fetch."""
        self.spoil_lent = lambda _: False
        """Whether what is given back under this header is not what was sent."""
        self.log = []
        """(pod, event or action), as they came."""
        self.handled = {"p": [], "d": []}
        """(event, now, actions) of each brain."""

    # what a test does

    def ask(self, request, *, local=False):
        """The router places a request on the decode pod."""
        assert request.request_id not in self.clients or self.clients[request.request_id].is_over
        self.clients[request.request_id] = Client(request, local)
        self._later("router", self.to_d, ev.ReserveAsked(request, local, "router"))

    def cancel(self, request_id):
        """The router cancels on both pods."""
        client = self.clients[request_id]
        self._later("router", self.to_d, ev.RequestCancelled(request_id))
        for key in client.works:
            self._later("router", self.to_p, ev.WorkCancelled(key))

    def cancel_work(self, request_id):
        """The router takes the work back from the prefill pod only."""
        for key in self.clients[request_id].works:
            self._later("router", self.to_p, ev.WorkCancelled(key))

    def renew(self, request_id):
        """The router believes the prefill pod lost, and it need not be."""
        self._later("router", self.to_d, ev.RenewAsked(request_id))

    def cut(self, number, *, half=False):
        """A connection breaks: what is on its way is gone, both ends hear of it. ``half``: only the prefill pod does,
        and what is on its way to the decode pod still gets there, however late."""
        stream = self.streams[number]
        if not stream.is_open:
            return
        if half:
            stream.is_half, stream.is_open = True, False
            self._drop_lanes(stream, "out", "back")
            self._later(f"wire {stream.number}", self._end_half, stream)
        else:
            self._end_stream(stream)
        self._lose_p(stream, "cut")

    def kill_p(self):
        """The prefill pod is killed and another one, which knows nothing, takes its place; the router sees the works
        that are lost, and asks for new epochs."""
        for stream in self.streams.values():
            stream.unanswered = 0
            if stream.is_open:
                self._end_stream(stream)
        for number, call in self.calls.items():
            if call.is_open:
                self._end_call(number)
                self._later("lost d", self.to_d, ev.FetchEnded(number))
            call.is_told = True
        for name in [*self.lanes]:
            if name.startswith(("engine p", "lost p", "look ", "store p", "fetched ")):
                del self.lanes[name]
        self.p, self.p_engine = self.fresh_p(), self.fresh_p_engine()
        self.announced["p"], self.handled["p"] = set(), []
        lost = [key for client in self.clients.values() for key in client.works if not is_done(client.works[key])]
        for key in lost:
            self._hear_p(key, do.WorkFailed(key, "lost", "the pod was killed"))

    def cut_call(self, number):
        """The connection of a fetch breaks."""
        call = self.calls[number]
        if call.is_open:
            self._end_call(number)
            self._later("lost d", self.to_d, ev.FetchEnded(number))
            self._later(f"fetched {number}", self._answer_fetch, call)

    def advance(self, seconds):
        """Time passes; deadlines come due one after the other."""
        until = self.now + seconds
        while True:
            deadlines = [
                at for at in (self.p.next_deadline(), self.d.next_deadline()) if at is not None and at <= until
            ]
            if not deadlines:
                break
            self.now = max(self.now, min(deadlines))
            self._tick()
        self.now = until

    def choices(self):
        """Lanes in which something may happen next."""
        return [name for name, lane in self.lanes.items() if lane]

    def do(self, name):
        """Let the next thing of this lane happen."""
        act, *arguments = self.lanes[name].popleft()
        if not self.lanes[name]:
            del self.lanes[name]
        self.now += 0.001
        act(*arguments)

    def settle(self, pick=lambda names: names[0], limit=20_000):
        """Let everything happen, and time pass where nothing else does, until both pods are idle."""
        for _ in range(limit):
            names = self.choices()
            if names:
                self.do(pick(names))
            elif (
                self.p.is_idle and self.d.is_idle and self.p.next_deadline() is None and self.d.next_deadline() is None
            ):
                return
            else:
                deadlines = [at for at in (self.p.next_deadline(), self.d.next_deadline()) if at is not None]
                assert deadlines, "nothing can happen, and the pods are not idle"
                self.advance(max(0.0, min(deadlines) - self.now))
        raise AssertionError("the pods never come to rest")

    def assert_clean(self):
        """Nothing is held for anybody; every request has ended exactly once, and rightly."""
        for brain in (self.p, self.d):
            assert brain.is_idle
            load = brain.load
            held = (load.blocks_used_by_requests, load.slots_used, load.requests_running, load.requests_waiting)
            assert held == (0, 0, 0, 0)
            assert (load.leases, load.tokens_waiting) == (0, 0)
        assert not any(stream.arrivals for stream in self.streams.values()), "a payload was never taken nor dropped"
        assert not any(stream.unanswered for stream in self.streams.values())
        assert all(call.is_told and not call.is_open for call in self.calls.values())
        for client in self.clients.values():
            self._assert_ended(client)
        p, d = self.p.counters, self.d.counters
        assert p.submitted == p.done + sum(getattr(p, name) for name in p.__slots__ if name.startswith("failed_"))
        ended = [getattr(d, name) for name in d.__slots__ if name.startswith(("finished_", "rejected_"))]
        assert d.asked == sum(ended)

    def assert_replays(self):
        """Fresh brains that are told the same do the same: nothing but events and their times decides."""
        for pod, brain in (("p", self.fresh_p()), ("d", self.fresh_d())):
            for event, now, actions in self.handled[pod]:
                assert brain.handle(event, now) == actions

    def _assert_ended(self, client):
        assert len(client.ends) == 1, f"{client.request.request_id} ended with {client.ends}"
        expected = continuation(client.request.token_ids, client.request.sampling, self.context_tokens)
        if client.ends[0] in {FinishReason.STOP, FinishReason.LENGTH}:
            assert client.tokens == expected
        else:
            assert client.tokens == expected[: len(client.tokens)]
        for words in client.works.values():
            assert sum(not isinstance(word, do.WorkStarted) for word in words) == 1

    # events into brains

    def to_p(self, event):
        self.p_engine.now = self.now
        self.log.append(("p", event))
        actions = self.p.handle(event, self.now)
        self.handled["p"].append((event, self.now, actions))
        for action in actions:
            self.log.append(("p", action))
            self._perform_p(action)
        self.p.check()

    def to_d(self, event):
        self.d_engine.now = self.now
        self.log.append(("d", event))
        actions = self.d.handle(event, self.now)
        self.handled["d"].append((event, self.now, actions))
        for action in actions:
            self.log.append(("d", action))
            self._perform_d(action)
        self.d.check()

    def _tick(self):
        for brain, tell in ((self.p, self.to_p), (self.d, self.to_d)):
            at = brain.next_deadline()
            if at is not None and at <= self.now:
                tell(ev.Tick())
                at = brain.next_deadline()
                assert at is None or at > self.now, "a deadline that has come is not over after its tick"

    # what effects do

    def _perform_p(self, action):
        match action:
            case do.OpenHandoff(_, opening):
                before = self.p_streams.get(opening.key)
                assert not opening.attempt or not before.is_open
                number = len(self.streams) + 1
                stream = self.streams[number] = self.p_streams[opening.key] = Stream(number, opening)
                self._later(f"out {number}", self._connect, stream)
            case do.SendFrame(header):
                stream = self.p_streams[header.key]
                assert stream.opening.attempt == action.attempt
                stream.unanswered += 1
                if stream.is_open:
                    self._later(f"out {stream.number}", self._send, stream, action)
                else:
                    self._lose_p(stream, "ended before")
            case do.SendCommit(commit):
                stream = self.p_streams[commit.key]
                if stream.is_open:
                    self._later(f"out {stream.number}", self._commit, stream, commit)
            case do.CloseHandoff(key):
                stream = self.p_streams[key]
                if stream.is_open:
                    self._end_stream(stream)
                    if stream.unanswered:
                        self._lose_p(stream, "closed")
            case do.FetchHeld() | do.CancelFetch():
                self._fetch_held(action)
            case do.WorkStarted(key) | do.WorkDone(key) | do.WorkFailed(key):
                self._hear_p(key, action)
            case _:
                self._perform_shared("p", action)

    def _perform_d(self, action):
        match action:
            case do.SayReserved(_, reservation):
                self._later("router", self._place, reservation)
            case do.SayRejected(_, request_id, reason):
                self._end_client(self.clients[request_id], reason)
            case do.SayOutputs(_, outputs):
                for output in outputs:
                    self._hear_output(output)
            case do.ImportFrame(transfer_id, header, number, slot):
                payload = self._payload(number, header)
                if self.spoil(header):
                    self._later(f"verify {number}", self.to_d, ev.FrameBad(transfer_id))
                else:
                    self.d_engine.slots[slot], self.d_engine.slot_dtypes[slot] = payload, header.dtype
                    self._order("d", action)
            case do.DropFrame(header, number):
                self._payload(number, header)
            case do.SayToSender(_, number, message):
                self._say(self.streams[number], message)
            case do.LendFrame() | do.EndFetch():
                self._lend(action)
            case do.NoteExposed(seconds):
                assert seconds >= 0
            case _:
                self._perform_shared("d", action)

    def _perform_shared(self, pod, action):
        tell, engine = (self.to_p, self.p_engine) if pod == "p" else (self.to_d, self.d_engine)
        match action:
            case do.RunStep() | do.ExportBlocks() | do.ImportSlot():
                self._order(pod, action)
            case do.LookUpStore(request_id, ids):
                present = 0
                while present < len(ids) and engine.key(ids[present]) in self.store and not self.store_is_away:
                    present += 1
                self._later(f"look {request_id}", tell, ev.StoreLookedUp(request_id, present))
            case do.FetchFromStore(transfer_id, ids, slot):
                self._later(f"store {pod}{transfer_id}", self._fetch, tell, engine, transfer_id, ids, slot)
            case do.PutToStore(transfer_id, ids, _, slot):
                self._later(f"store {pod}{transfer_id}", self._put, tell, engine, transfer_id, ids, slot)
            case do.Announce(stored, removed):
                known = self.announced[pod]
                assert known.isdisjoint(stored)
                assert known.issuperset(removed)
                known.difference_update(removed)
                known.update(stored)
            case _:
                raise AssertionError(action)

    def _order(self, pod, action):
        engine, tell = (self.p_engine, self.to_p) if pod == "p" else (self.d_engine, self.to_d)
        engine.order(action)
        self._later(f"engine {pod}", lambda: tell(engine.work()))

    def _later(self, lane, act, *arguments):
        self.lanes.setdefault(lane, deque()).append((act, *arguments))

    # kvstore

    def _fetch(self, tell, engine, transfer_id, ids, slot):
        found = []
        for block_id in ids:
            if engine.key(block_id) not in self.store or self.store_is_away:
                break
            found.append(self.store[engine.key(block_id)])
        engine.slot_dtypes[slot] = engine.spec.dtype
        engine.slots[slot] = [{layer: list(kv) for layer, kv in block.items()} for block in found]
        tell(ev.StoreFetched(transfer_id, len(found)))

    def _put(self, tell, engine, transfer_id, ids, slot):
        assert engine.slot_dtypes[slot] is engine.spec.dtype
        assert not Rounded.anywhere(engine.slots[slot]), "what is kept is what was computed"
        if not self.store_is_away:
            for block_id, content in zip(ids, engine.slots[slot], strict=False):
                kept = self.store.setdefault(engine.key(block_id), {layer: list(kv) for layer, kv in content.items()})
                assert kept == content, "two contents under one id"
        tell(ev.StorePut(transfer_id))

    # fetches from the decode pod

    def _fetch_held(self, action):
        match action:
            case do.FetchHeld(transfer_id, _, call, slot):
                number = len(self.calls) + 1
                self.calls[number] = Call(transfer_id, call, slot)
                self.p_engine.slots[slot], self.p_engine.slot_dtypes[slot] = [], call.kv_spec.dtype
                if self.lends(call):
                    self._later(f"ask {number}", self.to_d, ev.FetchAsked(call, number))
            case do.CancelFetch(transfer_id):
                self.cut_call(max(n for n, call in self.calls.items() if call.transfer_id == transfer_id))

    def _lend(self, action):
        match action:
            case do.LendFrame(header, number, slot, payload_bytes):
                assert payload_bytes == header.payload_bytes(self.d_engine.spec)
                if self.calls[number].is_open:
                    content = [{layer: list(kv) for layer, kv in block.items()} for block in self.d_engine.slots[slot]]
                    self._later(f"lend {number}", self._lent, number, header, content)
            case do.EndFetch(number, reason):
                if self.calls[number].is_open:
                    if reason:
                        self.lanes.pop(f"lend {number}", None)
                    self._later(f"lend {number}", self._end_lent, number)

    def _lent(self, number, header, content):
        call = self.calls[number]
        spec = self.p_engine.spec
        assert header.key == call.call.key
        assert header.first_block == call.call.first_block + call.blocks
        assert (header.first_layer, header.layers, header.heads) == (0, spec.layers, spec.kv_heads)
        assert not Rounded.anywhere(content), "what is given back is what was computed"
        if self.spoil_lent(header):
            self._end_call(number)
            self._later("lost d", self.to_d, ev.FetchEnded(number))
            self._answer_fetch(call, is_damaged=True)
            return
        call.blocks += header.blocks
        self.p_engine.slots[call.slot] += content
        self._later(f"ask {number}", self.to_d, ev.FrameTaken(number))

    def _end_lent(self, number):
        self._end_call(number)
        self._answer_fetch(self.calls[number])

    def _end_call(self, number):
        self.calls[number].is_open = False
        for lane in ("ask", "lend"):
            self.lanes.pop(f"{lane} {number}", None)

    def _answer_fetch(self, call, *, is_damaged=False):
        call.is_told = True
        self.to_p(ev.HeldFetched(call.transfer_id, call.blocks, is_damaged))

    # streams

    def _connect(self, stream):
        self._later(f"wire {stream.number}", self.to_d, ev.HandoffOpened(stream.opening, stream.number))

    def _send(self, stream, action):
        payload = [{layer: list(kv) for layer, kv in block.items()} for block in self.p_engine.slots[action.slot]]
        header = action.header
        assert action.payload_bytes == header.blocks * header.layers * stream.opening.kv_spec.layer_bytes
        assert self.p_engine.slot_dtypes[action.slot] is header.dtype is stream.opening.kv_spec.dtype
        assert len(payload) == header.blocks
        self._later(f"wire {stream.number}", self._arrive, stream, header, payload)
        stream.unanswered -= 1
        self.to_p(ev.FrameSent(header.key, header.seq))

    def _arrive(self, stream, header, payload):
        damaged = self.damage(header)
        intact = damaged is None
        header = header if intact else damaged
        stream.arrivals.setdefault(header.seq, []).append(payload)
        self.to_d(ev.FrameArrived(header, intact, stream.number))

    def _commit(self, stream, commit):
        self._later(f"wire {stream.number}", self.to_d, ev.CommitArrived(commit, stream.number))

    def _payload(self, number, header):
        arrivals = self.streams[number].arrivals
        payload = arrivals[header.seq].pop(0)
        if not arrivals[header.seq]:
            del arrivals[header.seq]
        return payload

    def _say(self, stream, message):
        is_last = isinstance(message, LAST_MESSAGES)
        stream.is_welcomed = not is_last
        if stream.is_half:
            return
        if not stream.is_open:
            if not is_last:
                stream.is_welcomed = False
                self._later("lost d", self.to_d, ev.HandoffLost(stream.opening.key, "gone", stream.number))
            return
        self._later(f"back {stream.number}", self._hear_receiver, stream, message)

    def _hear_receiver(self, stream, message):
        if isinstance(message, LAST_MESSAGES):
            self._end_stream(stream)
            if stream.unanswered:
                self._lose_p(stream, "ended")
        self.to_p(ev.ReceiverSaid(stream.opening.key, message))

    def _end_stream(self, stream):
        stream.is_open = False
        self._drop_lanes(stream, "out", "wire", "back")
        if stream.is_welcomed:
            stream.is_welcomed = False
            self._later("lost d", self.to_d, ev.HandoffLost(stream.opening.key, "lost", stream.number))

    def _end_half(self, stream):
        stream.is_half = False
        if stream.is_welcomed:
            stream.is_welcomed = False
            self.to_d(ev.HandoffLost(stream.opening.key, "lost", stream.number))

    def _drop_lanes(self, stream, *lanes):
        for lane in lanes:
            self.lanes.pop(f"{lane} {stream.number}", None)

    def _lose_p(self, stream, reason):
        stream.unanswered = 0
        self._later("lost p", self.to_p, ev.HandoffLost(stream.opening.key, reason, stream.opening.attempt))

    # the router

    def _place(self, reservation):
        client = self.clients[reservation.request_id]
        if client.is_over or client.is_local:
            return
        key = HandoffKey(reservation.request_id, reservation.epoch)
        client.works[key] = []
        self.to_p(ev.WorkSubmitted(PrefillWork(client.request, reservation)))

    def _hear_p(self, key, word):
        client = next(client for client in self.clients.values() if key in client.works)
        client.works[key].append(word)
        is_newest = key.epoch == max(known.epoch for known in client.works)
        if isinstance(word, do.WorkFailed) and is_newest and not client.is_over:
            client.renewals += 1
            is_last = client.renewals > self.max_renewals
            event = ev.RequestCancelled(key.request_id) if is_last else ev.RenewAsked(key.request_id)
            self._later("router", self.to_d, event)

    def _hear_output(self, output):
        client = self.clients[output.request_id]
        assert not client.is_over
        client.tokens += output.token_ids
        assert (output.finish is None) == (output.report is None)
        if output.finish is not None:
            client.report = output.report
            self._end_client(client, output.finish)

    def _end_client(self, client, end):
        client.ends.append(end)
        if end in {FinishReason.STOP, FinishReason.LENGTH}:
            return
        for key, words in client.works.items():
            if not is_done(words):
                self._later("router", self.to_p, ev.WorkCancelled(key))


def is_done(words):
    """The last word about a work was said."""
    return any(not isinstance(word, do.WorkStarted) for word in words)


def damaged_header(header, seq=None):
    """What a receiver reads of a frame with a flipped bit in its number."""
    return replace(header, seq=header.seq if seq is None else seq)
