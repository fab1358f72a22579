"""Which pods have which blocks cached, as far as their events tell.

Owns the index only; it is a hint, never the truth: a pod may have dropped a block a moment ago, and then computes it
again. Must not know routing or the bus. Events carry a generation and a sequence number; where one is missing, all that
was known of the pod is forgotten, since a block that it dropped could otherwise be promised for ever.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvoy.core.errors import InvariantError
from kvoy.core.types import BlockEvent


@dataclass(slots=True)
class _PodBlocks:
    """What one start of one pod has announced; ``blocks`` is an ordered set, oldest first."""

    generation: int
    seq: int
    blocks: dict[bytes, None] = field(default_factory=dict)


class PrefixIndex:
    """Block id → pods. Holds at most ``max_entries`` (pod, block) pairs; past that the pod that has most forgets its
    oldest, which costs a missed chance of reuse and nothing else."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._pods: dict[str, _PodBlocks] = {}
        self._holders: dict[bytes, set[str]] = {}
        self._entries = 0
        self.gaps = 0
        """Times that events of a pod were found missing."""

    def __len__(self) -> int:
        return self._entries

    @property
    def pod_ids(self) -> tuple[str, ...]:
        """Pods that something is known of."""
        return tuple(self._pods)

    def apply(self, event: BlockEvent) -> None:
        """Takes an event over; one that is older than what is known changes nothing."""
        pod = self._pods.get(event.pod_id)
        if pod is not None and (event.generation, event.seq) <= (pod.generation, pod.seq):
            return
        if pod is None or event.generation != pod.generation or event.seq != pod.seq + 1:
            self.gaps += pod is not None and event.generation == pod.generation
            self.forget(event.pod_id)
            pod = self._pods[event.pod_id] = _PodBlocks(event.generation, event.seq)
        pod.seq = event.seq
        self._remove(event.pod_id, pod, event.removed)
        for block_id in event.stored:
            self._add(event.pod_id, pod, block_id)
        self._shrink()

    def forget(self, pod_id: str) -> None:
        """The pod is gone, or not to be trusted."""
        pod = self._pods.pop(pod_id, None)
        if pod is not None:
            self._remove(pod_id, pod, tuple(pod.blocks))

    def match(self, block_ids: Sequence[bytes]) -> dict[str, int]:
        """Pod id → number of leading blocks of the chain that it has; pods that have none are not listed."""
        matched: dict[str, int] = {}
        alive: set[str] = set()
        for depth, block_id in enumerate(block_ids):
            holders = self._holders.get(block_id, set())
            still = holders if depth == 0 else alive & holders
            if not still:
                break
            alive = set(still)
            matched.update(dict.fromkeys(sorted(alive), depth + 1))
        return matched

    def check(self) -> None:
        """Raises InvariantError unless both directions of the index tell the same."""
        pairs = {(pod_id, block_id) for pod_id, pod in self._pods.items() for block_id in pod.blocks}
        mirrored = {(pod_id, block_id) for block_id, holders in self._holders.items() for pod_id in holders}
        if pairs != mirrored or len(pairs) != self._entries or not all(self._holders.values()):
            raise InvariantError("the prefix index and its mirror differ")
        if self._entries > self._max_entries:
            raise InvariantError(f"the prefix index holds {self._entries} entries, more than {self._max_entries}")

    def _add(self, pod_id: str, pod: _PodBlocks, block_id: bytes) -> None:
        if block_id not in pod.blocks:
            pod.blocks[block_id] = None
            self._holders.setdefault(block_id, set()).add(pod_id)
            self._entries += 1

    def _remove(self, pod_id: str, pod: _PodBlocks, block_ids: Iterable[bytes]) -> None:
        for block_id in block_ids:
            if block_id in pod.blocks:
                del pod.blocks[block_id]
                self._entries -= 1
                holders = self._holders[block_id]
                holders.discard(pod_id)
                if not holders:
                    del self._holders[block_id]

    def _shrink(self) -> None:
        while self._entries > self._max_entries:
            pod_id, pod = max(self._pods.items(), key=lambda item: (len(item[1].blocks), item[0]))
            excess = min(self._entries - self._max_entries, len(pod.blocks))
            self._remove(pod_id, pod, tuple(pod.blocks)[:excess])
