"""Every number of a handoff is in /metrics of real pods, from the start and as 0, and moves with what happens."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from tests.faults.series import BY_TRANSPORT, DECODE, PREFILL, by, lines_of
from tests.faults.site import TOY, TRANSPORTS, Pace, Pod, Site, ask, prompt, receive
from tests.faults.toy_pod import SLOT_BLOCKS, SPEC

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 387
BLOCKS = SPEC.blocks_for(TOKENS)
FRAMES = -(-BLOCKS // SLOT_BLOCKS)
FRAME_BYTES = SLOT_BLOCKS * SPEC.block_bytes
PACE = Pace(SPEC.block_bytes, bytes_s=300_000.0, near_blocks=16)
Numbers = dict[str, float]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TRANSPORTS)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Site, Numbers]]:
    """Two prefill pods, one decode pod, and what all of them showed before the first request."""
    made = Site(TOY.by(request.param))
    try:
        await made.start(prefills=2, decodes=1)
        at_start: Numbers = {}
        for pod in made.pods:
            at_start |= await pod.series()
        yield made, at_start
    finally:
        await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def told(running: tuple[Site, Numbers], request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., object]]:
    """What has been added to each number of both ends since the test began."""
    site, _ = running
    transport = request.node.callspec.params["running"]
    before = await numbers(site, transport)

    async def news(role: str) -> Numbers:
        now = await numbers(site, transport)
        return {word: now[role][word] - before[role][word] for word in now[role]}

    yield news
    site.decodes[0].link.heal()
    await site.free(timeout_s=5.0)


async def numbers(site: Site, transport: str) -> dict[str, Numbers]:
    """By role and word; bytes and frames by this transport, and by no other."""
    return {
        "prefill": await summed(site.prefills, PREFILL, transport),
        "decode": await summed(site.decodes, DECODE, transport),
    }


async def summed(pods: list[Pod], table: dict[str, str], transport: str) -> Numbers:
    shown = [await pod.series() for pod in pods]
    names = {word: by(name, transport) if word in BY_TRANSPORT else name for word, name in table.items()}
    if (exposed := names.pop("exposed seconds", None)) is not None:
        names |= {"exposed seconds": exposed + "_sum", "requests with exposed seconds": exposed + "_count"}
    return {word: sum(each[name] for each in shown) for word, name in names.items()}


async def test_each_is_there_from_the_start_as_0(running: tuple[Site, Numbers]) -> None:
    _, at_start = running
    lines = [line for table in (PREFILL, DECODE) for name in table.values() for line in lines_of(name)]
    assert {line: at_start.get(line) for line in lines} == dict.fromkeys(lines, 0.0)


async def test_a_good_handoff(running: tuple[Site, Numbers], told: Callable) -> None:
    await ask(running[0], prompt(TOKENS))
    prefill, decode = await told("prefill"), await told("decode")
    assert prefill.pop("bytes") == decode.pop("bytes") == BLOCKS * SPEC.block_bytes
    assert prefill.pop("frames") == decode.pop("frames") == FRAMES
    assert decode.pop("requests with exposed seconds") == 1
    assert decode.pop("exposed seconds") > 0
    del prefill["credit waits"], prefill["seconds of credit waits"]
    assert set(prefill.values()) == set(decode.values()) == {0}


async def test_damage(running: tuple[Site, Numbers], told: Callable) -> None:
    site, _ = running
    site.decodes[0].link.flips = 3
    await ask(site, prompt(TOKENS))
    prefill, decode = await told("prefill"), await told("decode")
    assert prefill["resends"] == decode["resends"] == decode["bad checksums"] == 3
    assert (prefill["frames"], decode["frames"]) == (FRAMES + 3, FRAMES)
    assert decode["bytes"] == BLOCKS * SPEC.block_bytes
    assert 0 < prefill["bytes"] - decode["bytes"] <= 3 * FRAME_BYTES
    assert prefill["broken streams"] == decode["payloads that did not come"] == 0


async def test_a_stream_that_goes_on_where_one_broke(running: tuple[Site, Numbers], told: Callable) -> None:
    site, _ = running
    (decode_pod,) = site.decodes
    since = await decode_pod.number("kvoy_decode_received_bytes")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(site, prompt(TOKENS)))
        await receive(decode_pod, BLOCKS // 2, since, PACE)
        decode_pod.link.cut()
        decode_pod.link.heal()
    prefill, decode = await told("prefill"), await told("decode")
    assert prefill["broken streams"] >= prefill["resumed streams"] == decode["resumed streams"] >= 1
    assert prefill["resumed blocks"] == decode["resumed blocks"] >= BLOCKS // 2 - SLOT_BLOCKS
    assert decode["bytes"] == BLOCKS * SPEC.block_bytes
    assert decode["bad checksums"] == 0


async def test_want_of_credits(running: tuple[Site, Numbers], told: Callable) -> None:
    """Two prefill pods share the slots of one decode pod, which come free slowly."""
    site, _ = running
    site.decodes[0].link.rate_bytes_s = 100_000
    await asyncio.gather(*(ask(site, prompt(TOKENS)) for _ in range(2)))
    await site.free()
    prefill = await told("prefill")
    assert prefill["credit waits"] > 0
    assert prefill["seconds of credit waits"] > 0
    decode = await told("decode")
    assert decode["requests with exposed seconds"] == 2
