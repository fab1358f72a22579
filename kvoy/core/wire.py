"""How KV crosses from one pool into another: which pools can, in which number format, and by which transport.

Pure rules that both ends share. The sender chooses, from what the receiver says it accepts; the receiver checks. Knows
no frames, slots or bytes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvoy.core.types import KvDtype, KvSpec, TransportOffer

GRPC = "grpc"
TCP = "tcp"
NIXL = "nixl"
SHM = "shm"
"""Transports. ``grpc``: payloads are in the frames. ``tcp``: the receiver asks for them over a connection of their own.
``nixl``: NIXL reads them, by RDMA where there is some. ``shm``: it copies them from the sender's slab."""
TRANSPORTS = (GRPC, TCP, SHM, NIXL)

IMPORTABLE = tuple(KvDtype)
"""What an engine turns into its pool's own format, unless that would quantise what is quantised already."""


class WirePolicy(StrEnum):
    """What an operator wants of the wire."""

    RAW = "raw"
    """No number changes but those that the receiver's own format changes."""
    INT8 = "int8"
    """Half the bytes of bf16: keys with a scale for each channel of a block, values with one for each token."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes lie in memory of another process that our engine reads: its number there, and how far in."""

    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class WireRun:
    """What a slot holds of another pool: whole blocks of that, which need not begin where ours do. A token of the run
    is written if it lies in our blocks and is not among the first ``skip_tokens``."""

    dtype: KvDtype
    block_tokens: int
    blocks: int
    first_token: int = 0
    """Where the run begins, in tokens from the start of the first of our blocks; negative: before it."""
    skip_tokens: int = 0
    """Leading tokens of the run that we hold already, maybe shared with others: they are not written."""


def importable(pool: KvDtype) -> tuple[KvDtype, ...]:
    """What frames may carry into a pool of this dtype."""
    return tuple(dtype for dtype in IMPORTABLE if (pool, dtype) != (KvDtype.INT8, KvDtype.INT8_CHANNEL))


def fits(sender: KvSpec, receiver: KvSpec) -> bool:
    """Whether KV of one pool can go into the other: the same model's, in blocks of which one divides the other."""
    shapes = [(spec.layers, spec.kv_heads, spec.head_dim) for spec in (sender, receiver)]
    small, large = sorted((sender.block_tokens, receiver.block_tokens))
    return shapes[0] == shapes[1] and large % small == 0


def wire_dtype(sender: KvDtype, receiver: KvDtype, accepts: Collection[KvDtype], policy: WirePolicy) -> KvDtype:
    """What frames carry between pools of these dtypes. Nothing is quantised twice, and nothing wider is sent than the
    receiver keeps."""
    if KvDtype.INT8 in {sender, receiver}:
        wanted = KvDtype.INT8
    elif policy is WirePolicy.INT8:
        wanted = KvDtype.INT8_CHANNEL
    else:
        wanted = min(sender, receiver, key=lambda dtype: dtype.item_bytes)  # the sender's, of two of one size
    return wanted if wanted in {*accepts, receiver} else receiver


def choose_transport(offers: Sequence[TransportOffer], own: Sequence[str]) -> TransportOffer | None:
    """The receiver's offer that the sender likes best; ``own`` are its transports, the best first. None: gRPC."""
    known = [offer for offer in offers if offer.name in own]
    return min(known, key=lambda offer: own.index(offer.name), default=None)
