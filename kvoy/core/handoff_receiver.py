"""The decode pod's end of a handoff, without I/O: says which frames are wanted, and when everything has come.

A frame is taken when its shape fits the request, each layer of each block exactly once, within the credits given.
It outlives its stream: another one goes on where it broke. Counts the sender's blocks; kvoy.core.landing knows what
they are to ours. Validates before it changes anything. It does not know slots or the pool: kvoy.core.ingest does.
"""

from collections.abc import Iterator
from enum import Enum
from typing import TypeVar

from kvoy.core.errors import InvariantError
from kvoy.core.frames import Commit, FrameHeader, HandoffKey, Opening, ReceiverMessage, Welcome
from kvoy.core.handoff import TRANSITIONS, HandoffState, Lost
from kvoy.core.landing import Landing

Word = TypeVar("Word", bound=ReceiverMessage)


class Verdict(Enum):
    """What becomes of a frame or of a Commit that arrived."""

    TAKE = "take"
    DUPLICATE = "duplicate"
    INVALID = "invalid"


class Receiver:
    """The decode pod's end. It wants the blocks of ``landing`` whole, each layer of each exactly once."""

    def __init__(self, opening: Opening, stream: int, slot_bytes: int, landing: Landing) -> None:
        self.opening = opening
        """Of the present stream, or of the last one."""
        self.stream = stream
        self.past_streams: set[int] = set()
        self.state = HandoffState.OPENING
        self.landing = landing
        self.base = 0
        """The first frame that was to come on this stream."""
        self.granted = 0
        """Frames 0 .. granted - 1 may come."""
        self.commit: Commit | None = None
        self._slot_bytes = slot_bytes
        self._blocks = landing.blocks
        self._taken_layers = [0] * len(self._blocks)
        self._imported_layers = [0] * len(self._blocks)
        self._taken: set[int] = set()
        self._imported: set[int] = set()
        self._through = -1
        self._highest = -1

    @property
    def key(self) -> HandoffKey:
        return self.opening.key

    @property
    def has_stream(self) -> bool:
        """Its sender can be told something."""
        return (self.state, Lost) in TRANSITIONS

    @property
    def is_open(self) -> bool:
        """The sender may still send, or is waiting for Committed."""
        return (self.state, FrameHeader) in TRANSITIONS

    @property
    def through_seq(self) -> int:
        """All frames up to this one are imported; -1 at first."""
        return self._through

    @property
    def unclaimed(self) -> int:
        """Credits given for which no frame has been taken."""
        return self.unclaimed_of(self.granted)

    def unclaimed_of(self, granted: int) -> int:
        """The same, if only the first ``granted`` are counted."""
        return sum(seq not in self._taken for seq in range(self._through + 1, granted))

    @property
    def missing_layers(self) -> int:
        """Layers of blocks for which no frame has been taken."""
        every = self.opening.kv_spec.layers * len(self._taken_layers)
        return every - sum(mask.bit_count() for mask in self._taken_layers)

    @property
    def whole_blocks(self) -> int:
        """Leading blocks of the request that are wholly in the pool, those held before among them."""
        layers = self.opening.kv_spec.layers
        whole = 0
        while whole < len(self._imported_layers) and self._imported_layers[whole] == layers:
            whole += 1
        return self._blocks.start + whole

    @property
    def whole_tokens(self) -> int:
        """Leading tokens of the request that are wholly in the pool."""
        return self.landing.whole_tokens(self.whole_blocks)

    @property
    def has_all_frames(self) -> bool:
        """The Commit and every frame have come; imports may be under way."""
        return self.commit is not None and len(self._taken) == self.commit.frames

    @property
    def is_hopeless(self) -> bool:
        """All frames have come, and they are not all the blocks."""
        return self.has_all_frames and self.missing_layers > 0

    @property
    def is_complete(self) -> bool:
        """Everything is in the pool."""
        return self.has_all_frames and len(self._imported) == len(self._taken) and not self.missing_layers

    def welcome(self) -> None:
        """The stream may begin, after what has been acknowledged."""
        self._go(Welcome)
        self.base = self._through + 1

    def lose(self) -> None:
        """The stream broke, or another one takes its place: its promises are void, and what has not been taken is to
        be sent again. A commit of more than has come is to be said again as well."""
        self._go(Lost)
        self.past_streams.add(self.stream)
        self.granted = self._through + 1
        self._highest = self._through
        if not self.has_all_frames:
            self.commit = None

    def reopen(self, opening: Opening, stream: int) -> None:
        """The sender has opened another stream; it waits for its welcome."""
        self._go(Opening)
        self.opening = opening
        self.stream = stream

    def grant(self, credit: int) -> None:
        """Promise the sender room for so many more frames; frames that were taken need none."""
        for _ in range(credit):
            while self.granted in self._taken:
                self.granted += 1
            self.granted += 1

    def judge(self, header: FrameHeader) -> Verdict:
        """Whether an intact frame of this handoff is wanted."""
        if header.seq in self._taken:
            return Verdict.DUPLICATE
        if not self.is_open or not 0 <= header.seq < self.granted or not self._is_shaped(header):
            return Verdict.INVALID
        if any(mask & _layer_mask(header) for mask in self._masks(header)):
            return Verdict.INVALID
        return Verdict.TAKE

    def take(self, header: FrameHeader) -> tuple[int, ...]:
        """The frame is on its way into the pool. Returns the frames that should have come before it and never did."""
        if self.judge(header) is not Verdict.TAKE:
            raise InvariantError(f"{self.key} took frame {header.seq}, which it does not want")
        for index in self._places(header):
            self._taken_layers[index] |= _layer_mask(header)
        self._taken.add(header.seq)
        return self._skipped(header.seq)

    def untake(self, header: FrameHeader) -> bool:
        """What was taken was not what was sent. True: ask for it again; else it comes again with the next stream, and
        so does the commit."""
        for index in self._places(header):
            self._taken_layers[index] &= ~_layer_mask(header)
        self._taken.remove(header.seq)
        if not self.is_open:
            self.commit = None
        return self.is_open

    def damaged(self, seq: int) -> bool:
        """A frame came damaged, ``seq`` if its header can be believed. True: ask for that one again."""
        if not self.is_open or seq in self._taken or not 0 <= seq < min(self.granted, self._highest + 2):
            return False
        self._highest = max(self._highest, seq)
        return True

    def imported(self, header: FrameHeader) -> None:
        """The frame is in the pool."""
        self._imported.add(header.seq)
        for index in self._places(header):
            self._imported_layers[index] += header.layers
        while self._through + 1 in self._imported:
            self._through += 1
        self.granted = max(self.granted, self._through + 1)

    def hear_commit(self, commit: Commit) -> tuple[Verdict, tuple[int, ...]]:
        """TAKE also names the frames that never came. INVALID: the handoff cannot be what the sender says it is."""
        if self.commit is not None:
            return (Verdict.DUPLICATE if commit == self.commit else Verdict.INVALID), ()
        highest = max(self._taken, default=-1)
        if (self.state, Commit) not in TRANSITIONS or not max(highest, self._highest) < commit.frames <= self.granted:
            return Verdict.INVALID, ()
        self._go(Commit)
        self.commit = commit
        self.granted = commit.frames
        return Verdict.TAKE, self._skipped(commit.frames)

    def say(self, message: Word) -> Word:
        """What the sender is told. Ask ``has_stream`` first."""
        self._go(type(message))
        return message

    def _go(self, what: type) -> None:
        if (self.state, what) not in TRANSITIONS:
            raise InvariantError(f"{self.key}: {what.__name__} while {self.state.value}")
        self.state = TRANSITIONS[self.state, what]

    def _skipped(self, seq: int) -> tuple[int, ...]:
        """Frames before ``seq`` that should have come and never did, each told once on a stream."""
        first = self._highest + 1
        self._highest = max(self._highest, seq)
        return tuple(missing for missing in range(first, seq) if missing not in self._taken)

    def _is_shaped(self, header: FrameHeader) -> bool:
        spec = self.opening.kv_spec
        return (
            header.key == self.key
            and header.dtype is spec.dtype
            and (header.first_head, header.heads) == (0, spec.kv_heads)
            and header.layers >= 1
            and 0 <= header.first_layer <= spec.layers - header.layers
            and header.blocks >= 1
            and self._blocks.start <= header.first_block
            and header.first_block + header.blocks <= self._blocks.stop
            and header.payload_bytes(spec) <= self._slot_bytes
        )

    def _places(self, header: FrameHeader) -> range:
        first = header.first_block - self._blocks.start
        return range(first, first + header.blocks)

    def _masks(self, header: FrameHeader) -> Iterator[int]:
        return (self._taken_layers[index] for index in self._places(header))


def _layer_mask(header: FrameHeader) -> int:
    return ((1 << header.layers) - 1) << header.first_layer
