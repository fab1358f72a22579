"""What a brain would be told, for tests of what stands before it."""

import asyncio


class Inbox:
    """What a brain would be told. While ``full``, offers wait."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.has_room = asyncio.Event()
        self.has_room.set()

    def post(self, event: object) -> None:
        self.events.append(event)

    async def offer(self, event: object) -> None:
        await self.has_room.wait()
        self.post(event)

    @property
    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
