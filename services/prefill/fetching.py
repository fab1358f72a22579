"""What a prefill pod fetches from decode pods: each order becomes one call, and is answered exactly once.

Owns the calls under way. How long the decode pod is waited for is the brain's to say; ``limit_s`` only bounds a call.
"""

import asyncio
import logging
from collections.abc import Callable

from kvoy.core.actions import FetchHeld
from kvoy.core.events import HeldFetched
from kvoy.transport.ports import KvLender

log = logging.getLogger(__name__)


class Fetching:
    """``slot(index, length)`` gives the bytes of a staging slot; ``post`` takes the answers."""

    def __init__(
        self,
        lender: KvLender,
        slot: Callable[[int, int], memoryview],
        tasks: asyncio.TaskGroup,
        post: Callable[[HeldFetched], None],
        limit_s: float,
    ) -> None:
        self._lender = lender
        self._slot = slot
        self._tasks = tasks
        self._post = post
        self._limit_s = limit_s
        self._calls: dict[int, asyncio.Task[HeldFetched]] = {}

    def start(self, order: FetchHeld) -> None:
        """Answered also when it is cancelled."""
        task = self._tasks.create_task(self._fetch(order), name=f"blocks of {order.call.key.request_id}")
        self._calls[order.transfer_id] = task
        task.add_done_callback(lambda _: self._answer(order.transfer_id))

    def cancel(self, transfer_id: int) -> None:
        """Answer now, unless it is answered."""
        if transfer_id in self._calls:
            self._calls[transfer_id].cancel()

    async def _fetch(self, order: FetchHeld) -> HeldFetched:
        into = self._slot(order.slot, order.call.blocks * order.call.kv_spec.block_bytes)
        lent = await self._lender.fetch(order.address, order.call, into, self._limit_s)
        if lent.problem:
            log.info("blocks of %s are not fetched but computed: %s", order.call.key.request_id, lent.problem)
        return HeldFetched(order.transfer_id, lent.blocks, lent.is_damaged)

    def _answer(self, transfer_id: int) -> None:
        """A call that broke in a way that it should not have has ended the service, too."""
        task = self._calls.pop(transfer_id)
        has_answer = not task.cancelled() and task.exception() is None
        self._post(task.result() if has_answer else HeldFetched(transfer_id, 0))
