"""Which way payloads go when ways fail."""

from dataclasses import replace

import pytest

from kvoy.core.errors import PeerError
from kvoy.core.frames import Opening
from kvoy.core.types import TransportOffer
from kvoy.transport.links import RETRY_S, Links
from tests.transport import values

OPENING = Opening(values.KEY, "l", "f", values.SPEC)
OFFERS = [TransportOffer("shm", "a"), TransportOffer("tcp", "b")]


class Way:
    """A link that works or not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.works = True
        self.tries = 0

    async def introduce(self, offer: TransportOffer) -> bytes:
        self.tries += 1
        if not self.works:
            raise PeerError(f"{offer.address} is nowhere")
        return self.name.encode()

    async def close(self) -> None: ...


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ways():
    return {name: Way(name) for name in ("shm", "tcp")}


@pytest.fixture
def links(ways, clock):
    return Links(list(ways.values()), clock)


def by(name: str) -> Opening:
    return replace(OPENING, transport=name, source=name.encode())


async def test_the_first_offer_that_works_is_taken(links, ways):
    assert await links.choose(OPENING, OFFERS) == by("shm")
    assert await links.choose(OPENING, OFFERS[1:]) == by("tcp")
    assert await links.choose(OPENING, []) == OPENING
    ways["shm"].works = False
    assert await links.choose(OPENING, OFFERS) == by("tcp")
    ways["tcp"].works = False
    assert await links.choose(OPENING, OFFERS) == OPENING


async def test_an_offer_of_what_the_sender_has_not_is_passed_over():
    assert await Links([Way("tcp")]).choose(OPENING, OFFERS) == by("tcp")
    assert await Links().choose(OPENING, OFFERS) == OPENING


async def test_what_failed_is_tried_again_only_later_and_said_once(links, ways, clock, caplog):
    ways["tcp"].works = False
    for _ in range(3):
        assert await links.choose(OPENING, OFFERS[1:]) == OPENING
    assert ways["tcp"].tries == 1
    clock.now += RETRY_S
    assert await links.choose(OPENING, OFFERS[1:]) == OPENING
    assert ways["tcp"].tries == 2
    assert [record.message for record in caplog.records] == ["handoffs to b do without tcp: b is nowhere"]
    ways["tcp"].works = True
    clock.now += RETRY_S
    assert await links.choose(OPENING, OFFERS[1:]) == by("tcp")
    assert await links.choose(OPENING, OFFERS[1:]) == by("tcp")
