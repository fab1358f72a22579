"""A prefill brain and a decode brain, wired by a toy of everything around them, one event at a time.

What may happen next waits in lanes. ``do`` lets one thing happen, ``settle`` all of them. Faults (a damaged frame or
payload, a cut stream, a kvstore that is away) are the caller's to choose. After every event both brains prove their
invariants. Each part (``world_*``) owns its state; here is what a test does to all of them, and whose each order is.
"""

from dataclasses import replace
from functools import partial

from kvoy.core import actions as do
from kvoy.core.decode import DecodeBrain, DecodeParams
from kvoy.core.prefill import PrefillBrain, PrefillParams
from tests.core.toy import CONTEXT_TOKENS, FINGERPRINT, SPEC, ToyEngine
from tests.core.world_fetches import Fetches
from tests.core.world_handoffs import Handoffs
from tests.core.world_lanes import Lanes
from tests.core.world_pod import Pod
from tests.core.world_router import Router
from tests.core.world_store import Store


def part(owner, name):
    """What a part owns, under the world's name for it."""

    def read(world):
        return getattr(getattr(world, owner), name)

    def write(world, value):
        setattr(getattr(world, owner), name, value)

    return property(read, write)


class World:
    now = part("_lanes", "now")
    p = part("_p_pod", "brain")
    d = part("_d_pod", "brain")
    store = part("_kvstore", "blocks")
    store_is_away = part("_kvstore", "is_away")
    streams = part("_handoffs", "streams")
    damage = part("_handoffs", "damage")
    spoil = part("_handoffs", "spoil")
    calls = part("_fetches", "calls")
    lends = part("_fetches", "lends")
    spoil_lent = part("_fetches", "spoil_lent")
    clients = part("_router", "clients")

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
        fresh_p = partial(
            PrefillBrain,
            prefill or PrefillParams(chunk_tokens=8),
            spec, prefill_blocks, slots, slot_bytes, context_tokens, use_store, FINGERPRINT,
        )  # fmt: skip
        fresh_d = partial(
            DecodeBrain,
            decode or DecodeParams(chunk_tokens=8, max_batch=4),
            decode_spec, decode_blocks, slots, decode_slot_bytes, context_tokens, use_store, FINGERPRINT, "decode:1",
        )  # fmt: skip
        fresh_p_engine = partial(fresh_engine, spec, prefill_blocks, slots, slot_bytes)
        fresh_d_engine = partial(fresh_engine, decode_spec, decode_blocks, slots, decode_slot_bytes)
        self.log = []
        """(pod, event or action), as they came."""
        self._lanes = Lanes()
        self._p_pod = Pod("p", fresh_p, fresh_p_engine, self._lanes, self.log, self._perform_p)
        self._d_pod = Pod("d", fresh_d, fresh_d_engine, self._lanes, self.log, self._perform_d)
        wired = (self._lanes, self._p_pod, self._d_pod)
        self._kvstore = Store(self._lanes)
        self._handoffs = Handoffs(*wired)
        self._fetches = Fetches(*wired)
        self._router = Router(*wired, context_tokens, max_renewals)

    # what a test does

    def ask(self, request, *, local=False):
        """The router places a request on the decode pod."""
        self._router.ask(request, local)

    def cancel(self, request_id):
        """The router cancels on both pods."""
        self._router.cancel(request_id)

    def cancel_work(self, request_id):
        """The router takes the work back from the prefill pod only."""
        self._router.cancel_work(request_id)

    def renew(self, request_id):
        """The router believes the prefill pod lost, and it need not be."""
        self._router.renew(request_id)

    def cut(self, number, *, half=False):
        """A connection breaks: what is on its way is gone, both ends hear of it. ``half``: only the prefill pod does,
        and what is on its way to the decode pod still gets there, however late."""
        self._handoffs.cut(number, half=half)

    def cut_call(self, number):
        """The connection of a fetch breaks."""
        self._fetches.cut(number)

    def kill_p(self):
        """The prefill pod is killed and another one, which knows nothing, takes its place; the router sees the works
        that are lost, and asks for new epochs."""
        self._handoffs.end_all()
        self._fetches.end_all()
        self._kvstore.forget_orders_of_p()
        self._p_pod.replace()
        self._router.lose_works()

    def to_p(self, event):
        self._p_pod.tell(event)

    def to_d(self, event):
        self._d_pod.tell(event)

    def advance(self, seconds):
        """Time passes; deadlines come due one after the other."""
        until = self.now + seconds
        while deadlines := [at for at in self._deadlines if at <= until]:
            self.now = max(self.now, min(deadlines))
            self._p_pod.tick()
            self._d_pod.tick()
        self.now = until

    def choices(self):
        """Lanes in which something may happen next."""
        return self._lanes.choices()

    def do(self, name):
        """Let the next thing of this lane happen."""
        self._lanes.do(name)

    def settle(self, pick=lambda names: names[0], limit=20_000):
        """Let everything happen, and time pass where nothing else does, until both pods are idle."""
        for _ in range(limit):
            if names := self.choices():
                self.do(pick(names))
            elif deadlines := self._deadlines:
                self.advance(max(0.0, min(deadlines) - self.now))
            else:
                assert self.p.is_idle, "nothing can happen, and the prefill pod is not idle"
                assert self.d.is_idle, "nothing can happen, and the decode pod is not idle"
                return
        raise AssertionError("the pods never come to rest")

    def assert_clean(self):
        """Nothing is held for anybody; every request has ended exactly once, and rightly."""
        self._p_pod.assert_nothing_held()
        self._d_pod.assert_nothing_held()
        self._handoffs.assert_clean()
        self._fetches.assert_clean()
        self._router.assert_clean()
        p, d = self.p.counters, self.d.counters
        assert p.submitted == p.done + sum(getattr(p, name) for name in p.__slots__ if name.startswith("failed_"))
        ended = [getattr(d, name) for name in d.__slots__ if name.startswith(("finished_", "rejected_"))]
        assert d.asked == sum(ended)

    def assert_replays(self):
        """Fresh brains that are told the same do the same: nothing but events and their times decides."""
        self._p_pod.assert_replays()
        self._d_pod.assert_replays()

    @property
    def _deadlines(self):
        return [at for at in (self.p.next_deadline(), self.d.next_deadline()) if at is not None]

    # whose each order is

    def _perform_p(self, action):
        match action:
            case do.OpenHandoff(_, opening):
                self._handoffs.open(opening)
            case do.SendFrame():
                self._handoffs.send_frame(action)
            case do.SendCommit(commit):
                self._handoffs.send_commit(commit)
            case do.CloseHandoff(key):
                self._handoffs.close(key)
            case do.FetchHeld(transfer_id, _, call, slot):
                self._fetches.ask(transfer_id, call, slot)
            case do.CancelFetch(transfer_id):
                self._fetches.cancel(transfer_id)
            case do.WorkStarted(key) | do.WorkDone(key) | do.WorkFailed(key):
                self._router.hear_work(key, action)
            case _:
                self._perform_shared(self._p_pod, action)

    def _perform_d(self, action):
        match action:
            case do.SayReserved(_, reservation):
                self._router.hear_reservation(reservation)
            case do.SayRejected(_, request_id, reason):
                self._router.hear_rejection(request_id, reason)
            case do.SayOutputs(_, outputs):
                for output in outputs:
                    self._router.hear_output(output)
            case do.ImportFrame():
                self._handoffs.import_frame(action)
            case do.DropFrame(header, number):
                self._handoffs.drop_frame(header, number)
            case do.SayToSender(_, number, message):
                self._handoffs.say(number, message)
            case do.LendFrame(header, number, slot, payload_bytes):
                self._fetches.lend(header, number, slot, payload_bytes)
            case do.EndFetch(number, reason):
                self._fetches.end(number, reason)
            case do.NoteExposed(seconds):
                assert seconds >= 0
            case _:
                self._perform_shared(self._d_pod, action)

    def _perform_shared(self, pod, action):
        match action:
            case do.RunStep() | do.ExportBlocks() | do.ImportSlot():
                pod.order(action)
            case do.LookUpStore(request_id, ids):
                self._kvstore.look_up(pod, request_id, ids)
            case do.FetchFromStore(transfer_id, ids, slot):
                self._kvstore.fetch(pod, transfer_id, ids, slot)
            case do.PutToStore(transfer_id, ids, _, slot):
                self._kvstore.put(pod, transfer_id, ids, slot)
            case do.Announce(stored, removed):
                pod.announce(stored, removed)
            case _:
                raise AssertionError(action)


def fresh_engine(spec, pool_blocks, slots, slot_bytes):
    return ToyEngine(spec, pool_blocks, [[] for _ in range(slots)], slot_bytes)


def damaged_header(header, seq=None):
    """What a receiver reads of a frame with a flipped bit in its number."""
    return replace(header, seq=header.seq if seq is None else seq)
