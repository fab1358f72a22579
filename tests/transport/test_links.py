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


async def chosen(links, offers) -> Opening:
    return (await links.choose(OPENING, offers)).opening


def by(name: str) -> Opening:
    return replace(OPENING, transport=name, source=name.encode())


async def test_the_first_offer_that_works_is_taken(links, ways):
    assert await chosen(links, OFFERS) == by("shm")
    assert await chosen(links, OFFERS[1:]) == by("tcp")
    assert await chosen(links, []) == OPENING
    ways["shm"].works = False
    assert await chosen(links, OFFERS) == by("tcp")
    ways["tcp"].works = False
    assert await chosen(links, OFFERS) == OPENING


async def test_the_senders_order_decides(ways):
    for names in (("shm", "tcp"), ("tcp", "shm")):
        links = Links([ways[name] for name in names])
        for offers in (OFFERS, OFFERS[::-1]):
            assert await chosen(links, offers) == by(names[0])


async def test_an_offer_of_what_the_sender_has_not_is_passed_over():
    assert await chosen(Links([Way("tcp")]), OFFERS) == by("tcp")
    assert await chosen(Links(), OFFERS) == OPENING


async def test_what_failed_is_tried_again_only_later_and_said_once(links, ways, clock, caplog):
    ways["tcp"].works = False
    for _ in range(3):
        assert await chosen(links, OFFERS[1:]) == OPENING
    assert ways["tcp"].tries == 1
    clock.now += RETRY_S
    assert await chosen(links, OFFERS[1:]) == OPENING
    assert ways["tcp"].tries == 2
    assert [record.message for record in caplog.records] == ["handoffs to b do without tcp: b is nowhere"]
    ways["tcp"].works = True
    clock.now += RETRY_S
    assert await chosen(links, OFFERS[1:]) == by("tcp")
    assert await chosen(links, OFFERS[1:]) == by("tcp")


async def test_a_way_by_which_no_payload_came_is_left_for_a_while(links, clock, caplog):
    way = await links.choose(OPENING, OFFERS)
    way.broke(PeerError("the network is down", "unreachable"))
    assert await chosen(links, OFFERS) == by("shm"), "it was not the way that failed"
    way.broke(PeerError("no byte came", "source_lost"))
    assert await chosen(links, OFFERS) == by("tcp")
    clock.now += RETRY_S
    assert await chosen(links, OFFERS) == by("shm")
    assert [record.message for record in caplog.records] == ["handoffs to a do without shm: no byte came"]


async def test_who_is_not_known_tries_once_more_for_a_connection_may_have_broken_unseen(links):
    error = PeerError("who are you?", "no_source")
    for expected in ("shm", "shm", "tcp"):
        way = await links.choose(OPENING, OFFERS)
        assert way.opening == by(expected)
        way.broke(error)
    assert await chosen(links, OFFERS) == by("tcp")


async def test_a_way_that_worked_and_broke_is_tried_again_at_once(links):
    way = await links.choose(OPENING, OFFERS)
    way.works()
    way.broke(PeerError("it was cut", "source_lost"))
    assert await chosen(links, OFFERS) == by("shm")


async def test_frames_have_no_way_that_could_be_blamed(links):
    way = await links.choose(OPENING, [])
    way.works()
    way.broke(PeerError("it was cut", "source_lost"))
    assert await chosen(links, OFFERS) == by("shm")
