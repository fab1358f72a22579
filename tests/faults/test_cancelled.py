"""A request is taken back in every state it can be in: a second later nothing is held for it anywhere."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import pytest

from tests.faults.proxy import NOWHERE
from tests.faults.site import Pace, Pod, Site, ask, prompt, receive
from tests.faults.toy_pod import SLOW_ANSWER, SLOW_PROMPT, SPEC

pytestmark = pytest.mark.asyncio(loop_scope="session")
TOKENS = 387
BLOCKS = SPEC.blocks_for(TOKENS)
PACE = Pace(SPEC.block_bytes, bytes_s=300_000.0, near_blocks=16)
Running = asyncio.Task[object]


@contextmanager
def standing_still(pods: Sequence[Pod]) -> Iterator[None]:
    for pod in pods:
        pod.send(signal.SIGSTOP)
    try:
        yield
    finally:
        for pod in pods:
            pod.send(signal.SIGCONT)


def asked(site: Site, first: int | None = None) -> Running:
    return asyncio.create_task(ask(site, prompt(TOKENS, first)))


@asynccontextmanager
async def asking_for_blocks(site: Site) -> AsyncIterator[Running]:
    with standing_still(site.decodes):
        running = asked(site)
        await site.busy([site.router], "kvoy_router_requests_in_flight")
        yield running


@asynccontextmanager
async def holding_blocks(site: Site) -> AsyncIterator[Running]:
    with standing_still(site.prefills):
        running = asked(site)
        await site.busy(site.decodes, "kvoy_leases")
        yield running


@asynccontextmanager
async def computing(site: Site) -> AsyncIterator[Running]:
    steps = await site.each(site.prefills, "kvoy_prefill_steps")
    running = asked(site, SLOW_PROMPT)
    await site.busy(site.prefills, "kvoy_prefill_steps", above=steps)
    yield running


@asynccontextmanager
async def handing_over(site: Site) -> AsyncIterator[Running]:
    running, _ = await at_decode(site, BLOCKS // 2)
    yield running


@asynccontextmanager
async def handing_over_on_a_still_link(site: Site) -> AsyncIterator[Running]:
    running, decode = await at_decode(site, BLOCKS // 2)
    decode.link.stall()
    yield running


@asynccontextmanager
async def opening_again(site: Site) -> AsyncIterator[Running]:
    running, decode = await at_decode(site, BLOCKS // 2)
    decode.link.target, target = NOWHERE, decode.link.target
    decode.link.cut()
    await site.busy(
        site.prefills, "kvoy_prefill_handoffs_lost", await site.each(site.prefills, "kvoy_prefill_handoffs_lost")
    )
    yield running
    decode.link.target = target


@asynccontextmanager
async def committing(site: Site) -> AsyncIterator[Running]:
    """All but the last block is there, and the commit is behind it."""
    running, decode = await at_decode(site, BLOCKS - 1)
    decode.link.stall()
    yield running


@asynccontextmanager
async def answering(site: Site) -> AsyncIterator[Running]:
    running = asked(site, SLOW_ANSWER)
    await site.busy(site.decodes, "kvoy_requests_running")
    yield running


async def at_decode(site: Site, blocks: int) -> tuple[Running, Pod]:
    """A request of which so many blocks have come, and the pod that has them."""
    before = await site.each(site.decodes, "kvoy_decode_received_bytes")
    for pod in site.decodes:
        pod.link.rate_bytes_s = PACE.bytes_s
    running = asked(site)
    decode = await site.busy(site.decodes, "kvoy_leases")
    await receive(decode, blocks, before[decode], PACE)
    return running, decode


@pytest.mark.parametrize(
    "place",
    [
        asking_for_blocks,
        holding_blocks,
        computing,
        handing_over,
        handing_over_on_a_still_link,
        opening_again,
        committing,
        answering,
    ],
)
async def test_in_any_state(site: Site, place: Callable[[Site], AbstractAsyncContextManager[Running]]) -> None:
    async with place(site) as running:
        assert not running.done()
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
    await site.free()
    for pod in site.decodes:
        pod.link.heal()
    await ask(site, prompt(40))
