"""Ways for payloads beside the frames: what a sender chooses from a decode pod's offers, and what it falls back to.

Everything else of a handoff goes over gRPC whatever is chosen. Knows the transports by name only.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kvoy.core.errors import PeerError
from kvoy.core.frames import Opening
from kvoy.core.types import TransportOffer
from kvoy.core.wire import choose_transport

RETRY_S = 30.0
"""For how long an offer that failed is not tried again: a port that swallows what comes costs a handoff seconds."""

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

    def __init__(self, links: Sequence[Link] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._links = {link.name: link for link in links}
        self._clock = clock
        self._failed_at: dict[TransportOffer, float] = {}
        """Of offers whose last try failed, which has been said."""

    async def choose(self, opening: Opening, offers: Sequence[TransportOffer]) -> Opening:
        """The opening as it is to be sent: by the first offer that works, else by gRPC."""
        left = [offer for offer in offers if not self._has_just_failed(offer)]
        while (offer := choose_transport(left, self._links)) is not None:
            left.remove(offer)
            try:
                source = await self._links[offer.name].introduce(offer)
            except PeerError as error:
                self._note(offer, error)
            else:
                self._failed_at.pop(offer, None)
                return replace(opening, transport=offer.name, source=source)
        return opening

    async def close(self) -> None:
        """At any time, more than once."""
        for link in self._links.values():
            await link.close()

    def _has_just_failed(self, offer: TransportOffer) -> bool:
        failed_at = self._failed_at.get(offer)
        return failed_at is not None and self._clock() < failed_at + RETRY_S

    def _note(self, offer: TransportOffer, error: PeerError) -> None:
        if offer not in self._failed_at:
            _log.warning("handoffs to %s do without %s: %s", offer.address, offer.name, error)
        now = self._clock()
        for gone in [known for known, at in self._failed_at.items() if now > at + 10 * RETRY_S]:
            del self._failed_at[gone]
        self._failed_at[offer] = now
