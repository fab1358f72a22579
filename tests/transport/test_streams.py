"""The outbox and the small asyncio tools."""

import asyncio
import contextlib
import gc
import weakref

import pytest

from kvoy.core.errors import KvoyError, Overloaded
from kvoy.transport.streams import Outbox, closing, race, to_the_end


def outbox(limit: int = 3) -> Outbox[str]:
    return Outbox(limit, lambda: Overloaded("Too slow.", "slow"), len)


async def test_what_is_put_is_taken_in_order():
    box = outbox(10)
    for message in "abc":
        box.put(message)
    assert await box.take() == ["a", "b", "c"]
    waiting = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put("d")
    assert await waiting == ["d"]
    box.put("e")
    box.finish()
    box.put("too late")
    assert await box.take() == ["e"]
    assert await box.take() == []
    assert not box.open


async def test_a_farewell_comes_after_all_that_was_said():
    box = outbox()
    box.put("a")
    box.finish(KvoyError("Good bye."))
    box.finish(KvoyError("Not this one."))
    assert await box.take() == ["a"]
    with pytest.raises(KvoyError, match="Good bye"):
        await box.take()


async def test_overflow_is_by_weight_and_fails_the_stream():
    box = outbox(3)
    box.put("ab")
    assert await box.take() == ["ab"]
    box.put("abc")
    assert box.open
    box.put("d")
    assert not box.open
    with pytest.raises(Overloaded):
        await box.failure()
    box.fail(KvoyError("Another."))
    with pytest.raises(Overloaded):
        await box.failure()


async def test_race_ends_with_the_first_and_cancels_the_others():
    ended = []

    async def runner(name, go):
        try:
            await go.wait()
        finally:
            ended.append(name)

    go, never = asyncio.Event(), asyncio.Event()
    racing = asyncio.create_task(race(runner("winner", go), runner("loser", never)))
    await asyncio.sleep(0)
    go.set()
    await racing
    assert ended == ["winner", "loser"]


async def test_race_raises_what_the_first_raised_and_hides_no_cancellation():
    async def fail():
        raise KvoyError("First.")

    async def wait():
        await asyncio.Event().wait()

    with pytest.raises(KvoyError, match="First"):
        await race(wait(), fail())
    racing = asyncio.create_task(race(wait(), wait()))
    await asyncio.sleep(0)
    racing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await racing


async def test_work_runs_to_its_end_under_repeated_cancellation():
    go, done = asyncio.Event(), []

    async def work():
        await go.wait()
        done.append(True)

    task = asyncio.create_task(to_the_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [True]


async def test_the_works_own_failure_comes_out():
    async def work():
        raise KvoyError("Mine.")

    with pytest.raises(KvoyError, match="Mine"):
        await to_the_end(work())


async def test_closing_closes_generators_and_leaves_other_iterators_alone():
    closed = []

    async def generator():
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    numbers = generator()
    async with closing(numbers):
        assert await anext(numbers) == 1
    assert closed == [True]

    class Plain:
        def __aiter__(self):
            return self

        async def __anext__(self):
            raise StopAsyncIteration

    async with closing(Plain()):
        pass


class Thing:
    """What a work of a race holds."""


@contextlib.contextmanager
def no_collection():
    """Python does not look for cycles meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_after_a_race_nothing_of_it_is_held():
    box = outbox()

    async def wait(thing: Thing) -> None:
        await asyncio.Event().wait()
        assert thing

    async def run() -> weakref.ref[Thing]:
        thing = Thing()
        known = weakref.ref(thing)
        works = [wait(thing), box.failure()]
        del thing
        asyncio.get_running_loop().call_soon(box.fail, KvoyError("Over."))
        try:
            await race(*works)
        except KvoyError as error:
            error.with_traceback(None)
        return known

    with no_collection():
        known = await run()
        assert known() is None
        box = outbox()
