"""The event bus: the same suite for NATS and for the twin, then outages, which only NATS has."""

import asyncio
import uuid

import pytest

from kvoy.core.errors import ConfigError, InvalidRequest
from kvoy.core.types import BlockEvent, LoadEvent, PodLoad
from kvoy.transport import events, nats_bus
from kvoy.transport.memory import MemoryBus
from kvoy.transport.nats_bus import NatsBus
from tests.transport.handlers import until


@pytest.fixture(params=["nats", "memory"])
async def bus(request):
    if request.param == "nats":
        bus = await NatsBus.start(request.getfixturevalue("nats_url"))
    else:
        bus = MemoryBus()
    yield bus
    await bus.close()


@pytest.fixture
def root() -> str:
    """Subjects of this test only: the server is shared."""
    return f"test.{uuid.uuid4().hex}"


class Heard(list):
    async def __call__(self, subject: str, payload: bytes) -> None:
        self.append((subject, payload))


async def test_who_listens_hears_in_order(bus, root):
    one, two = Heard(), Heard()
    await bus.subscribe(f"{root}.a", one)
    await bus.subscribe(f"{root}.a", two)
    for number in range(100):
        await bus.publish(f"{root}.a", b"%d" % number)
        await bus.publish(f"{root}.b", b"not for them")
    await until(lambda: len(one) == len(two) == 100)
    assert one == two == [(f"{root}.a", b"%d" % number) for number in range(100)]
    assert bus.dropped == 0
    assert bus.connected


async def test_a_trailing_wildcard_matches_the_rest(bus, root):
    heard = Heard()
    await bus.subscribe(f"{root}.blocks.>", heard)
    for subject in ("blocks.decode-1", "blocks.a.b", "blocks", "load.decode-1", "blocks.last"):
        await bus.publish(f"{root}.{subject}", b"x")
    await until(lambda: heard and heard[-1][0].endswith("last"))
    assert [subject for subject, _ in heard] == [f"{root}.blocks.decode-1", f"{root}.blocks.a.b", f"{root}.blocks.last"]


async def test_a_closed_subscription_hears_nothing(bus, root):
    gone, there = Heard(), Heard()
    subscription = await bus.subscribe(f"{root}.>", gone)
    await bus.subscribe(f"{root}.>", there)
    await subscription.close()
    await subscription.close()
    await bus.publish(f"{root}.x", b"1")
    await until(lambda: there)
    assert gone == []


async def test_a_handler_gets_its_messages_one_at_a_time_and_survives_bad_ones(bus, root, caplog):
    active, worst, done = 0, 0, []

    async def handler(_subject: str, payload: bytes) -> None:
        nonlocal active, worst
        active += 1
        worst = max(worst, active)
        await asyncio.sleep(0)
        active -= 1
        if payload == b"bad":
            raise InvalidRequest("This makes no sense.")
        done.append(payload)

    await bus.subscribe(f"{root}.>", handler)
    for payload in (b"1", b"bad", b"2", b"3"):
        await bus.publish(f"{root}.x", payload)
    await until(lambda: done == [b"1", b"2", b"3"])
    assert worst == 1
    assert "makes no sense" in caplog.text


async def test_after_close_everything_is_dropped(bus, root):
    heard = Heard()
    await bus.subscribe(f"{root}.x", heard)
    await bus.close()
    await bus.publish(f"{root}.x", b"1")
    assert bus.dropped == 1
    assert not bus.connected
    assert heard == []


async def test_events_as_pods_send_them(bus):
    name = f"decode-{uuid.uuid4().hex}"
    blocks = BlockEvent(name, 3, 1, (b"a" * 16,), (b"b" * 16, b"c" * 16))
    load = LoadEvent(name, 3, PodLoad(blocks_total=7))
    heard = Heard()
    await bus.subscribe(events.BLOCK_SUBJECTS, heard)
    await bus.subscribe(events.LOAD_SUBJECTS, heard)
    await bus.publish(events.block_subject(name), events.block_event_to_bytes(blocks))
    await bus.publish(events.load_subject(name), events.load_event_to_bytes(load))
    await until(lambda: len([1 for subject, _ in heard if name in subject]) == 2)
    told = dict(heard)
    assert events.block_event_from_bytes(told[f"kvoy.blocks.{name}"]) == blocks
    assert events.load_event_from_bytes(told[f"kvoy.load.{name}"]) == load


# --- NATS -----------------------------------------------------------------------------------------


async def test_an_outage_is_survived_and_what_was_not_sent_is_counted(own_nats, caplog):
    caplog.set_level("INFO")
    bus = await NatsBus.start(own_nats.url)
    heard = Heard()
    await bus.subscribe("a.>", heard)
    await bus.publish("a.x", b"before")
    await until(lambda: len(heard) == 1)

    own_nats.kill()
    await until(lambda: not bus.connected)
    for _ in range(5):
        await bus.publish("a.x", b"lost")
    assert bus.dropped == 5
    late = Heard()
    await bus.subscribe("late", late)  # asked for during the outage, there after it

    own_nats.start()
    await until(lambda: bus.connected, 30)
    async with asyncio.timeout(20):
        while not (late and heard[-1] == ("a.x", b"after")):  # subscriptions are told after the connection is back
            await bus.publish("a.x", b"after")
            await bus.publish("late", b"after")
            await asyncio.sleep(0.05)
    assert (b"lost",) not in [payload for _, payload in heard]
    assert "is away" in caplog.text
    await bus.close()


async def test_a_nats_that_comes_later(own_nats, monkeypatch):
    monkeypatch.setattr(nats_bus, "FIRST_CONNECT_S", 0.05)
    own_nats.kill()
    bus = await NatsBus.start(own_nats.url)
    assert not bus.connected
    heard = Heard()
    await bus.subscribe("a", heard)
    await bus.publish("a", b"lost")
    assert bus.dropped == 1
    own_nats.start()
    async with asyncio.timeout(20):
        while not heard:
            await bus.publish("a", b"there")
            await asyncio.sleep(0.05)
    assert set(heard) == {("a", b"there")}
    await bus.close()


async def test_a_bus_that_never_met_nats_closes(monkeypatch):
    monkeypatch.setattr(nats_bus, "FIRST_CONNECT_S", 0.05)
    bus = await NatsBus.start("nats://127.0.0.1:1")
    subscription = await bus.subscribe("a", Heard())
    await subscription.close()
    await bus.close()
    await bus.close()


@pytest.mark.parametrize("then", ["killed", "still"])
async def test_publishing_never_waits(own_nats, monkeypatch, then):
    """A server that stands still fills the socket, then the outbox; the rest is counted."""
    monkeypatch.setattr(nats_bus, "OUTBOX_MESSAGES", 16)
    bus = await NatsBus.start(own_nats.url)
    own_nats.freeze()
    async with asyncio.timeout(30):
        while bus.dropped == 0:
            await bus.publish("a", b"x" * 100_000)
            await asyncio.sleep(0)
    if then == "killed":
        own_nats.kill()
    async with asyncio.timeout(10):
        await bus.close()


@pytest.mark.parametrize("url", ["", "nonsense", "nats://"])
async def test_a_url_that_is_none(url):
    with pytest.raises(ConfigError, match="nats://HOST:PORT"):
        await NatsBus.start(url)
