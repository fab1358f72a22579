"""Which kv heads each rank of a tensor-parallel pod owns, and who sends which of them to whom between two pods.

Pure arithmetic over the heads of one model; knows nothing of blocks, frames or processes. A frame names its heads
(FrameHeader), counted over the whole model: each rank subtracts the first of its own.
"""

from dataclasses import dataclass

from kvoy.core.errors import InvariantError


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads ``[first, +heads)`` of the model; at least one."""

    first: int
    heads: int

    @property
    def end(self) -> int:
        return self.first + self.heads


@dataclass(frozen=True, slots=True)
class HeadTransfer:
    """Heads that one rank of the sender has and one of the receiver wants."""

    sender: int
    receiver: int
    range: HeadRange


def owned_heads(kv_heads: int, rank: int, degree: int) -> HeadRange:
    """Of rank ``rank`` of ``degree``: as even a share as whole heads allow. With more ranks than heads each rank has
    one head, and neighbours have the same."""
    if kv_heads < 1 or not 0 <= rank < degree:
        raise InvariantError(f"rank {rank} of {degree} has no share of {kv_heads} kv heads")
    first = rank * kv_heads // degree
    return HeadRange(first, max(1, (rank + 1) * kv_heads // degree - first))


def head_transfers(kv_heads: int, sender_degree: int, receiver_degree: int) -> list[HeadTransfer]:
    """Each rank of the receiver gets each of its heads once, from a rank that has it: of several, from the one that has
    sent the fewest so far. Receivers in turn; a pair's heads that lie together go together."""
    senders = [owned_heads(kv_heads, rank, sender_degree) for rank in range(sender_degree)]
    sent_heads = [0] * sender_degree
    transfers: list[HeadTransfer] = []
    for receiver in range(receiver_degree):
        wanted = owned_heads(kv_heads, receiver, receiver_degree)
        for head in range(wanted.first, wanted.end):
            owners = [rank for rank, has in enumerate(senders) if has.first <= head < has.end]
            sender = min(owners, key=lambda rank: sent_heads[rank])
            sent_heads[sender] += 1
            _add(transfers, HeadTransfer(sender, receiver, HeadRange(head, 1)))
    return transfers


def _add(transfers: list[HeadTransfer], one: HeadTransfer) -> None:
    """At the end, or to the last one where it goes on from there."""
    last = transfers[-1] if transfers else None
    if last and (last.sender, last.receiver, last.range.end) == (one.sender, one.receiver, one.range.first):
        transfers[-1] = HeadTransfer(last.sender, last.receiver, HeadRange(last.range.first, last.range.heads + 1))
    else:
        transfers.append(one)
