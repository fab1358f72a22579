"""The link between a prefill and a decode pod damages, breaks or stands still, or the pod behind it does."""

import asyncio
import signal

import pytest

from kvoy.core.errors import DeadlinePassed
from tests.faults.proxy import NOWHERE
from tests.faults.site import Pod, Site, ask, prompt, until
from tests.faults.toy_pod import SLOT_BLOCKS, SLOTS, SPEC

pytestmark = pytest.mark.asyncio(loop_scope="session")
TOKENS = 385
BLOCKS = SPEC.blocks_for(TOKENS)
FRAMES = -(-BLOCKS // SLOT_BLOCKS)
RECEIVED = "kvoy_decode_frames_received"
SHIPPED = "kvoy_prefill_frames_sent"
CORRUPT = "kvoy_decode_frames_dropped_corrupt"


@pytest.mark.parametrize("flips", [1, 5])
async def test_a_flipped_bit_is_seen_counted_and_its_frame_sent_again(site: Site, flips: int) -> None:
    corrupt, resent = await counted(site)
    for pod in site.decodes:
        pod.link.flips = flips
    answer = await ask(site, prompt(TOKENS))
    left = min(pod.link.flips for pod in site.decodes)
    assert left == 0
    assert await counted(site) == (corrupt + flips, resent + flips)
    assert answer.timing.prefill.resent_frames == flips
    assert answer.timing.decode.received_blocks == BLOCKS


async def counted(site: Site) -> tuple[float, float]:
    """Bad checksums, and frames sent again."""
    return await site.total(site.decodes, CORRUPT), await site.total(site.prefills, "kvoy_prefill_frames_resent")


async def test_a_connection_cut_every_200_ms(site: Site) -> None:
    resumed = await site.total(site.decodes, "kvoy_decode_handoffs_resumed")
    corrupt, _ = await counted(site)
    for pod in site.decodes:
        pod.link.rate_bytes_s = 60_000
    cuts = sum(pod.link.cuts for pod in site.decodes)
    async with site.decodes[0].link.cutting(0.2), site.decodes[1].link.cutting(0.2):
        answer = await ask(site, prompt(TOKENS))
    assert sum(pod.link.cuts for pod in site.decodes) - cuts >= 3
    assert await site.total(site.decodes, "kvoy_decode_handoffs_resumed") > resumed
    assert (await counted(site))[0] == corrupt
    assert answer.timing.prefill.computed_tokens == TOKENS
    assert answer.timing.prefill.shipped_blocks == answer.timing.decode.received_blocks == BLOCKS


async def test_a_receiver_that_stands_still(site: Site) -> None:
    """The sender stops at its credits and takes no more memory; the deadline frees all, at both ends."""
    before = await site.each(site.decodes, RECEIVED)
    for pod in site.decodes:
        pod.link.rate_bytes_s = 100_000
    shipped = await site.each(site.prefills, SHIPPED)
    running = asyncio.create_task(ask(site, prompt(TOKENS), timeout_s=3.0))
    decode = await site.busy(site.decodes, RECEIVED, above=before)
    sender = await site.busy(site.prefills, "kvoy_requests_running")
    decode.send(signal.SIGSTOP)
    try:
        decode.link.heal()
        sent, resident = await settled(sender), sender.resident_bytes
        assert not running.done()
        await asyncio.sleep(0.5)
        assert await sender.number(SHIPPED) == sent
        assert sent - shipped[sender] < FRAMES // 2
        assert await sender.number("kvoy_slots_used") <= SLOTS
        assert sender.resident_bytes <= resident + (1 << 20)
        with pytest.raises(DeadlinePassed):
            await running
        await until(lambda: is_free(sender), timeout_s=1.0)
    finally:
        decode.send(signal.SIGCONT)
    await site.free()
    await ask(site, prompt(TOKENS))


async def settled(sender: Pod) -> float:
    """How many frames it has shipped once it ships no more."""
    before, now = -1.0, 0.0
    while before != now:
        await asyncio.sleep(0.1)
        before, now = now, await sender.number(SHIPPED)
    return now


async def is_free(pod: Pod) -> bool:
    return not await pod.held()


async def test_a_receiver_that_cannot_be_reached_for_a_while(site: Site) -> None:
    before = await site.each(site.decodes, RECEIVED)
    for pod in site.decodes:
        pod.link.rate_bytes_s = 100_000
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(ask(site, prompt(TOKENS)))
        decode = await site.busy(site.decodes, RECEIVED, above=before)
        target, decode.link.target = decode.link.target, NOWHERE
        decode.link.cut()
        await asyncio.sleep(0.7)
        decode.link.target = target
    assert running.result().timing.decode.received_blocks == BLOCKS
