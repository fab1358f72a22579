"""Runs one brain: feeds it events, one at a time, and has its actions carried out in order.

Owns the brain and its inbox; nobody else may call the brain's ``handle``. Knows nothing of what events and actions
mean. An exception of the brain or of an effect is a bug: it leaves ``run`` and ends the service, for a process that
starts afresh is better than one that goes on with a state that cannot be.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

Event = TypeVar("Event")
Action = TypeVar("Action")
Event_contra = TypeVar("Event_contra", contravariant=True)
Action_co = TypeVar("Action_co", covariant=True)


class Brain(Protocol[Event_contra, Action_co]):
    """A pure state machine; ``now`` is Unix seconds."""

    def handle(self, event: Event_contra, now: float) -> Sequence[Action_co]: ...

    def next_deadline(self) -> float | None: ...

    def check(self) -> None: ...

    @property
    def is_idle(self) -> bool: ...


class Inbox(Protocol[Event_contra]):
    """The way in, as those see it who turn what comes from outside into events."""

    def post(self, event: Event_contra) -> None: ...

    async def offer(self, event: Event_contra) -> None: ...


class BrainLoop(Generic[Event, Action]):
    """``perform`` starts an action and returns at once; what comes of it is posted as an event.

    ``tick`` is the event that says a deadline has come. ``room`` bounds what outsiders may have waiting here.
    With ``check`` the brain proves its invariants after every event.
    """

    def __init__(
        self,
        brain: Brain[Event, Action],
        perform: Callable[[Action], None],
        tick: Event,
        *,
        room: int = 1024,
        check: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._brain = brain
        self._perform = perform
        self._tick = tick
        self._room = room
        self._check = check
        self._clock = clock
        self._inbox: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_quiet = asyncio.Event()

    def post(self, event: Event) -> None:
        """An answer to an order of this brain, or the end of something: always taken, and bounded by what it ends."""
        self._inbox.append(event)
        self._arrived.set()
        self._is_quiet.clear()

    async def offer(self, event: Event) -> None:
        """Something new from outside: waits while the inbox is full, which holds its sender back."""
        while len(self._inbox) >= self._room:
            self._has_room.clear()
            await self._has_room.wait()
        self.post(event)

    async def until_idle(self) -> None:
        """Returns when every event has been handled and the brain holds nothing for anybody."""
        await self._is_quiet.wait()

    async def run(self) -> None:
        """Goes on until it is cancelled or something is broken."""
        while True:
            self._handle_batch()
            await self._wait()

    def _handle_batch(self) -> None:
        """Only what is here now: what an effect posts meanwhile is the next batch, after others had their turn."""
        self._arrived.clear()
        for _ in range(len(self._inbox)):
            self._handle(self._inbox.popleft())
        deadline = self._brain.next_deadline()
        if deadline is not None and deadline <= self._clock():
            self._handle(self._tick)
        self._has_room.set()
        if not self._inbox and self._brain.is_idle:
            self._is_quiet.set()

    def _handle(self, event: Event) -> None:
        for action in self._brain.handle(event, self._clock()):
            self._perform(action)
        if self._check:
            self._brain.check()

    async def _wait(self) -> None:
        """Until there is an event or the brain's deadline is near; at least one turn of the event loop."""
        await asyncio.sleep(0)
        deadline = self._brain.next_deadline()
        if deadline is None:
            await self._arrived.wait()
            return
        timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self._clock()), self._arrived.set)
        try:
            await self._arrived.wait()
        finally:
            timer.cancel()
