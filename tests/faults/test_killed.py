"""A pod is killed at any moment of a handoff: the request finishes elsewhere, rightly, and nothing else is lost."""

import asyncio

import pytest

from tests.faults.site import Site, ask, prompt, receive
from tests.faults.toy_pod import SPEC

pytestmark = pytest.mark.asyncio(loop_scope="session")
TOKENS = 387
BLOCKS = SPEC.blocks_for(TOKENS)
"""All but the last are 99 % of them."""
LINK_BYTES_S = 300_000.0


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
async def test_a_prefill_pod(site: Site, share: float) -> None:
    for pod in site.decodes:
        pod.link.rate_bytes_s = LINK_BYTES_S
    before = await site.each(site.decodes, "kvoy_decode_bytes_received")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(ask(site, prompt(TOKENS)))
        victim = await site.busy(site.prefills, "kvoy_requests_running")
        decode = await site.busy(site.decodes, "kvoy_leases")
        if share:
            await receive(decode, int(share * BLOCKS), SPEC.block_bytes, before[decode], LINK_BYTES_S)
        arrived = (await decode.number("kvoy_decode_bytes_received") - before[decode]) // SPEC.block_bytes
        await site.kill(victim)
        decode.link.heal()
    timing = running.result().timing
    assert arrived >= int(share * BLOCKS)
    assert timing.prefill.shipped_blocks <= BLOCKS - arrived
    assert timing.decode.received_blocks == BLOCKS
    await site.free()
    await site.replace(victim)
    await site.seen()


async def test_a_decode_pod_that_receives(site: Site) -> None:
    for pod in site.decodes:
        pod.link.rate_bytes_s = LINK_BYTES_S
    before = await site.each(site.decodes, "kvoy_decode_bytes_received")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(ask(site, prompt(TOKENS)))
        victim = await site.busy(site.decodes, "kvoy_leases")
        await receive(victim, BLOCKS // 2, SPEC.block_bytes, before[victim], LINK_BYTES_S)
        await site.kill(victim)
    assert running.result().timing.decode.received_blocks == BLOCKS
    await site.free()
    await site.replace(victim)
    await site.seen()
