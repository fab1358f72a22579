"""Listens to the directory and the event bus, and tells the fleet what they say.

Owns the poll and the subscriptions, and knows whether the two answer. While the directory is away the last list stays
in use: requests go on, and /readyz says what is amiss.
"""

import asyncio

from kvoy.core.errors import PeerError
from kvoy.runtime.presence import Outage
from kvoy.telemetry.metrics import Metrics
from kvoy.transport.channels import Channels
from kvoy.transport.events import BLOCK_SUBJECTS, LOAD_SUBJECTS, block_event_from_bytes, load_event_from_bytes
from kvoy.transport.ports import Bus, Directory
from services.router.fleet import Fleet

POLL_S = 0.5


class PodWatch:
    """What the fleet hears. ``run`` goes on until cancelled."""

    def __init__(self, fleet: Fleet, directory: Directory, bus: Bus, channels: Channels, metrics: Metrics) -> None:
        self._fleet = fleet
        self._directory = directory
        self._bus = bus
        self._channels = channels
        self._outage = Outage("the directory")
        self._directory_trouble = ""
        self.listening = False
        """Events are being heard."""
        metrics.watch("kvoy_router_directory_up", lambda: not self._directory_trouble)
        metrics.watch("kvoy_router_bus_up", lambda: self._bus.connected)

    @property
    def degraded(self) -> list[str]:
        """What is amiss although requests are served; sentences."""
        trouble = []
        if self._directory_trouble:
            trouble.append(
                f"The pod directory does not answer, so that new pods are not seen: {self._directory_trouble}"
            )
        if not self._bus.connected:
            trouble.append("The event bus is not connected, so that loads and cached blocks of pods are not known.")
        return trouble

    async def run(self) -> None:
        subscriptions = [
            await self._bus.subscribe(LOAD_SUBJECTS, self._load),
            await self._bus.subscribe(BLOCK_SUBJECTS, self._blocks),
        ]
        self.listening = True
        try:
            while True:
                await self.poll()
                await asyncio.sleep(POLL_S)
        finally:
            for subscription in subscriptions:
                await subscription.close()

    async def poll(self) -> None:
        """Reads the directory once."""
        try:
            pods = await self._directory.list_pods()
        except PeerError as error:
            self._directory_trouble = str(error)
            self._outage.is_away(str(error))
            self._fleet.look()
            return
        self._directory_trouble = ""
        self._outage.is_back()
        self._fleet.listed(pods)
        await self._channels.keep_only(self._fleet.table.addresses)

    async def _load(self, _: str, payload: bytes) -> None:
        self._fleet.loaded(load_event_from_bytes(payload))

    async def _blocks(self, _: str, payload: bytes) -> None:
        self._fleet.blocks_changed(block_event_from_bytes(payload))
