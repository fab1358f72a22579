"""BrainLoop with a toy brain: order, deadlines, backpressure, and what ends it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvoy.core.errors import InvariantError
from kvoy.runtime.loop import BrainLoop


class ToyBrain:
    """Answers ``(name, now)`` with the actions it was told to, notes everything."""

    def __init__(self, answers: dict[str, list[str]] | None = None) -> None:
        self.answers = answers or {}
        self.handled: list[str] = []
        self.deadlines: list[float] = []
        self.checks = 0
        self.is_idle = True

    def handle(self, event: str, now: float) -> list[str]:
        self.handled.append(event)
        if event == "tick":
            assert self.deadlines.pop(0) <= now
        if event == "boom":
            raise InvariantError("two and two are five")
        return self.answers.get(event, [])

    def next_deadline(self) -> float | None:
        return self.deadlines[0] if self.deadlines else None

    def check(self) -> None:
        self.checks += 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def running(loop: BrainLoop[str, str]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(loop.run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_actions_are_performed_in_order_and_their_events_come_back_later() -> None:
    brain = ToyBrain({"a": ["do 1", "do 2"], "b": ["do 3"]})
    performed: list[str] = []
    finished = asyncio.Event()

    def perform(action: str) -> None:
        performed.append(action)
        loop.post(f"done {action}")
        if action == "do 3":
            finished.set()

    loop = BrainLoop(brain, perform, "tick")
    loop.post("a")
    loop.post("b")
    async with running(loop):
        await finished.wait()
        await loop.until_idle()
    assert performed == ["do 1", "do 2", "do 3"]
    assert brain.handled == ["a", "b", "done do 1", "done do 2", "done do 3"]


async def test_tick_comes_at_the_deadline_and_not_before() -> None:
    brain, clock = ToyBrain(), Clock()
    brain.deadlines = [100.01, 200.0]
    loop = BrainLoop(brain, lambda _: None, "tick", clock=clock)
    async with running(loop):
        loop.post("a")
        await loop.until_idle()
        assert brain.handled == ["a"]
        clock.now = 100.02
        loop.post("b")
        await loop.until_idle()
        assert brain.handled == ["a", "b", "tick"]


async def test_a_deadline_wakes_an_idle_loop() -> None:
    brain = ToyBrain({"tick": ["woken"]})
    woken = asyncio.Event()
    loop = BrainLoop(brain, lambda _: woken.set(), "tick")
    brain.deadlines = [0.0]
    async with running(loop):
        await woken.wait()


async def test_ticks_are_not_starved_by_events() -> None:
    brain, clock = ToyBrain({"again": ["repeat"]}), Clock()
    ticked = asyncio.Event()

    def perform(action: str) -> None:
        clock.now += 1
        loop.post("again")
        if "tick" in brain.handled:
            ticked.set()

    loop = BrainLoop(brain, perform, "tick", clock=clock)
    brain.deadlines = [110.0]
    loop.post("again")
    async with running(loop):
        await ticked.wait()
    assert brain.handled.count("again") >= 10


async def test_offers_wait_for_room_and_answers_do_not() -> None:
    brain = ToyBrain()
    loop = BrainLoop(brain, lambda _: None, "tick", room=2)
    for n in range(3):
        loop.post(f"answer {n}")
    offer = asyncio.create_task(loop.offer("new"))
    await asyncio.sleep(0)
    assert not offer.done()
    async with running(loop):
        await offer
        await loop.until_idle()
    assert brain.handled == ["answer 0", "answer 1", "answer 2", "new"]


async def test_a_cancelled_offer_is_not_handled() -> None:
    brain = ToyBrain()
    loop = BrainLoop(brain, lambda _: None, "tick", room=1)
    loop.post("first")
    offer = asyncio.create_task(loop.offer("second"))
    await asyncio.sleep(0)
    offer.cancel()
    async with running(loop):
        await loop.until_idle()
    assert brain.handled == ["first"]


async def test_until_idle_waits_for_the_brain() -> None:
    brain = ToyBrain()
    brain.is_idle = False
    loop = BrainLoop(brain, lambda _: None, "tick")
    async with running(loop):
        waiter = asyncio.create_task(loop.until_idle())
        loop.post("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiter.done()
        brain.is_idle = True
        loop.post("b")
        await waiter
    assert brain.handled == ["a", "b"]


async def test_a_bug_ends_the_loop() -> None:
    loop = BrainLoop(ToyBrain(), lambda _: None, "tick")
    loop.post("boom")
    with pytest.raises(InvariantError, match="five"):
        await loop.run()


async def test_a_bug_in_an_effect_ends_the_loop() -> None:
    def perform(action: str) -> None:
        raise KeyError(action)

    loop = BrainLoop(ToyBrain({"a": ["x"]}), perform, "tick")
    loop.post("a")
    with pytest.raises(KeyError):
        await loop.run()


async def test_check_runs_after_every_event_when_asked() -> None:
    brain = ToyBrain()
    loop = BrainLoop(brain, lambda _: None, "tick", check=True)
    loop.post("a")
    loop.post("b")
    async with running(loop):
        await loop.until_idle()
    assert brain.checks == 2


async def test_cancelling_the_loop_leaves_it_at_an_event_boundary() -> None:
    brain = ToyBrain()
    loop = BrainLoop(brain, lambda _: None, "tick")
    async with running(loop) as task:
        loop.post("a")
        await loop.until_idle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        loop.post("b")
    assert brain.handled == ["a"]
