"""A pod is killed at any moment of a handoff: the request finishes elsewhere, rightly, and nothing else is harmed."""

import asyncio

import pytest

from tests.faults.killing import BYTES, kill_prefill
from tests.faults.site import Pace, Site, ask, prompt, receive
from tests.faults.toy_pod import SPEC

pytestmark = pytest.mark.asyncio(loop_scope="session")
TOKENS = 387
BLOCKS = SPEC.blocks_for(TOKENS)
"""All but the last are 99 % of them."""
PACE = Pace(SPEC.block_bytes, bytes_s=300_000.0, near_blocks=16)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
async def test_a_prefill_pod(site: Site, share: float) -> None:
    asking = ask(site, prompt(TOKENS))
    survived = await kill_prefill(site, asking, int(share * BLOCKS), PACE)
    assert survived.prefill.shipped_blocks <= BLOCKS - survived.arrived_blocks
    assert survived.decode.received_blocks == BLOCKS


async def test_a_decode_pod_that_receives(site: Site) -> None:
    for pod in site.decodes:
        pod.link.rate_bytes_s = PACE.bytes_s
    before = await site.each(site.decodes, BYTES)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(ask(site, prompt(TOKENS)))
        victim = await site.busy(site.decodes, "kvoy_leases")
        await receive(victim, BLOCKS // 2, before[victim], PACE)
        await site.kill(victim)
    assert running.result().timing.decode.received_blocks == BLOCKS
    await site.free()
    await site.replace(victim)
    await site.seen()
