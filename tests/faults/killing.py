"""Kills a prefill pod at a chosen moment of a handoff, and says what came of the request."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass

from kvoy.client import Answer
from kvoy.core.generate import RequestTiming
from kvoy.core.types import DecodeReport, PrefillReport
from tests.faults.site import Pace, Site, receive

BYTES = "kvoy_decode_received_bytes"


@dataclass(frozen=True)
class Survived:
    """A request whose prefill pod was killed."""

    arrived_blocks: int
    """Were at the decode pod before."""
    prefill: PrefillReport
    """Of the other prefill pod."""
    decode: DecodeReport


async def kill_prefill(site: Site, asking: Coroutine[None, None, Answer], blocks: int, pace: Pace) -> Survived:
    """Kill the pod that prefills the only request when so many of its blocks are at the decode pod; at 0 before its
    handoff is open."""
    before = await site.each(site.decodes, BYTES)
    for pod in site.decodes:
        pod.link.rate_bytes_s = pace.bytes_s
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(asking)
        victim = await site.busy(site.prefills, "kvoy_requests_running")
        decode = await site.busy(site.decodes, "kvoy_leases")
        if blocks:
            await receive(decode, blocks, before[decode], pace)
        arrived_bytes = await decode.number(BYTES) - before[decode]
        await site.kill(victim)
        decode.link.heal()
    await site.free()
    await site.replace(victim)
    await site.seen()
    timing = running.result().timing
    assert isinstance(timing, RequestTiming)
    assert timing.prefill is not None
    assert timing.decode is not None
    assert arrived_bytes >= blocks * pace.block_bytes
    return Survived(int(arrived_bytes // pace.block_bytes), timing.prefill, timing.decode)
