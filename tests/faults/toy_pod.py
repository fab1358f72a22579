"""``python -m tests.faults.toy_pod ROLE``: a service as it runs in production, around the toy model.

A prompt that begins with SLOW_PROMPT is prefilled slowly, one with SLOW_ANSWER is answered slowly, so that a fault can
be placed while it is.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from kvoy.core.step import StepPlan
from kvoy.core.types import KvDtype, KvSpec, Role
from kvoy.engine import messages
from kvoy.runtime.config import load
from kvoy.runtime.pod import PodConfig, PodRuntime, Service, run_service
from kvoy.telemetry.metrics import Instrument
from kvoy.transport import links
from services.decode import service as decode
from services.decode.config import DecodeConfig
from services.prefill import service as prefill
from services.prefill.config import PrefillConfig
from services.router.config import RouterConfig
from services.router.metrics import ROUTER_TABLE
from services.router.served import Served
from services.router.service import RouterService
from tests.pods.toy_engine import MODEL, ToyEngine
from tests.router.fakes import ByteDetokenizer, ByteTokenizer

SPEC = KvSpec(layers=4, kv_heads=4, head_dim=2, block_tokens=4, dtype=KvDtype.FP32)
POOL_BLOCKS = 640
SLOTS = 8
SLOT_BLOCKS = 2
SLOW_PROMPT = 998
SLOW_ANSWER = 997
SLOW_STEP_S = 0.15
STEP_S = 0.002


links.RETRY_S = 0.2
"""Else pods would do without a transport for most of the tests, once a link was bad."""


class PacedEngine(ToyEngine):
    """Takes its time for steps, so that a prompt is under way for a while."""

    def __init__(self) -> None:
        super().__init__(pool_blocks=POOL_BLOCKS, slots=SLOTS, slot_blocks=SLOT_BLOCKS, spec=SPEC)

    async def answers(self) -> AsyncIterator[messages.Answer]:
        while True:
            order = await self._orders.get()
            if isinstance(order, messages.RunStep):
                await asyncio.sleep(self._step_s(order.plan))
            else:
                await asyncio.sleep(0)
            for answer in self._obey(order):
                yield answer
            self.steps.clear()

    def _look_at_clock(self) -> float:
        return time.time()

    def _step_s(self, plan: StepPlan) -> float:
        prefilled = (self._first(row.block_table) if row.start else row.token_ids[0] for row in plan.prefill)
        is_slow = SLOW_PROMPT in prefilled or any(self._first(row.block_table) == SLOW_ANSWER for row in plan.decode)
        return SLOW_STEP_S if is_slow else STEP_S

    def _first(self, table: tuple[int, ...]) -> int:
        return self._read(table, 0)


class Silence(ByteDetokenizer):
    """Tokens of the toy model are no text."""

    def push(self, token_id: int) -> str:
        del token_id
        return ""


class NoText(ByteTokenizer):
    """Prompts are token ids, and answers are, too."""

    eos_token_ids = ()

    def token_bytes(self, token_id: int) -> bytes:
        del token_id
        return b""

    def detokenizer(self, *, continuing: bool = False) -> Silence:
        del continuing
        return Silence()


async def start_prefill(pod: PodRuntime, config: PrefillConfig) -> Service:
    return prefill.assemble(pod, config, PacedEngine())


async def start_decode(pod: PodRuntime, config: DecodeConfig) -> Service:
    return decode.assemble(pod, config, PacedEngine())


async def start_router(pod: PodRuntime, config: RouterConfig) -> Service:
    return await RouterService.start(pod, config, Served(MODEL, NoText()))


ROLES: dict[str, tuple[type[PodConfig], Callable[..., Awaitable[Service]], Sequence[Instrument]]] = {
    "prefill": (PrefillConfig, start_prefill, prefill.TABLE),
    "decode": (DecodeConfig, start_decode, decode.TABLE),
    "router": (RouterConfig, start_router, ROUTER_TABLE),
}


def main() -> int:
    role, *words = sys.argv[1:]
    kind, start, table = ROLES[role]
    config = load(kind, words, os.environ, f"python -m tests.faults.toy_pod {role}")
    return run_service(Role(role), config, lambda pod: start(pod, config), table)


if __name__ == "__main__":
    sys.exit(main())
