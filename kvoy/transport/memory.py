"""In-memory twins of the ports, for tests and for services in one process. They pass the same suites as the real
adapters; the twins of handoffs and fetches run the real codec and the real decode pod's face over a pipe of bytes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from kvoy.core.errors import KvoyError, PeerError
from kvoy.core.frames import FetchCall, Opening
from kvoy.core.types import KvSpec, Pod, TransportOffer
from kvoy.transport.codec import kv
from kvoy.transport.kv_held import HeldHandler, held_service, take_lent
from kvoy.transport.kv_stream import IngestHandler, SenderStream, ingest_service
from kvoy.transport.ports import HandoffStream, Lent, Subscription
from kvoy.transport.rpc import Duplex

_log = logging.getLogger(__name__)
PIPE_MESSAGES = 4
"""That may be under way in one direction: as with a real connection, a stalled reader stops the writer."""
BUS_MESSAGES = 65_536
"""That may wait for one subscription; more are dropped, as a real bus does with a slow consumer."""


class MemoryDirectory:
    """Directory in this process; ``clock`` gives seconds and decides what has expired."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pods: dict[str, tuple[Pod, float]] = {}
        self._generation = 0

    async def register(self, pod: Pod, ttl_s: float) -> None:
        """See ports.Directory."""
        self._pods[pod.pod_id] = (pod, self._clock() + ttl_s)

    async def deregister(self, pod_id: str) -> None:
        """See ports.Directory."""
        self._pods.pop(pod_id, None)

    async def list_pods(self) -> list[Pod]:
        """See ports.Directory."""
        now = self._clock()
        self._pods = {pod_id: entry for pod_id, entry in self._pods.items() if entry[1] > now}
        return [self._pods[pod_id][0] for pod_id in sorted(self._pods)]

    async def next_generation(self, pod_id: str) -> int:  # noqa: ARG002 - one counter is greater for every pod
        """See ports.Directory."""
        self._generation += 1
        return self._generation

    async def close(self) -> None:
        """Nothing to give back."""


class MemoryBus:
    """Bus in this process; each subscription gets its messages one at a time."""

    def __init__(self) -> None:
        self.dropped = 0
        self._subscriptions: list[_MemorySubscription] = []
        self._closed = False

    @property
    def connected(self) -> bool:
        """True until close."""
        return not self._closed

    async def publish(self, subject: str, payload: bytes) -> None:
        """See ports.Bus."""
        if self._closed:
            self.dropped += 1
            return
        for subscription in self._subscriptions:
            if subscription.wants(subject) and not subscription.offer(subject, payload):
                self.dropped += 1

    async def subscribe(self, subject: str, handler: Callable[[str, bytes], Awaitable[None]]) -> Subscription:
        """See ports.Bus."""
        subscription = _MemorySubscription(subject, handler)
        self._subscriptions.append(subscription)
        return subscription

    async def close(self) -> None:
        """Ends all subscriptions."""
        self._closed = True
        for subscription in self._subscriptions:
            await subscription.close()


class _MemorySubscription:
    def __init__(self, subject: str, handler: Callable[[str, bytes], Awaitable[None]]) -> None:
        self._subject = subject
        self._handler = handler
        self._waiting: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(BUS_MESSAGES)
        self._task = asyncio.create_task(self._deliver())

    def wants(self, subject: str) -> bool:
        if self._subject.endswith(".>"):
            return subject.startswith(self._subject[:-1])
        return subject == self._subject

    def offer(self, subject: str, payload: bytes) -> bool:
        """False if there is no room."""
        if self._task.done() or self._waiting.full():
            return self._task.done()
        self._waiting.put_nowait((subject, payload))
        return True

    async def _deliver(self) -> None:
        while True:
            subject, payload = await self._waiting.get()
            try:
                await self._handler(subject, payload)
            except KvoyError as error:
                _log.warning("an event on %s was not taken: %s", subject, error)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


class MemoryHandoffConnector:
    """HandoffConnector to IngestHandlers of this process, by address."""

    def __init__(self, receivers: dict[str, IngestHandler]) -> None:
        self._methods = {address: ingest_service(handler).methods["Push"] for address, handler in receivers.items()}
        self._pipes: set[_Pipe] = set()

    async def open(
        self,
        address: str,
        opening: Opening,
        timeout_s: float,
        offers: Sequence[TransportOffer] = (),  # noqa: ARG002 - there is one way only
    ) -> HandoffStream:
        """PeerError for an address that is not in ``receivers``."""
        push = self._methods.get(address)
        if not isinstance(push, Duplex):
            raise PeerError(f"{address} cannot be reached: nobody listens there.", "unreachable")
        pipe = _Pipe(push, address, timeout_s)
        self._pipes.add(pipe)
        stream = SenderStream(pipe, address)
        try:
            await stream.send_opening(opening)
        except asyncio.CancelledError:
            await stream.close()
            raise
        return stream

    async def close(self) -> None:
        """Cuts every handoff that is still open."""
        for pipe in self._pipes:
            pipe.cancel()
            await pipe.ended()


