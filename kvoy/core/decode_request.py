"""One request on a decode pod: how far it is and what it holds. Owner: DecodeBrain; its parts change what is theirs.

    WAITING -blocks-> RESERVED -handoff complete-> RUNNING -stop, length-> OVER
       |  ^                                           |
       |  +----------------- preempted ---------------+
       +-blocks, and its KV is computed here----------^           any -cancelled, late, rejected-> OVER

While it runs, filled tokens catch up with known tokens: one behind, it decodes; more behind, it prefills here.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

from kvoy.core.block_pool import BlockPool, HeldBlocks
from kvoy.core.frames import FrameHeader, HandoffKey
from kvoy.core.handoff_receiver import Receiver
from kvoy.core.hashing import block_ids
from kvoy.core.types import DecodeReport, FinishReason, KvSpec, Request


class Phase(Enum):
    """Where the request is."""

    WAITING = "waiting"
    """For blocks; it holds nothing."""
    RESERVED = "reserved"
    """It has blocks under a lease; its KV comes from a prefill pod."""
    RUNNING = "running"
    OVER = "over"
    """It holds nothing. Imports under way keep their own hold on blocks and slots."""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """``tokens`` are the prompt and all that followed. ``held`` is set while RESERVED and RUNNING."""

    request: Request
    source: str
    is_local: bool
    """No handoff: the prompt is prefilled here."""
    arrival: int
    spec: KvSpec
    tokens: list[int]
    phase: Phase = Phase.WAITING
    held: HeldBlocks | None = None
    filled_tokens: int = 0
    """Leading tokens whose KV is in the pool."""
    is_exact: bool = True
    """Its KV is bit for bit what an engine computed, of KV that is so too."""
    whole_blocks: int = 0
    """Leading blocks of the prompt that a prefill pod need not ship (again)."""
    registered_blocks: int = 0
    ids: list[bytes] = field(default_factory=list)
    """Of the leading full blocks, as far as they were asked for."""
    epoch: int = 0
    """Counts from 1 with the first reservation."""
    lease: str = ""
    is_renewing: bool = False
    """A new epoch has begun and is said once the imports of the old one are over."""
    is_renewal_due: bool = False
    """A new epoch was asked for when all frames had come; it begins if one of them turns out to be damaged."""
    is_opened: bool = False
    """A handoff of this epoch was opened; there is no second one."""
    receiver: Receiver | None = None
    """Of the handoff of this epoch, until it is over; it may be without a stream."""
    open_imports: int = 0
    lent_blocks: int = 0
    """Blocks before this one were lent under the present lease, or asked for after others: they are not lent again."""
    prefill_ended_at: float = 0.0
    """When its prefill pod knew the first token, as that pod's clock has it; 0: no prefill pod did."""
    report: DecodeReport = field(default_factory=DecodeReport)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def key(self) -> HandoffKey:
        return HandoffKey(self.request_id, self.epoch)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def is_new(self) -> bool:
        """The router has not been told that it has blocks."""
        return not self.epoch

    @property
    def prompt_blocks(self) -> int:
        return self.spec.blocks_for(self.request.prompt_tokens)

    @property
    def is_receiving(self) -> bool:
        """A stream of its handoff is open."""
        return self.receiver is not None and self.receiver.has_stream

    @property
    def held_tokens(self) -> int:
        """Leading tokens of the prompt that a prefill pod need not ship (again)."""
        return min(self.request.prompt_tokens, self.whole_blocks * self.spec.block_tokens)

    @property
    def received_blocks(self) -> int:
        """Leading blocks of the prompt that came by handoff and are whole."""
        return self.whole_blocks - self.report.held_tokens // self.spec.block_tokens

    @property
    def needs_prefill(self) -> bool:
        """Of a running request: more than the last token is to be computed, or the first one is not known yet."""
        return not self.output_tokens or self.filled_tokens < len(self.tokens) - 1

    def lease_objection(self, key: HandoffKey, lease: str) -> str:
        """Why whoever names this epoch and lease has nothing to do with the request's KV; empty: he has."""
        is_due = self.phase is Phase.RESERVED and not self.is_renewing
        if key.epoch < self.epoch:
            return "old_epoch"
        return "" if is_due and (key.epoch, lease) == (self.epoch, self.lease) else "no_lease"

    @property
    def table(self) -> tuple[int, ...]:
        """Pool block of each block; empty while nothing is held."""
        return tuple(self.held.table) if self.held is not None else ()

    def chain(self, blocks: int) -> list[bytes]:
        """Ids of the first ``blocks`` blocks, which must be full of known tokens."""
        known = len(self.ids)
        if known < blocks:
            start, end = known * self.spec.block_tokens, blocks * self.spec.block_tokens
            parent = self.ids[-1] if self.ids else b""
            self.ids += block_ids(
                self.tokens[start:end],
                self.spec.block_tokens,
                self.request.fingerprint,
                self.request.cache_salt,
                parent=parent,
            )
        return self.ids[:blocks]

    def reusable_chain(self) -> list[bytes]:
        """Ids of the blocks that a cache may give: never the last token's, which must be computed to be followed."""
        return self.chain((len(self.tokens) - 1) // self.spec.block_tokens)

    def hold(self, pool: BlockPool, held: HeldBlocks, matched_blocks: int) -> None:
        """Blocks were had, so many of them with KV in them."""
        self.held = held
        self.is_exact = pool.exact(held) == matched_blocks
        self.whole_blocks = self.registered_blocks = matched_blocks
        self.filled_tokens = matched_blocks * self.spec.block_tokens

    def let_go(self, pool: BlockPool) -> None:
        """Give the blocks back; what is filled stays as prefix cache."""
        if self.held is not None:
            self.register(pool)
            pool.free(self.held)
        self.held = None
        self.whole_blocks = self.registered_blocks = self.filled_tokens = 0

    def register(self, pool: BlockPool) -> None:
        """Every full block that is filled becomes prefix cache."""
        full = self.filled_tokens // self.spec.block_tokens
        if self.held is None or full <= self.registered_blocks:
            return
        ids = self.chain(full)
        for index in range(self.registered_blocks, full):
            parent_id = ids[index - 1] if index else b""
            pool.register(self.held, index, ids[index], parent_id, is_exact=self.is_exact)
        self.registered_blocks = full

    def receive(self, pool: BlockPool, whole_tokens: int) -> None:
        """Frames were imported: so many leading tokens are in the pool."""
        self.filled_tokens = max(self.filled_tokens, whole_tokens)
        is_whole = self.filled_tokens == self.request.prompt_tokens
        self.whole_blocks = self.prompt_blocks if is_whole else self.filled_tokens // self.spec.block_tokens
        self.register(pool)

    def note_frame(self, header: FrameHeader, payload_bytes: int) -> None:
        """A frame is in the pool."""
        self.report = replace(
            self.report,
            received_blocks=self.report.received_blocks + (header.blocks if header.first_layer == 0 else 0),
            received_bytes=self.report.received_bytes + payload_bytes,
        )

    def finish_reason(self, context_tokens: int) -> FinishReason | None:
        """Whether the last token ends the request."""
        sampling = self.request.sampling
        if self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        if self.output_tokens >= sampling.max_tokens or len(self.tokens) >= context_tokens:
            return FinishReason.LENGTH
        return None
