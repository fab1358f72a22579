"""How a pod is known to others: its entry in the directory, its load and block events, and who else is there.

Owns the heartbeat. Outlives outages of directory and bus: what is known stays in use, each outage is said once, and
each recovery. Decides nothing about routing; knows nothing of gRPC servers or signals.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from kvoy.core.errors import PeerError
from kvoy.core.types import BlockEvent, LoadEvent, Pod, PodState, Role
from kvoy.telemetry.logs import about
from kvoy.transport.events import block_event_to_bytes, block_subject, load_event_to_bytes, load_subject
from kvoy.transport.ports import Bus, Directory

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""A pod registers and tells its load this often."""
TTL_S = 5.0
"""A pod that has not registered for so long is gone."""
_EVENTS_KEPT = 10_000
"""Block events that may wait for the bus; the oldest go first, and the gap shows in their numbers."""


class Outage:
    """Says once that something is away and once that it is back."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._away = False

    def is_away(self, why: str) -> None:
        if not self._away:
            log.warning("%s is away; going on with what is known", self._what, extra=about(why=why))
        self._away = True

    def is_back(self) -> None:
        if self._away:
            log.info("%s is back", self._what)
        self._away = False


async def next_generation(directory: Directory, pod_id: str) -> int:
    """The directory's number for this start of the pod; while that is away, the clock's, which it counts like."""
    try:
        return await directory.next_generation(pod_id)
    except PeerError as error:
        log.warning("the directory is away; this start is numbered by the clock", extra=about(why=error))
        return int(time.time() * 1000)


class Presence:
    """``describe`` gives the pod as it is now. ``peers`` is what the directory listed last, this pod included."""

    def __init__(self, directory: Directory, bus: Bus, describe: Callable[[], Pod]) -> None:
        self._directory = directory
        self._bus = bus
        self._describe = describe
        self._directory_outage = Outage("the directory")
        self._first_bus_outage: Outage | None = Outage("the event bus")
        """Until the bus has been there once; later outages are said by the bus itself."""
        self._changed = asyncio.Event()
        self._events: deque[BlockEvent] = deque(maxlen=_EVENTS_KEPT)
        self._has_events = asyncio.Event()
        self._seq = 0
        self.peers: tuple[Pod, ...] = ()

    def find(self, role: Role) -> Pod | None:
        """A pod of this role that takes work: always the same one as long as it is there."""
        return next((pod for pod in self.peers if pod.role is role and pod.state is PodState.READY), None)

    @property
    def events_dropped(self) -> int:
        """Events that could not be published."""
        return self._bus.dropped

    def changed(self) -> None:
        """Tell the directory now, not at the next beat."""
        self._changed.set()

    def announce(self, stored: tuple[bytes, ...], removed: tuple[bytes, ...]) -> None:
        """Tell everybody which blocks this pod's cache gained and lost. Never waits."""
        self._seq += 1
        pod = self._describe()
        self._events.append(BlockEvent(pod.pod_id, pod.generation, self._seq, stored, removed))
        self._has_events.set()

    async def beat(self) -> None:
        """Register and tell the load, about once a second, until cancelled."""
        me = asyncio.current_task()
        while True:
            await self.refresh()
            if me is not None and me.cancelling():
                # Clients that wait with asyncio.wait_for lose a cancellation that comes with the answer (Python 3.11).
                raise asyncio.CancelledError
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def refresh(self) -> None:
        """One beat."""
        self._changed.clear()
        pod = self._describe()
        try:
            await self._directory.register(pod, TTL_S)
            self.peers = tuple(await self._directory.list_pods())
            self._directory_outage.is_back()
        except PeerError as error:
            self._directory_outage.is_away(str(error))
        await self._bus.publish(
            load_subject(pod.pod_id), load_event_to_bytes(LoadEvent(pod.pod_id, pod.generation, pod.load))
        )
        self._look_at_bus()

    def _look_at_bus(self) -> None:
        if self._first_bus_outage is None:
            return
        if self._bus.connected:
            self._first_bus_outage.is_back()
            self._first_bus_outage = None
        else:
            self._first_bus_outage.is_away("it has not answered yet")

    async def publish_blocks(self) -> None:
        """Send what was announced, in order, until cancelled."""
        while True:
            await self._has_events.wait()
            self._has_events.clear()
            while self._events:
                event = self._events.popleft()
                await self._bus.publish(block_subject(event.pod_id), block_event_to_bytes(event))

    async def leave(self) -> None:
        """Out of the directory; if that is away, the entry ends by itself."""
        try:
            await self._directory.deregister(self._describe().pod_id)
        except PeerError as error:
            log.warning("could not leave the directory; the entry ends by itself", extra=about(why=error))
