"""The same faults with SmolLM2, whose frames are 2 MiB and whose outputs are known: those of the goldens."""

import asyncio
import json
import secrets
import signal
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from kvoy.client import Answer
from kvoy.core.errors import DeadlinePassed
from kvoy.core.types import KvDtype, KvSpec
from tests.architecture.sources import ROOT
from tests.faults.killing import BYTES, kill_prefill
from tests.faults.site import TRANSPORTS, Kind, Pace, Pod, Site, receive, until

GOLDEN = json.loads((ROOT / "tests" / "data" / "golden_smollm2.json").read_text())
CASES = {case["id"]: case for case in GOLDEN["cases"]}
SPEC = KvSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype=KvDtype.FP32)
FRAME_BLOCKS = 3
SMOLLM2 = Kind(
    lambda role: (f"services.{role}",),
    {"dtype": "fp32", "threads": 1, "cores_shared": "true", "pool_bytes": "512MiB", "drain_s": 2, "check": "true"},
)
TOKENS = len(CASES["long_1k"]["prompt_ids"])
BLOCKS = SPEC.blocks_for(TOKENS)
PACE = Pace(SPEC.block_bytes, bytes_s=20e6, near_blocks=4)
SHIPPED = "kvoy_prefill_frames_sent"
GROWTH_BYTES = 8 << 20
"""Less than four frames."""
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TRANSPORTS)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    made = Site(SMOLLM2.by(request.param))
    try:
        await made.start(prefills=2, decodes=2)
        yield made
    finally:
        await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def site(running: Site) -> AsyncIterator[Site]:
    """The same, with good links and nothing held before the test and after it."""
    await running.free()
    yield running
    for pod in running.decodes:
        pod.link.heal()
    await running.free(timeout_s=5.0)


async def ask(site: Site, name: str = "long_1k", timeout_s: float | None = None) -> Answer:
    """The golden output, of KV that no pod has had before."""
    case = CASES[name]
    answer = await site.client.generate(
        case["prompt_ids"],
        temperature=0.0,
        max_tokens=len(case["output_ids"]),
        cache_salt=secrets.token_hex(4),
        timeout_s=timeout_s,
    )
    assert list(answer.token_ids) == case["output_ids"]
    return answer


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
async def test_a_killed_prefill_pod(site: Site, share: float) -> None:
    blocks = min(int(share * BLOCKS), BLOCKS - FRAME_BLOCKS)
    survived = await kill_prefill(site, ask(site), blocks, PACE)
    assert survived.prefill.shipped_blocks <= BLOCKS - survived.arrived_blocks
    assert survived.prefill.computed_tokens <= TOKENS - survived.arrived_blocks * SPEC.block_tokens
    assert survived.decode.received_blocks == BLOCKS


async def test_a_killed_decode_pod(site: Site) -> None:
    for pod in site.decodes:
        pod.link.rate_bytes_s = PACE.bytes_s
    before = await site.each(site.decodes, BYTES)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(ask(site))
        victim = await site.busy(site.decodes, "kvoy_leases")
        await receive(victim, BLOCKS // 2, before[victim], PACE)
        await site.kill(victim)
    assert running.result().timing.decode.received_blocks == BLOCKS
    await site.free()
    await site.replace(victim)
    await site.seen()


async def test_a_flipped_bit(site: Site) -> None:
    corrupt = await site.total(site.decodes, "kvoy_decode_frames_dropped_corrupt")
    for pod in site.decodes:
        pod.link.flips = 1
    answer = await ask(site)
    assert answer.timing.prefill.resent_frames == 1
    assert await site.total(site.decodes, "kvoy_decode_frames_dropped_corrupt") == corrupt + 1


async def test_a_connection_cut_every_200_ms(site: Site) -> None:
    resumed = await site.total(site.decodes, "kvoy_decode_handoffs_resumed")
    async with site.decodes[0].link.cutting(0.2), site.decodes[1].link.cutting(0.2):
        answer = await ask(site)
    assert await site.total(site.decodes, "kvoy_decode_handoffs_resumed") > resumed
    assert answer.timing.prefill.computed_tokens == len(CASES["long_1k"]["prompt_ids"])
    assert answer.timing.decode.received_blocks == BLOCKS


async def test_a_receiver_that_stands_still(site: Site) -> None:
    """The sender goes on computing, but sends no more than its credits and takes no more memory."""
    shipped = await site.each(site.prefills, SHIPPED)
    received = await site.each(site.decodes, BYTES)
    running = asyncio.create_task(ask(site, "long_3k", timeout_s=20.0))
    decode = await site.busy(site.decodes, BYTES, above=received)
    sender = await site.busy(site.prefills, "kvoy_requests_running")
    decode.send(signal.SIGSTOP)
    try:
        sent = await no_longer_sending(sender)
        resident = resident_bytes(sender)
        await asyncio.sleep(2.0)
        assert not running.done()
        assert await sender.number(SHIPPED) == sent
        assert sent - shipped[sender] < BLOCKS // FRAME_BLOCKS
        assert resident_bytes(sender) <= resident + GROWTH_BYTES
        with pytest.raises(DeadlinePassed):
            await running
        await until(lambda: is_free(sender), timeout_s=1.0)
    finally:
        decode.send(signal.SIGCONT)
    await site.free()
    await ask(site)


async def no_longer_sending(pod: Pod) -> float:
    """What it has shipped, once it has shipped no more for a while."""
    shipped, still_s = -1.0, 0.0
    while still_s < 2.0:
        now = await pod.number(SHIPPED)
        shipped, still_s = now, 0.0 if now != shipped else still_s + 0.25
        await asyncio.sleep(0.25)
    return shipped


def resident_bytes(pod: Pod) -> int:
    """Of the service; its worker fills its pool as it computes."""
    return psutil.Process(pod.process.pid).memory_info().rss


async def is_free(pod: Pod) -> bool:
    return not await pod.held()
