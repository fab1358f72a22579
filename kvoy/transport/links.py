"""Ways for payloads beside the frames: what a sender chooses of a decode pod's offers, and what it falls back to.

The sender's order decides, for it alone learns what works with whom. Everything else of a handoff goes over gRPC
whatever is chosen. Knows the transports by name only.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kvoy.core.errors import KvoyError, PeerError
from kvoy.core.frames import Opening
from kvoy.core.types import TransportOffer
from kvoy.core.wire import choose_transport
from kvoy.transport.status import reason_of

RETRY_S = 30.0
"""For how long an offer that failed is not tried again: a port that swallows what comes costs a handoff seconds."""
ANOTHER_HOST = "another_host"
"""Why shared memory does not work between most pods, which is nothing to warn of."""
NOT_KNOWN, OUT_OF_REACH = "no_source", "source_lost"
"""Why a decode pod ends a stream whose payloads it cannot get: it does not know the source, or knows it no more."""
_MOST_DOUBTED = 256

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
    """The transports that a sender has besides gRPC, the best first."""

    def __init__(self, links: Sequence[Link] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._links = {link.name: link for link in links}
        self._clock = clock
        self._failed_at: dict[TransportOffer, float] = {}
        """Of offers whose last try failed, which has been said."""
        self._doubted: set[TransportOffer] = set()

    async def choose(self, opening: Opening, offers: Sequence[TransportOffer]) -> "Way":
        """The best of the offers that works, else gRPC."""
        left = [offer for offer in offers if not self._has_just_failed(offer)]
        while (offer := choose_transport(left, tuple(self._links))) is not None:
            left.remove(offer)
            try:
                source = await self._links[offer.name].introduce(offer)
            except PeerError as error:
                self.blame(offer, error)
            else:
                return Way(self, replace(opening, transport=offer.name, source=source), offer)
        return Way(self, opening, None)

    def worked(self, offer: TransportOffer) -> None:
        """A payload went by it."""
        self._failed_at.pop(offer, None)
        self._doubted.discard(offer)

    def doubt(self, offer: TransportOffer, error: KvoyError) -> None:
        """Blame it if this happens twice in a row. Once it may be that a connection broke and this end had yet to see
        it."""
        if offer in self._doubted:
            self.blame(offer, error)
        else:
            if len(self._doubted) >= _MOST_DOUBTED:
                self._doubted.clear()  # of pods that are long gone
            self._doubted.add(offer)

    def blame(self, offer: TransportOffer, error: KvoyError) -> None:
        """It does not work, and is left alone for a while."""
        self._doubted.discard(offer)
        if offer not in self._failed_at:
            level = logging.INFO if reason_of(error) == ANOTHER_HOST else logging.WARNING
            _log.log(level, "handoffs to %s do without %s: %s", offer.address, offer.name, error)
        now = self._clock()
        for gone in [known for known, at in self._failed_at.items() if now > at + 10 * RETRY_S]:
            del self._failed_at[gone]
        self._failed_at[offer] = now

    async def close(self) -> None:
        """At any time, more than once."""
        for link in self._links.values():
            await link.close()

    def _has_just_failed(self, offer: TransportOffer) -> bool:
        failed_at = self._failed_at.get(offer)
        return failed_at is not None and self._clock() < failed_at + RETRY_S


class Way:
    """How the payloads of one stream go. A stream may show that an offer does not work, though it could be taken: then
    the next one goes another way."""

    def __init__(self, links: Links, opening: Opening, offer: TransportOffer | None) -> None:
        """Made by Links.choose. Without an ``offer`` payloads are in the frames."""
        self.opening = opening
        """As it is to be sent."""
        self._links = links
        self._offer = offer
        self._works = False

    def works(self) -> None:
        """The decode pod has got a payload by it."""
        if self._offer is not None and not self._works:
            self._works = True
            self._links.worked(self._offer)

    def broke(self, error: KvoyError) -> None:
        """The stream has ended so."""
        if self._offer is None or self._works:
            return
        reason = reason_of(error)
        if reason == OUT_OF_REACH:
            self._links.blame(self._offer, error)
        elif reason == NOT_KNOWN:
            self._links.doubt(self._offer, error)
