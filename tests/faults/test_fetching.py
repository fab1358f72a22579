"""Amid a fetch: a prefill pod has taken over for one that was killed, and slowly gets back what the decode pod holds.

Fetches go over gRPC, whatever transport handoffs have.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from kvoy.client import Answer
from tests.faults.killing import BYTES
from tests.faults.site import FREED_S, TRANSPORTS, Pod, Site, ask, prompt, receive, until
from tests.faults.test_killed import BLOCKS, PACE, TOKENS
from tests.faults.toy_pod import SPEC

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("running", TRANSPORTS[:1], indirect=True),
]
FETCHED = "kvoy_prefill_fetched_blocks"
BACK_BYTES_S = 16_000.0
"""Half of the blocks take some seconds."""


@dataclass
class Fetch:
    """A request that has lost its first prefill pod."""

    running: asyncio.Task[Answer]
    prefill: Pod
    """Fetches."""
    decode: Pod
    """Is fetched from."""
    arrived_blocks: int
    """Were at the decode pod before."""
    lost: list[Pod]
    """To be replaced."""


@asynccontextmanager
async def fetching(site: Site) -> AsyncIterator[Fetch]:
    """Some of the blocks have come back. The site is whole and nothing held afterwards."""
    before = await site.each(site.decodes, BYTES)
    for pod in site.decodes:
        pod.link.rate_bytes_s, pod.link.back_rate_bytes_s = PACE.bytes_s, BACK_BYTES_S
    running = asyncio.create_task(ask(site, prompt(TOKENS)))
    victim = await site.busy(site.prefills, "kvoy_requests_running")
    decode = await site.busy(site.decodes, "kvoy_leases")
    await receive(decode, BLOCKS // 2, before[decode], PACE)
    fetched = await site.each(site.prefills, FETCHED)
    arrived_bytes = await decode.number(BYTES) - before[decode]
    await site.kill(victim)
    decode.link.rate_bytes_s = None
    prefill = await site.busy(site.prefills, FETCHED, above=fetched)
    lost = [victim]
    try:
        yield Fetch(running, prefill, decode, int(arrived_bytes // SPEC.block_bytes), lost)
    finally:
        running.cancel()
        await asyncio.wait({running})
        for pod in site.decodes:
            pod.link.heal()
        for pod in lost:
            await site.replace(pod)
        await site.seen()
    await site.free()
    await ask(site, prompt(40))


async def test_the_decode_pod_is_killed(site: Site) -> None:
    async with fetching(site) as fetch:
        await site.kill(fetch.decode)
        fetch.lost.append(fetch.decode)
        await fetch.running
        await site.free()


async def test_the_prefill_pod_is_killed_too(site: Site) -> None:
    """What the third one computes is still no more than what no pod had sent."""
    async with fetching(site) as fetch:
        await site.replace(fetch.lost.pop())
        await site.seen()
        await site.kill(fetch.prefill)
        fetch.lost.append(fetch.prefill)
        fetch.decode.link.heal()
        timing = (await fetch.running).timing
        assert timing.prefill.computed_tokens <= TOKENS - fetch.arrived_blocks * SPEC.block_tokens
        await site.free()


async def test_the_decode_pod_stands_still(site: Site) -> None:
    """It is waited for so long and no longer; when it goes on, so does the request."""
    async with fetching(site) as fetch:
        given_up = await fetch.prefill.number("kvoy_prefill_fetches_given_up")
        steps = await site.each([fetch.prefill], "kvoy_prefill_steps")
        fetch.decode.send(signal.SIGSTOP)
        try:
            await site.busy([fetch.prefill], "kvoy_prefill_steps", above=steps)
        finally:
            fetch.decode.send(signal.SIGCONT)
        assert await fetch.prefill.number("kvoy_prefill_fetches_given_up") == given_up + 1
        fetch.decode.link.heal()
        await fetch.running


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_the_request_is_cancelled(site: Site, is_stopped: bool) -> None:
    async with fetching(site) as fetch:
        if is_stopped:
            fetch.decode.send(signal.SIGSTOP)
        fetch.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await fetch.running
        if is_stopped:
            await until(lambda: is_free(fetch.prefill), timeout_s=FREED_S)
            fetch.decode.send(signal.SIGCONT)
        await site.free()


async def test_its_connection_is_cut(site: Site) -> None:
    async with fetching(site) as fetch:
        fetch.decode.link.heal()
        fetch.decode.link.cut()
        await fetch.running


async def is_free(pod: Pod) -> bool:
    return not await pod.held()