class MemoryLender:
    """KvLender of HeldHandlers of this process, by address."""

    def __init__(self, pods: dict[str, HeldHandler]) -> None:
        self._methods = {address: held_service(handler).methods["Fetch"] for address, handler in pods.items()}

    async def fetch(self, address: str, call: FetchCall, into: memoryview, timeout_s: float) -> Lent:
        """See ports.KvLender."""
        method = self._methods.get(address)
        if not isinstance(method, Duplex):
            return Lent(0, f"{address} cannot be reached: nobody listens there.")
        pipe = _Pipe(method, address, timeout_s)
        try:
            await pipe.write(kv.fetch_to_proto(call).SerializeToString())
            return await take_lent(_answers(pipe), address, call, into)
        finally:
            pipe.cancel()
            await pipe.ended()


async def _answers(pipe: "_Pipe") -> AsyncIterator[bytes]:
    while (wire := await pipe.read()) is not None:
        yield wire


class _Pipe:
    """A call within this process: the caller's end, and the task that runs the receiver on the other end."""

    def __init__(self, method: Duplex, address: str, timeout_s: float) -> None:
        self._address = address
        self._up: asyncio.Queue[bytes] = asyncio.Queue(PIPE_MESSAGES)
        self._down: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._error: KvoyError | None = None
        self._task = asyncio.create_task(self._run(method, timeout_s))

    async def _run(self, method: Duplex, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await method.converse(_ReceiverEnd(self._up, self._down))
        except TimeoutError:
            self._error = PeerError(f"The call to {self._address} took longer than {timeout_s} s.", "deadline")
        except KvoyError as error:
            self._error = error
        except asyncio.CancelledError:
            self._error = PeerError(f"The call to {self._address} was closed on this side.", "closed")
        finally:
            self._down.put_nowait(None)

    async def read(self) -> bytes | None:
        wire = await self._down.get()
        if wire is None:
            self._down.put_nowait(None)  # whoever reads again learns the same
            if self._error is not None:
                raise self._error
        return wire

    async def write(self, wire: bytes) -> None:
        put = asyncio.ensure_future(self._up.put(wire))
        try:
            await asyncio.wait({put, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                raise self._error or PeerError(f"{self._address} has ended the call.", "receiver_lost")
        finally:
            put.cancel()

    def cancel(self) -> None:
        self._task.cancel()

    async def ended(self) -> None:
        """Waits until the receiver has cleaned up."""
        await asyncio.wait({self._task})


class _ReceiverEnd:
    """rpc.Exchange over the queues of a _Pipe. The caller never says that no more comes: it cancels."""

    def __init__(self, up: asyncio.Queue[bytes], down: asyncio.Queue[bytes | None]) -> None:
        self._up = up
        self._down = down

    async def read(self) -> bytes | None:
        return await self._up.get()

    async def write(self, wire: bytes) -> None:
        await self._down.put(wire)


class MemoryBlockStore:
    """BlockStore in this process, without bounds."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, KvSpec, bytes], bytes] = {}

    async def lookup(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes]) -> int:
        """See ports.BlockStore."""
        for present, block_id in enumerate(block_ids):
            if (fingerprint, spec, block_id) not in self._blocks:
                return present
        return len(block_ids)

    async def get(self, fingerprint: str, spec: KvSpec, block_ids: Sequence[bytes], into: memoryview) -> int:
        """See ports.BlockStore."""
        present = await self.lookup(fingerprint, spec, block_ids)
        for index, block_id in enumerate(block_ids[:present]):
            start = index * spec.block_bytes
            into[start : start + spec.block_bytes] = self._blocks[fingerprint, spec, block_id]
        return present

    async def put(
        self,
        fingerprint: str,
        spec: KvSpec,
        block_ids: Sequence[bytes],
        parent_id: bytes,  # noqa: ARG002 - nothing is evicted here, so no chain is kept
        blocks: memoryview,
    ) -> int:
        """See ports.BlockStore."""
        known = len(self._blocks)
        for index, block_id in enumerate(block_ids):
            start = index * spec.block_bytes
            self._blocks.setdefault((fingerprint, spec, block_id), bytes(blocks[start : start + spec.block_bytes]))
        return len(self._blocks) - known

    async def close(self) -> None:
        """Nothing to give back."""
