"""The open streams of a decode pod's handoffs, and how much each sender may send.

Credits: a slot that is free and promised to nobody is spare. A handoff without a credit gets the next spare slot,
first come first served; one that gets on is topped up by half of what is spare. So a lone handoff has many, fifty
share few, and every promise can be kept at any moment. A promise ends with its stream. Knows no pool and no imports.
"""

from dataclasses import dataclass

from kvoy.core.actions import DecodeAction, SayToSender
from kvoy.core.decode_request import DecodeRequest
from kvoy.core.errors import InvariantError
from kvoy.core.frames import Ack, HandoffKey, Welcome
from kvoy.core.handoff import FrameSize
from kvoy.core.handoff_receiver import Receiver
from kvoy.core.staging import Slots


@dataclass(slots=True, eq=False)
class Stream:
    """An open stream. ``told`` is what the sender knows: (through_seq, granted)."""

    request: DecodeRequest
    receiver: Receiver
    size: FrameSize
    """The most that a frame of this sender carries into a slot of ours."""
    told: tuple[int, int] | None = None

    @property
    def is_thirsty(self) -> bool:
        """The sender has frames to send and no credit."""
        return self.receiver.is_open and not self.receiver.unclaimed and self.wants_frames

    @property
    def may_wait(self) -> bool:
        """The sender need not hear now what it does not know yet: half of the credits of the last word are still there
        for it, and an import is under way, so that there will be more to say."""
        if self.told is None or self.receiver.commit is not None or not self.request.open_imports:
            return False
        through, granted = self.told
        left = self.receiver.unclaimed_of(granted)
        return left > 1 and 2 * left >= granted - through - 1

    @property
    def wants_frames(self) -> bool:
        return self.receiver.commit is None and self.receiver.missing_layers > 0


class Credits:
    """Owner: Ingest. Streams come in with ``add``, and begin to count with ``welcome``."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._streams: dict[HandoffKey, Stream] = {}
        self._thirsty: dict[HandoffKey, Stream] = {}
        """First come, first served."""
        self._unheard: dict[HandoffKey, Stream] = {}
        """Their senders may not know what is acknowledged or granted."""
        self.kept_slots = 0
        """Of the slots that nobody was promised, those that somebody else waits for: no sender is promised them."""

    @property
    def unpromised_slots(self) -> int:
        """Slots that are free and promised to no sender."""
        return self._slots.free - sum(stream.receiver.unclaimed for stream in self._streams.values())

    @property
    def spare_slots(self) -> int:
        """Slots that are free and promised to nobody."""
        return max(0, self.unpromised_slots - self.kept_slots)

    @property
    def has_thirst(self) -> bool:
        """Some sender waits for a credit."""
        return bool(self._thirsty)

    def check(self) -> None:
        """Every promise can be kept; streams and requests name each other."""
        if self.unpromised_slots < 0:
            raise InvariantError(f"{-self.unpromised_slots} frames more are promised a slot than there are slots")
        for key, stream in self._streams.items():
            if stream.request.receiver is not stream.receiver or key != stream.request.key:
                raise InvariantError(f"the open stream {key} belongs to no request")
            if not stream.receiver.has_stream:
                raise InvariantError(f"{key} is {stream.receiver.state.value}, but its stream is open")
        if any(stream.is_thirsty != (key in self._thirsty) for key, stream in self._streams.items()):
            raise InvariantError("a stream without credit is not in the queue for credits, or one with credit is")

    def find(self, key: HandoffKey, number: int | None = None) -> Stream | None:
        """The open stream of this handoff, if it is that one."""
        stream = self._streams.get(key)
        return stream if stream is not None and number in {None, stream.receiver.stream} else None

    def add(self, request: DecodeRequest, receiver: Receiver, size: FrameSize) -> Stream:
        """A sender has opened a stream; it waits for its welcome."""
        stream = self._streams[receiver.key] = Stream(request, receiver, size)
        return stream

    def forget(self, key: HandoffKey) -> None:
        """The stream is over."""
        self._thirsty.pop(key, None)
        self._unheard.pop(key, None)
        self._streams.pop(key, None)

    def welcome(self, stream: Stream) -> None:
        """The sender may begin, with what credit there is."""
        stream.receiver.welcome()
        self.share_out(stream)

    def note_thirst(self, stream: Stream) -> None:
        """What is wanted or promised on this stream has changed."""
        if not stream.is_thirsty:
            self._thirsty.pop(stream.receiver.key, None)
        elif stream.receiver.key not in self._thirsty:
            self._thirsty[stream.receiver.key] = stream

    def share_out(self, stream: Stream) -> None:
        """Credits for those without, then more for this one, which gets on."""
        key = stream.receiver.key
        self._unheard[key] = stream
        self.note_thirst(stream)
        self._quench()
        if self._thirsty or not stream.wants_frames:
            return
        frames_left = -(-stream.receiver.missing_layers // (stream.size.blocks * stream.size.layers))
        window = min(max(1, self._slots.total // 2), frames_left)
        extra = min(window - stream.receiver.unclaimed, self.spare_slots // 2)
        if extra > 0:
            stream.receiver.grant(extra)

    def speak(self, out: list[DecodeAction]) -> None:
        """Credits to those without, as far as slots are spare, and to every sender what it does not know yet, unless
        that may wait: a word for several frames costs no more than one for each."""
        self._quench()
        for stream in self._unheard.values():
            if not stream.may_wait:
                self._tell(stream, out)
        self._unheard = {key: stream for key, stream in self._unheard.items() if stream.may_wait}

    def _quench(self) -> None:
        while self._thirsty and self.spare_slots > 0:
            key = next(iter(self._thirsty))
            stream = self._unheard[key] = self._thirsty.pop(key)
            stream.receiver.grant(1)

    def _tell(self, stream: Stream, out: list[DecodeAction]) -> None:
        """What is acknowledged and how much may come, if the sender does not know it. A first word is a welcome, and
        so is every other one until there is something to acknowledge."""
        receiver = stream.receiver
        through, granted = receiver.through_seq, receiver.granted
        if stream.told == (through, granted):
            return
        stream.told = (through, granted)
        credit = granted - through - 1
        message = Ack(through, credit) if through >= receiver.base else Welcome(credit, receiver.base)
        out.append(SayToSender(receiver.key, receiver.stream, receiver.say(message)))
