"""Ways for payloads beside the frames: what a sender chooses from a decode pod's offers, and what it falls back to.

Everything else of a handoff goes over gRPC whatever is chosen. Knows the transports by name only.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kvoy.core.errors import PeerError
from kvoy.core.frames import Opening
from kvoy.core.types import TransportOffer
from kvoy.core.wire import choose_transport

_log = logging.getLogger(__name__)


class Link(Protocol):
    """A sender's end of one transport, for all decode pods. It has the slab whose offsets frames name."""

    @property
    def name(self) -> str: ...

    async def introduce(self, offer: TransportOffer) -> bytes:
        """Let whoever made the offer read the slab; what openings to it name as their source. PeerError: it cannot."""
        ...

    async def close(self) -> None:
        """At any time, more than once."""
        ...


class Links:
    """The transports that a sender has besides gRPC."""

    def __init__(self, links: Sequence[Link] = ()) -> None:
        self._links = {link.name: link for link in links}
        self._told: set[TransportOffer] = set()
        """Offers whose failure has been said."""

    async def choose(self, opening: Opening, offers: Sequence[TransportOffer]) -> Opening:
        """The opening as it is to be sent: by the first offer that works, else by gRPC."""
        left = list(offers)
        while (offer := choose_transport(left, self._links)) is not None:
            left.remove(offer)
            try:
                return replace(opening, transport=offer.name, source=await self._links[offer.name].introduce(offer))
            except PeerError as error:
                self._tell(offer, error)
        return opening

    async def close(self) -> None:
        """At any time, more than once."""
        for link in self._links.values():
            await link.close()

    def _tell(self, offer: TransportOffer, error: PeerError) -> None:
        if offer not in self._told:
            self._told.add(offer)
            _log.warning("handoffs to %s do without %s: %s", offer.address, offer.name, error)
