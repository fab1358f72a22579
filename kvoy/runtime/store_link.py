"""The kvstore as a pod with an engine sees it: whichever one the directory lists now, or none.

Owns deadlines and the decision to leave a failing kvstore alone for a moment: a kvstore is a cache, so that away, late
and broken all count as empty, and never fail a request. Knows nothing of what the blocks are for.
"""

import asyncio
from collections.abc import Awaitable, Callable

from kvoy.core.errors import KvoyError
from kvoy.core.types import Pod, Role
from kvoy.runtime.pod import PodRuntime
from kvoy.runtime.presence import Outage
from kvoy.transport.kv_store import StoreClient
from kvoy.transport.ports import BlockStore

_PAUSE_S = 1.0
"""So that not every request pays for a kvstore that fails. One that has started since is tried at once."""


class StoreLink:
    """``find`` says which kvstore there is, and ``store`` calls that one. ``failures`` counts calls that failed."""

    def __init__(self, store: BlockStore, find: Callable[[], Pod | None]) -> None:
        self._store = store
        self._find = find
        self._outage = Outage("the kvstore")
        self._avoided: tuple[str, int] | None = None
        self._retry_at = 0.0
        self.failures = 0

    @classmethod
    def through(cls, pod: PodRuntime) -> "StoreLink":
        """The kvstore that the directory of this pod lists."""

        def find() -> Pod | None:
            return pod.presence.find(Role.KVSTORE)

        def address() -> str | None:
            found = find()
            return found.address if found else None

        return cls(StoreClient(pod.channels, address), find)

    async def call(self, method: Callable[[BlockStore], Awaitable[int]], limit_s: float) -> int:
        """The number of blocks that ``method`` gave; 0 if there was no answer in time."""
        clock = asyncio.get_running_loop().time
        pod = self._find()
        if pod is None or (self._avoided == (pod.pod_id, pod.generation) and clock() < self._retry_at):
            return 0
        try:
            async with asyncio.timeout(limit_s):
                blocks = await method(self._store)
        except (KvoyError, TimeoutError) as error:
            self.failures += 1
            self._avoided, self._retry_at = (pod.pod_id, pod.generation), clock() + _PAUSE_S
            self._outage.is_away(str(error) or f"no answer within {limit_s} s")
            return 0
        self._outage.is_back()
        return blocks
