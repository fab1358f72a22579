"""The streams of handoffs between the two pods: which are open, and what is on its way in them.

What is on its way when a stream ends is lost, unless only the prefill pod knows of the end. A payload that arrived
stays here until the decode pod takes or drops it. What is damaged is the caller's to choose; who is told of an end, and
when, is decided here and nowhere else.
"""

from dataclasses import dataclass, field

from kvoy.core import events as ev
from kvoy.core.frames import Committed, Refused

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

    def take(self, seq):
        """The oldest payload that arrived under this number."""
        payload = self.arrivals[seq].pop(0)
        if not self.arrivals[seq]:
            del self.arrivals[seq]
        return payload


class Handoffs:
    def __init__(self, lanes, p, d):
        self.streams = {}
        self.damage = lambda _: None
        """The header that is read instead of this one, whose number may be wrong; None: it came as it was sent."""
        self.spoil = lambda _: False
        """Whether the payload of this frame is not what was sent, though the header is."""
        self._newest = {}
        """What the prefill pod knows as the stream of each handoff."""
        self._lanes, self._p, self._d = lanes, p, d

    # what happens to connections

    def cut(self, number, *, half):
        stream = self.streams[number]
        if not stream.is_open:
            return
        if half:
            stream.is_half, stream.is_open = True, False
            self._drop_lanes(stream, "out", "back")
            self._lanes.later(f"wire {stream.number}", self._end_half, stream)
        else:
            self._end(stream)
        self._lose_p(stream, "cut")

    def end_all(self):
        """The prefill pod is killed."""
        for stream in self.streams.values():
            stream.unanswered = 0
            if stream.is_open:
                self._end(stream)
        self._lanes.drop("lost p")

    def assert_clean(self):
        assert not any(stream.arrivals for stream in self.streams.values()), "a payload was never taken nor dropped"
        assert not any(stream.unanswered for stream in self.streams.values())

    # what the prefill pod orders

    def open(self, opening):
        before = self._newest.get(opening.key)
        assert not opening.attempt or not before.is_open
        number = len(self.streams) + 1
        stream = self.streams[number] = self._newest[opening.key] = Stream(number, opening)
        self._lanes.later(f"out {number}", self._connect, stream)

    def send_frame(self, action):
        stream = self._newest[action.header.key]
        assert stream.opening.attempt == action.attempt
        stream.unanswered += 1
        if stream.is_open:
            self._lanes.later(f"out {stream.number}", self._send, stream, action)
        else:
            self._lose_p(stream, "ended before")

    def send_commit(self, commit):
        stream = self._newest[commit.key]
        if stream.is_open:
            self._lanes.later(f"out {stream.number}", self._commit, stream, commit)

    def close(self, key):
        stream = self._newest[key]
        if stream.is_open:
            self._end(stream)
            if stream.unanswered:
                self._lose_p(stream, "closed")

    # what the decode pod orders

    def import_frame(self, action):
        header, number = action.header, action.stream
        payload = self.streams[number].take(header.seq)
        if self.spoil(header):
            self._lanes.later(f"verify {number}", self._d.tell, ev.FrameBad(action.transfer_id))
        else:
            self._d.fill_slot(action.slot, payload, header.dtype)
            self._d.order(action)

    def drop_frame(self, header, number):
        self.streams[number].take(header.seq)

    def say(self, number, message):
        stream = self.streams[number]
        is_last = isinstance(message, LAST_MESSAGES)
        stream.is_welcomed = not is_last
        if stream.is_half:
            return
        if not stream.is_open:
            if not is_last:
                stream.is_welcomed = False
                self._lanes.later("lost d", self._d.tell, ev.HandoffLost(stream.opening.key, "gone", stream.number))
            return
        self._lanes.later(f"back {stream.number}", self._hear_receiver, stream, message)

    # what is on its way

    def _connect(self, stream):
        self._lanes.later(f"wire {stream.number}", self._d.tell, ev.HandoffOpened(stream.opening, stream.number))

    def _send(self, stream, action):
        payload = self._p.read_slot(action.slot)
        header = action.header
        assert action.payload_bytes == header.blocks * header.layers * stream.opening.kv_spec.layer_bytes
        assert self._p.engine.slot_dtypes[action.slot] is header.dtype is stream.opening.kv_spec.dtype
        assert len(payload) == header.blocks
        self._lanes.later(f"wire {stream.number}", self._arrive, stream, header, payload)
        stream.unanswered -= 1
        self._p.tell(ev.FrameSent(header.key, header.seq))

    def _arrive(self, stream, header, payload):
        damaged = self.damage(header)
        intact = damaged is None
        header = header if intact else damaged
        stream.arrivals.setdefault(header.seq, []).append(payload)
        self._d.tell(ev.FrameArrived(header, intact, stream.number))

    def _commit(self, stream, commit):
        self._lanes.later(f"wire {stream.number}", self._d.tell, ev.CommitArrived(commit, stream.number))

    def _hear_receiver(self, stream, message):
        if isinstance(message, LAST_MESSAGES):
            self._end(stream)
            if stream.unanswered:
                self._lose_p(stream, "ended")
        self._p.tell(ev.ReceiverSaid(stream.opening.key, message))

    # how a stream ends

    def _end(self, stream):
        stream.is_open = False
        self._drop_lanes(stream, "out", "wire", "back")
        if stream.is_welcomed:
            stream.is_welcomed = False
            self._lanes.later("lost d", self._d.tell, ev.HandoffLost(stream.opening.key, "lost", stream.number))

    def _end_half(self, stream):
        stream.is_half = False
        if stream.is_welcomed:
            stream.is_welcomed = False
            self._d.tell(ev.HandoffLost(stream.opening.key, "lost", stream.number))

    def _lose_p(self, stream, reason):
        stream.unanswered = 0
        event = ev.HandoffLost(stream.opening.key, reason, stream.opening.attempt)
        self._lanes.later("lost p", self._p.tell, event)

    def _drop_lanes(self, stream, *lanes):
        self._lanes.drop(*[f"{lane} {stream.number}" for lane in lanes])
