"""The decode pod's end of a handoff, without I/O: says which frames are wanted, and when everything has come.

A frame is taken when its shape fits the request, each layer of each block exactly once, within the credits given.
Validates before it changes anything. It does not know slots or the pool: kvoy.core.ingest does.
"""

from collections.abc import Iterator
from enum import Enum

from kvoy.core.errors import InvariantError
from kvoy.core.frames import Commit, Committed, FrameHeader, HandoffKey, Opening, Refused
from kvoy.core.handoff import RECEIVER, HandoffState


class Verdict(Enum):
    """What becomes of a frame or of a Commit that arrived."""

    TAKE = "take"
    DUPLICATE = "duplicate"
    INVALID = "invalid"


class Receiver:
    """The decode pod's end. It wants blocks ``[first_block, end_block)`` whole, each layer of each exactly once."""

    def __init__(self, opening: Opening, stream: int, slot_bytes: int, first_block: int, end_block: int) -> None:
        self.opening = opening
        self.stream = stream
        self.state = HandoffState.STREAMING
        self.granted = 0
        """Frames 0 .. granted - 1 may come."""
        self.commit: Commit | None = None
        self._slot_bytes = slot_bytes
        self._first_block = first_block
        self._taken_layers = [0] * (end_block - first_block)
        self._imported_layers = [0] * (end_block - first_block)
        self._taken: set[int] = set()
        self._imported: set[int] = set()
        self._through = -1
        self._highest = -1

    @property
    def key(self) -> HandoffKey:
        return self.opening.key

    @property
    def is_open(self) -> bool:
        """The sender may still send, or is waiting for Committed."""
        return (self.state, FrameHeader) in RECEIVER

    @property
    def through_seq(self) -> int:
        """All frames up to this one are imported; -1 at first."""
        return self._through

    @property
    def unclaimed(self) -> int:
        """Credits given for which no frame has been taken."""
        return self.granted - len(self._taken)

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
        return self._first_block + whole

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

    def grant(self, credit: int) -> None:
        """Promise the sender room for so many more frames."""
        self.granted += credit

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
        skipped = tuple(range(self._highest + 1, header.seq))
        self._highest = max(self._highest, header.seq)
        return skipped

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

    def hear_commit(self, commit: Commit) -> tuple[Verdict, tuple[int, ...]]:
        """TAKE also names the frames that never came. INVALID: the handoff cannot be what the sender says it is."""
        if self.commit is not None:
            return (Verdict.DUPLICATE if commit == self.commit else Verdict.INVALID), ()
        if (self.state, Commit) not in RECEIVER or not self._highest < commit.frames <= self.granted:
            return Verdict.INVALID, ()
        self.state = RECEIVER[self.state, Commit]
        self.commit = commit
        self.granted = commit.frames
        skipped = tuple(range(self._highest + 1, commit.frames))
        self._highest = commit.frames - 1
        return Verdict.TAKE, skipped

    def say(self, message: Committed | Refused) -> Committed | Refused:
        """The last word to the sender. Ask ``is_open`` first."""
        if (self.state, type(message)) not in RECEIVER:
            raise InvariantError(f"{self.key} said {type(message).__name__} while {self.state.value}")
        self.state = RECEIVER[self.state, type(message)]
        return message

    def lose(self) -> None:
        """The stream is gone."""
        self.state = HandoffState.ENDED

    def _is_shaped(self, header: FrameHeader) -> bool:
        spec = self.opening.kv_spec
        return (
            header.key == self.key
            and header.dtype is spec.dtype
            and (header.first_head, header.heads) == (0, spec.kv_heads)
            and header.layers >= 1
            and 0 <= header.first_layer <= spec.layers - header.layers
            and header.blocks >= 1
            and self._first_block <= header.first_block
            and header.first_block + header.blocks <= self._first_block + len(self._taken_layers)
            and header.blocks * header.layers * spec.layer_bytes <= self._slot_bytes
        )

    def _places(self, header: FrameHeader) -> range:
        first = header.first_block - self._first_block
        return range(first, first + header.blocks)

    def _masks(self, header: FrameHeader) -> Iterator[int]:
        return (self._taken_layers[index] for index in self._places(header))


def _layer_mask(header: FrameHeader) -> int:
    return ((1 << header.layers) - 1) << header.first_layer
