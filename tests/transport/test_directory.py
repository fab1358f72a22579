"""The directory: the same suite for Redis and for the twin, then outages, which only Redis has."""

import asyncio
import time
from dataclasses import replace

import pytest
import redis

from kvoy.core.errors import ConfigError, PeerError
from kvoy.core.types import Pod, PodLoad, PodState
from kvoy.transport.memory import MemoryDirectory
from kvoy.transport.ports import Directory
from kvoy.transport.redis_directory import RedisDirectory
from tests.transport import values


@pytest.fixture(params=["redis", "memory"])
async def directory(request):
    if request.param == "memory":
        directory: Directory = MemoryDirectory(time.monotonic)
    else:
        url = request.getfixturevalue("redis_url")
        with redis.Redis.from_url(url) as client:
            client.flushall()
        directory = RedisDirectory(url)
    yield directory
    await directory.close()


def pod(name: str, **changes):
    return replace(values.POD, pod_id=name, **changes)


async def until_listed(directory: Directory, expected: list[Pod]) -> None:
    async with asyncio.timeout(10):
        while await directory.list_pods() != expected:  # noqa: ASYNC110 - it is the time to live that ends
            await asyncio.sleep(0.02)


async def test_pods_come_and_go(directory):
    assert await directory.list_pods() == []
    await directory.register(pod("b"), 60)
    await directory.register(pod("a", model=None, kv_spec=None), 60)
    assert await directory.list_pods() == [pod("a", model=None, kv_spec=None), pod("b")]
    await directory.deregister("b")
    await directory.deregister("never there")
    assert await directory.list_pods() == [pod("a", model=None, kv_spec=None)]


async def test_the_last_registration_counts(directory):
    await directory.register(pod("a", state=PodState.STARTING), 60)
    changed = pod("a", state=PodState.DRAINING, load=PodLoad(blocks_total=5, tokens_waiting=2**40))
    await directory.register(changed, 60)
    assert await directory.list_pods() == [changed]


async def test_a_pod_that_does_not_register_again_is_forgotten(directory):
    await directory.register(pod("lasting"), 60)
    await directory.register(pod("gone"), 0.05)
    await until_listed(directory, [pod("lasting")])
    await directory.register(pod("gone"), 60)
    assert await directory.list_pods() == [pod("gone"), pod("lasting")]


async def test_generations_grow(directory):
    given = [await directory.next_generation("a") for _ in range(5)]
    assert given == sorted(set(given))
    assert await directory.next_generation("b") > 0
    assert await directory.next_generation("a") > given[-1]


async def test_many_at_once(directory):
    async def live(name: str) -> int:
        generation = await directory.next_generation(name)
        await directory.register(pod(name, generation=generation), 60)
        await directory.list_pods()
        return generation

    names = [f"pod-{i:02}" for i in range(30)]
    generations = await asyncio.gather(*(live(name) for name in names))
    assert len(set(generations)) == 30
    assert [one.pod_id for one in await directory.list_pods()] == names


# --- Redis ----------------------------------------------------------------------------------------


async def use(directory: Directory):
    await directory.register(pod("a"), 60)
    generation = await directory.next_generation("a")
    return generation, await directory.list_pods()


async def until_back(directory: Directory):
    async with asyncio.timeout(20):
        while True:
            try:
                return await use(directory)
            except PeerError:
                await asyncio.sleep(0.02)


async def test_an_outage_is_told_and_healed(own_redis):
    directory = RedisDirectory(own_redis.url)
    before, _ = await use(directory)
    own_redis.kill()
    for call in (
        directory.register(pod("a"), 60),
        directory.deregister("a"),
        directory.list_pods(),
        directory.next_generation("a"),
    ):
        with pytest.raises(PeerError, match="directory"):
            await call
    own_redis.start()  # with nothing in it
    after, pods = await until_back(directory)
    assert pods == [pod("a")]
    assert after > before, "generations grow also when Redis forgot the last one"
    await directory.close()


async def test_a_restart_between_two_calls_is_not_noticed(own_redis):
    directory = RedisDirectory(own_redis.url)
    await use(directory)
    own_redis.kill()
    own_redis.start()
    _, pods = await use(directory)
    assert pods == [pod("a")]
    await directory.close()


async def test_a_redis_that_stands_still_is_given_up(own_redis):
    directory = RedisDirectory(own_redis.url, timeout_s=0.2)
    await use(directory)
    own_redis.freeze()
    with pytest.raises(PeerError, match="does not answer"):
        await directory.list_pods()
    await directory.close()


async def test_a_redis_that_was_never_there():
    directory = RedisDirectory("redis://127.0.0.1:1", timeout_s=1)
    with pytest.raises(PeerError):
        await directory.list_pods()
    await directory.close()


async def test_an_entry_that_makes_no_sense_does_not_hide_the_others(own_redis, caplog):
    directory = RedisDirectory(own_redis.url)
    await directory.register(pod("a"), 60)
    with redis.Redis.from_url(own_redis.url) as client:
        client.set("kvoy:pod:torn", b"\xff\xff")
        client.sadd("kvoy:pods", "torn")
    assert await directory.list_pods() == [pod("a")]
    assert "makes no sense" in caplog.text
    await directory.close()


async def test_forgotten_pods_leave_nothing_behind(own_redis):
    directory = RedisDirectory(own_redis.url)
    await directory.register(pod("a"), 0.01)
    await until_listed(directory, [])
    with redis.Redis.from_url(own_redis.url) as client:
        assert client.keys("*") == []
    await directory.close()


def test_a_url_that_is_none():
    with pytest.raises(ConfigError, match="redis://HOST:PORT"):
        RedisDirectory("127.0.0.1:6379")
