"""One work on a prefill pod: how far it is and what it holds. Owner: PrefillBrain; its parts change what is theirs.

    QUEUED -admitted-> RELOADING <-> FETCHING (from the decode pod, what that has and our pool has not)
                           -> LOOKING_UP -> RELOADING <-> FETCHING (from the kvstore)
                           -> COMPUTING -last chunk-> COMPUTED                            any -done, failed-> OVER

The handoff runs beside this from the first fetch from the kvstore, or chunk, on: what is in the pool is offered to the
sender at once.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

from kvoy.core.block_pool import BlockPool, HeldBlocks
from kvoy.core.frames import FrameHeader, HandoffKey
from kvoy.core.handoff_sender import Sender
from kvoy.core.step import Sampled, StepResult
from kvoy.core.types import KvSpec, PrefillReport, PrefillWork


class Phase(Enum):
    """Where the work is."""

    QUEUED = "queued"
    LOOKING_UP = "looking_up"
    """The kvstore is being asked what it has."""
    RELOADING = "reloading"
    """The next blocks are to be fetched, once a slot is free."""
    FETCHING = "fetching"
    """Blocks are on their way into the pool."""
    COMPUTING = "computing"
    COMPUTED = "computed"
    """The first token is known; what is left is the handoff."""
    OVER = "over"
    """It holds nothing. Slots that somebody still uses are the slots' own affair."""


class Source(Enum):
    """Where blocks come from that are not in our pool and need not be computed."""

    DECODE = "the decode pod of the request"
    STORE = "the kvstore"


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """``ids`` are those of all full blocks of the prompt. ``held`` is set from admission until OVER."""

    work: PrefillWork
    spec: KvSpec
    """Of our own pool."""
    arrival: int
    ids: list[bytes]
    sender: Sender
    phase: Phase = Phase.QUEUED
    held: HeldBlocks | None = None
    filled_tokens: int = 0
    """Leading tokens whose KV is in the pool: matched, reloaded or computed."""
    registered_blocks: int = 0
    source: Source = Source.DECODE
    """Is asked first."""
    source_blocks: int = 0
    """Leading blocks that are in our pool or to be had from ``source``."""
    stored_blocks: int = 0
    """Leading blocks that need no PutToStore: in our pool before, or in the kvstore."""
    slots_used: int = 0
    exported_frames: int = 0
    sent_frames: int = 0
    """Frames that were exported, or sent, at least once: those before this one."""
    is_started: bool = False
    """Its first chunk was given to the engine."""
    is_watched: bool = False
    """A time is set by which the receiver must say something."""
    is_welcomed: bool = False
    """Its decode pod has taken the handoff."""
    losses: int = 0
    """Streams that broke since it was last welcome."""
    lost_reason: str = ""
    first: Sampled | None = None
    report: PrefillReport = field(default_factory=PrefillReport)

    @property
    def key(self) -> HandoffKey:
        return self.sender.key

    @property
    def request_id(self) -> str:
        return self.work.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return self.work.request.prompt_tokens

    @property
    def block_tokens(self) -> int:
        return self.spec.block_tokens

    @property
    def prompt_blocks(self) -> int:
        return self.spec.blocks_for(self.prompt_tokens)

    @property
    def is_raw(self) -> bool:
        """Frames carry KV as our pool has it."""
        return self.sender.opening.is_raw

    @property
    def reusable_ids(self) -> list[bytes]:
        """Ids of blocks that a cache may give: never the last token's, which must be computed to be followed."""
        return self.ids[: (self.prompt_tokens - 1) // self.block_tokens]

    @property
    def lendable_blocks(self) -> int:
        """Leading blocks that the decode pod gives back and our pool takes as they are."""
        reservation = self.work.reservation
        return min(reservation.lendable_blocks, len(self.reusable_ids)) if reservation.kv_spec == self.spec else 0

    @property
    def table(self) -> list[int]:
        """Pool block of each block; empty while nothing is held."""
        return self.held.table if self.held is not None else []

    def payload_bytes(self, header: FrameHeader) -> int:
        """Of a frame of its handoff."""
        return header.payload_bytes(self.sender.opening.kv_spec)

    def chain(self, first: int, end: int) -> tuple[tuple[bytes, ...], bytes]:
        """Ids of full blocks, and of the block before them (empty: there is none)."""
        return tuple(self.ids[first:end]), self.ids[first - 1] if first else b""

    def fill(self, pool: BlockPool, filled_tokens: int) -> None:
        """That many leading tokens are in the pool now: full blocks become prefix cache, and all may be shipped."""
        self.filled_tokens = filled_tokens
        full = filled_tokens // self.block_tokens
        if self.held is not None:
            for index in range(self.registered_blocks, full):
                pool.register(self.held, index, self.ids[index], self.ids[index - 1] if index else b"")
        self.registered_blocks = max(self.registered_blocks, full)
        self.sender.offer(self.prompt_blocks if filled_tokens == self.prompt_tokens else full)

    def note_step(self, result: StepResult, tokens: int) -> None:
        """A step computed a chunk of so many tokens."""
        self.report = replace(
            self.report,
            first_step_started_at=self.report.first_step_started_at or result.started_at,
            last_step_started_at=result.started_at,
            last_step_ended_at=result.ended_at,
            chunks=self.report.chunks + 1,
            computed_tokens=self.report.computed_tokens + tokens,
        )
