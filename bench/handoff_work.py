"""What ``bench.handoff`` moves, by which ways, and what is promised of them.

Knows numbers and names; no processes. A way added here is measured; how it is started is in handoff_pairs.py.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median

from bench.report import Target
from kvoy.core.types import KvDtype, KvSpec
from kvoy.core.wire import WirePolicy
from kvoy.engine.slab import slot_bytes

SPEC = KvSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype=KvDtype.BF16)
"""The KV of SmolLM2-135M."""
TOKEN_BYTES = SPEC.block_bytes // SPEC.block_tokens
FRAME_BYTES = slot_bytes(0, SPEC)
"""What a staging slot takes unless told otherwise: whole blocks of at least 2 MiB."""


class Program(Enum):
    """Whose processes move the bytes."""

    TCP = "tcp"
    MOONCAKE = "mooncake"
    NIXL = "nixl"
    KVOY = "kvoy"
    PODS = "pods"


@dataclass(frozen=True, slots=True)
class Way:
    """One way for the same KV from one process to another; all but the name and the program is of ours. KVOY is a
    transport alone, from memory to memory as the peers do it; PODS is all that two pods do for it."""

    name: str
    program: Program
    transport: str = ""
    wire: WirePolicy = WirePolicy.RAW
    streams: int = 1

    @property
    def block_bytes(self) -> int:
        """Of one block on the wire."""
        return replace(SPEC, dtype=KvDtype.INT8_CHANNEL if self.wire is WirePolicy.INT8 else SPEC.dtype).block_bytes


RAW_TCP = Way("raw TCP, one connection", Program.TCP)
MOONCAKE = Way("Mooncake over TCP", Program.MOONCAKE)
NIXL_PEER = Way("NIXL over shared memory", Program.NIXL)
PEER_WAYS = (RAW_TCP, MOONCAKE, NIXL_PEER)


@dataclass(frozen=True, slots=True)
class Promise:
    """How much faster than another way, in KV tokens/s: for the same KV in the same format that is bytes/s as well."""

    way: Way
    against: Way
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class Transport:
    """One of kvoy's, and the ways of peers that carry bytes as it does, with what is promised beside each."""

    name: str
    rivals: tuple[tuple[Way, Target | None], ...]
    int8: Target | None = None
    """Beside the first rival, which moves bf16; quantising and restoring included. None: not measured."""
    more_streams: tuple[int, ...] = ()

    def promises(self) -> Iterator[Promise]:
        """The promised lines, then those that inform."""
        way, first = Way(self.name, Program.KVOY, self.name), self.rivals[0][0]
        yield from (Promise(way, rival, target) for rival, target in self.rivals)
        quantised = replace(way, name=f"{self.name}, int8 on the wire", wire=WirePolicy.INT8)
        if self.int8 is not None:
            yield Promise(quantised, first, self.int8)
        for streams in self.more_streams:
            yield Promise(replace(way, name=f"{self.name}, {streams} streams", streams=streams), first)
        for whole in (way, quantised)[: 1 if self.int8 is None else 2]:
            yield Promise(replace(whole, name=f"{whole.name}, whole pods", program=Program.PODS), first)


_SOCKETS = ((MOONCAKE, Target(0.9)), (RAW_TCP, Target(0.4)))
TRANSPORTS = (
    Transport("tcp", _SOCKETS, int8=Target(1.7)),
    Transport("grpc", _SOCKETS, int8=Target(1.7), more_streams=(2, 4)),
    Transport("shm", ((NIXL_PEER, Target(1.0)),)),
    Transport("nixl", ((NIXL_PEER, None),)),
)
"""The first one is what pods use unless told otherwise."""


def promises(transports: Collection[str], *, promised_only: bool) -> list[Promise]:
    """Of these transports; only those with a target, or all."""
    found = (promise for transport in TRANSPORTS if transport.name in transports for promise in transport.promises())
    return [promise for promise in found if promise.target is not None or not promised_only]


def ways_of(found: Iterable[Promise]) -> tuple[Way, ...]:
    """All peers, and each of our ways once."""
    return (*PEER_WAYS, *dict.fromkeys(promise.way for promise in found))


@dataclass(frozen=True, slots=True)
class Load:
    """So many prompts are handed over at once."""

    prompt_tokens: int = 2048
    requests: int = 4

    @property
    def tokens(self) -> int:
        return self.prompt_tokens * self.requests

    @property
    def kv_bytes(self) -> int:
        """In bf16; prompts are whole blocks."""
        return self.tokens * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Sample:
    """One way within one round; ``seconds`` each time that all KV went over. ``foreign_share`` of the machine was
    taken by others meanwhile."""

    way: Way
    round: int
    seconds: tuple[float, ...]
    foreign_share: float

    def tokens_per_s(self, load: Load) -> float:
        return load.tokens / median(self.seconds)

    def bytes_per_s(self, load: Load) -> float:
        """Of the KV in bf16, whatever was on the wire."""
        return load.kv_bytes / median(self.seconds)


COPIES: Mapping[str, tuple[int, int]] = {
    "tcp": (1, 1),
    "grpc": (3, 4),
    "shm": (0, 1),
    "nixl": (0, 2),
    "raw TCP": (1, 1),
}
"""Of a byte, by sender and by receiver, from slot to slot, the kernel's included: counted in
tests/transport/test_copies.py, and in run_tcp.py by looking. Engines add one each, from pool to slot and back."""
