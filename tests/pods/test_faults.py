"""Whatever goes away, and whenever: right tokens or a clear failure, and nothing held for anybody afterwards."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator

import pytest

from kvoy.core.errors import EngineError, InvariantError, KvoyError, PeerError, Unavailable
from kvoy.core.frames import FrameHeader
from kvoy.core.hashing import block_ids
from kvoy.core.store import StoreKey
from kvoy.core.types import FinishReason, PodState, PrefillWork, RejectReason, Reservation
from kvoy.transport import kv_stream
from tests.pods.cluster import (
    GREEDY,
    Cluster,
    Outcome,
    Router,
    RunningPod,
    ask,
    cluster,
    leaves,
    note,
    sentence,
    until_reserved,
)
from tests.pods.toy_engine import MODEL, SPEC, ToyEngine, continuation


def prompt(length: int, start: int = 7) -> list[int]:
    return [(start + 31 * n) % 997 for n in range(length)]


@pytest.fixture
async def pods() -> AsyncIterator[Cluster]:
    async with cluster() as made:
        yield made


async def serves(pods: Cluster, decode: str, prefill: str | None) -> None:
    """A fresh request is answered rightly."""
    request = ask(prompt(33, start=random.randrange(900)))
    outcome = await pods.router.generate(request, decode, prefill)
    assert outcome.token_ids == continuation(request.token_ids, request.sampling)


@pytest.mark.parametrize("disaggregated", [True, False])
@pytest.mark.parametrize("seed", range(4))
async def test_cancelled_at_any_moment(pods: Cluster, seed: int, disaggregated: bool) -> None:
    draw = random.Random(seed)
    prefill, decode = await pods.prefill(chunk_tokens=8), await pods.decode(chunk_tokens=8)
    source = prefill.address if disaggregated else None

    async def one(number: int) -> None:
        request = ask(prompt(1 + draw.randrange(70), start=number))
        running = asyncio.create_task(pods.router.generate(request, decode.address, source))
        if draw.random() < 0.7:
            for _ in range(draw.randrange(400)):
                await asyncio.sleep(0)
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            outcome = await running
            assert outcome.token_ids == continuation(request.token_ids, request.sampling)

    for first in range(0, 40, 8):
        await asyncio.gather(*(one(number) for number in range(first, first + 8)))
    await prefill.until_free()
    await decode.until_free()
    await serves(pods, decode.address, source)


async def test_a_router_that_goes_takes_its_requests_with_it(pods: Cluster) -> None:
    prefill, decode = await pods.prefill(chunk_tokens=8), await pods.decode()
    decode.engine.hold()
    router = Router()
    running = [
        asyncio.create_task(router.generate(ask(prompt(60, start=n)), decode.address, prefill.address))
        for n in range(3)
    ]
    await decode.until(lambda pod: pod.load.leases == 3)
    for one in running:
        one.cancel()
    await router.close()
    await asyncio.gather(*running, return_exceptions=True)
    decode.engine.going.set()
    await decode.until_free()
    await prefill.until_free()


async def test_decode_goes_while_it_is_fed(pods: Cluster) -> None:
    prefill, decode = await pods.prefill(chunk_tokens=8), await pods.decode(pod_id="d")
    other = await pods.decode()
    decode.engine.hold()
    running = asyncio.create_task(pods.router.generate(ask(prompt(90)), decode.address, prefill.address))
    await decode.until(lambda pod: pod.load.slots_used > 0)
    decode.runtime.stop.ask(now=True)
    with pytest.raises(BaseExceptionGroup) as caught:
        await running
    assert all(isinstance(error, PeerError | Unavailable) for error in leaves(caught.value))
    await prefill.until_free()
    await serves(pods, other.address, prefill.address)


async def test_prefill_goes_and_another_takes_over(pods: Cluster) -> None:
    first, second = await pods.prefill(chunk_tokens=8), await pods.prefill(chunk_tokens=8)
    decode = await pods.decode()
    first.engine.hold_before_step = 1
    request = ask(prompt(90))
    outcome = Outcome()
    async with pods.router.decode.reserve(decode.address, request) as ongoing:
        reservation = await until_reserved(ongoing)
        handing = asyncio.create_task(pods.router.hand_over(PrefillWork(request, reservation), first.address, outcome))
        await first.until(lambda pod: pod.load.slots_used > 0)
        first.engine.hold_before_step = 6
        first.engine.going.set()
        brain = decode.service.brain
        await decode.until(lambda pod: brain.counters.frames_received >= 3 and not pod.load.slots_used)
        first.runtime.stop.ask(now=True)
        with pytest.raises(KvoyError):
            await handing
        ongoing.renew()
        renewed = await until_reserved(ongoing)
        assert renewed.epoch == reservation.epoch + 1
        assert 6 <= renewed.held_blocks <= 12
        await pods.router.hand_over(PrefillWork(request, renewed), second.address, outcome)
        async for event in ongoing:
            assert not isinstance(event, Reservation)
            note(outcome, event)
    assert outcome.token_ids == continuation(request.token_ids, request.sampling)
    assert outcome.prefill.shipped_blocks == SPEC.blocks_for(90) - renewed.held_blocks
    await decode.until_free()


async def test_a_frame_damaged_on_its_way_is_sent_again(pods: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    in_frames = {"transport": ("grpc",)}
    prefill, decode = await pods.prefill(chunk_tokens=8, **in_frames), await pods.decode(**in_frames)
    intact = kv_stream.frame_to_wire
    damaged: list[int] = []

    def damage_once(header: FrameHeader, payload: memoryview) -> bytes:
        wire = bytearray(intact(header, payload))
        if header.seq in {1, 4} and header.seq not in damaged:
            damaged.append(header.seq)
            wire[-5] ^= 0x40
        return bytes(wire)

    monkeypatch.setattr(kv_stream, "frame_to_wire", damage_once)
    request = ask(prompt(60))
    outcome = await pods.router.generate(request, decode.address, prefill.address)
    assert outcome.token_ids == continuation(request.token_ids, request.sampling)
    assert outcome.prefill.resent_frames == len(damaged) == 2
    assert decode.service.brain.counters.frames_dropped_corrupt == 2
    assert outcome.decode.received_bytes == SPEC.blocks_for(60) * SPEC.block_bytes
    await prefill.until_free()
    await decode.until_free()


async def test_a_lease_that_nobody_feeds_ends(pods: Cluster) -> None:
    decode = await pods.decode(lease_s=0.05)
    async with pods.router.decode.reserve(decode.address, ask(prompt(20))) as ongoing:
        await until_reserved(ongoing)
        outcome = Outcome()
        async for event in ongoing:
            note(outcome, event)
    assert outcome.rejection is not None
    assert outcome.rejection.reason is RejectReason.LEASE_EXPIRED
    await decode.until_free()


async def test_work_for_a_lease_that_has_ended_is_refused(pods: Cluster) -> None:
    prefill, decode = await pods.prefill(), await pods.decode()
    request = ask(prompt(20))
    async with pods.router.decode.reserve(decode.address, request) as ongoing:
        reservation = await until_reserved(ongoing)
    with pytest.raises(KvoyError, match="no_lease"):
        await pods.router.hand_over(PrefillWork(request, reservation), prefill.address, Outcome())
    await prefill.until_free()
    await decode.until_free()


async def test_blocks_come_back_from_the_kvstore_after_a_restart(pods: Cluster) -> None:
    store = await pods.kvstore(capacity_bytes=1 << 20)
    first, decode = await pods.prefill(ToyEngine(slots=16)), await pods.decode(pod_id="d")
    await pods.see_each_other()
    shared = prompt(40)
    await pods.router.generate(ask(shared), decode.address, first.address)
    await store.until(lambda pod: pod.load.blocks_cached >= 10)
    await first.stop()
    await decode.stop()
    second, fresh = await pods.prefill(), await pods.decode(pod_id="fresh")
    await pods.see_each_other()
    again = ask([*shared, 1, 2, 3])
    outcome = await pods.router.generate(again, fresh.address, second.address)
    assert outcome.token_ids == continuation(again.token_ids, again.sampling)
    assert outcome.prefill.reloaded_tokens == outcome.prefill.cached_tokens == 40
    assert outcome.prefill.computed_tokens == 3
    await second.until_free()


async def test_the_kvstore_comes_goes_and_comes_back(pods: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prefill, decode = await pods.prefill(), await pods.decode()
    await serves(pods, decode.address, prefill.address)
    for _ in range(2):
        store = await pods.kvstore(capacity_bytes=1 << 20)
        await pods.see_each_other()
        await serves(pods, decode.address, prefill.address)
        await store.until(lambda pod: pod.load.blocks_cached > 0)
        await store.stop()
        for _ in range(3):
            await serves(pods, decode.address, prefill.address)
    await prefill.until_free()
    await decode.until_free()
    assert caplog.text.count("the kvstore is away") <= 4


def damage(store: RunningPod, block_id: bytes) -> None:
    """Flips a bit of the block in the kvstore's memory."""
    (pin,) = store.service._brain.pin(StoreKey(MODEL.fingerprint, SPEC), [block_id])
    store.service._slab._view[pin.place.offset + 5] ^= 1
    store.service._brain.unpin(pin)


async def test_a_corrupt_block_of_the_kvstore_is_computed_again(pods: Cluster) -> None:
    store = await pods.kvstore(capacity_bytes=1 << 20)
    first, decode = await pods.prefill(ToyEngine(slots=16)), await pods.decode()
    await pods.see_each_other()
    await pods.router.generate(ask(prompt(40)), decode.address, first.address)
    await store.until(lambda pod: pod.load.blocks_cached >= 10)
    await first.stop()
    await decode.stop()
    damage(store, block_ids(prompt(40), SPEC.block_tokens, MODEL.fingerprint, "")[3])
    second, fresh = await pods.prefill(), await pods.decode()
    await pods.see_each_other()
    request = ask([*prompt(40), 1])
    outcome = await pods.router.generate(request, fresh.address, second.address)
    assert outcome.token_ids == continuation(request.token_ids, request.sampling)
    assert outcome.prefill.reloaded_tokens == 3 * SPEC.block_tokens
    assert store.service._brain.counters.corrupt_blocks == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_dead_engine_fails_every_request_with_its_sentence(pods: Cluster, role: str) -> None:
    prefill, decode = await pods.prefill(chunk_tokens=8), await pods.decode()
    sick, source = (prefill, prefill.address) if role == "prefill" else (decode, None)
    sick.engine.hold()
    running = [
        asyncio.create_task(pods.router.generate(ask(prompt(60, start=n)), decode.address, source)) for n in range(3)
    ]
    await sick.until(lambda pod: pod.load.requests_running >= 3)
    sick.engine.die("The engine worker was killed by signal 9.")
    with pytest.raises(BaseExceptionGroup) as caught:
        await sick.task
    (error,) = leaves(caught.value)
    assert isinstance(error, EngineError)
    for outcome in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(outcome, BaseException):
            assert "killed by signal 9" in sentence(outcome)
        else:
            assert outcome.rejection is not None
            assert "killed by signal 9" in outcome.rejection.message
    assert sick.engine.stopped
    assert sick.pod.pod_id not in [pod.pod_id for pod in await pods.directory.list_pods()]
    await (decode if role == "prefill" else prefill).until_free()


async def test_a_bug_ends_the_pod(pods: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = await pods.decode()

    def broken() -> None:
        raise InvariantError("a block has two owners")

    monkeypatch.setattr(decode.service.brain, "check", broken)
    running = asyncio.create_task(pods.router.generate(ask(prompt(9)), decode.address, None))
    with pytest.raises(BaseExceptionGroup) as caught:
        await decode.task
    assert "two owners" in sentence(caught.value)
    await asyncio.gather(running, return_exceptions=True)


async def test_drain_finishes_what_is_here_and_takes_nothing_new(pods: Cluster) -> None:
    prefill, decode = await pods.prefill(chunk_tokens=8), await pods.decode(pod_id="d")
    decode.engine.hold()
    request = ask(prompt(40))
    running = asyncio.create_task(pods.router.generate(request, decode.address, prefill.address))
    await decode.until(lambda pod: pod.load.slots_used > 0)
    decode.runtime.stop.ask()
    await decode.until(lambda pod: pod.state is PodState.DRAINING)
    late = await pods.router.generate(ask(prompt(9)), decode.address, prefill.address)
    assert late.rejection is not None
    assert late.rejection.reason is RejectReason.DRAINING
    assert not decode.task.done()
    decode.engine.going.set()
    outcome = await running
    assert outcome.token_ids == continuation(request.token_ids, request.sampling)
    assert outcome.finish is FinishReason.LENGTH
    await decode.task
    assert "d" not in [pod.pod_id for pod in await pods.directory.list_pods()]


async def test_a_draining_prefill_pod_finishes_its_work(pods: Cluster) -> None:
    prefill, decode = await pods.prefill(chunk_tokens=8), await pods.decode()
    prefill.engine.hold()
    request = ask(prompt(40))
    running = asyncio.create_task(pods.router.generate(request, decode.address, prefill.address))
    await prefill.until(lambda pod: pod.load.requests_running > 0)
    prefill.runtime.stop.ask()
    await prefill.until(lambda pod: pod.state is PodState.DRAINING)
    with pytest.raises(BaseExceptionGroup) as caught:
        await pods.router.generate(ask(prompt(9)), decode.address, prefill.address)
    assert "about to leave" in sentence(caught.value)
    prefill.engine.going.set()
    assert (await running).token_ids == continuation(request.token_ids, request.sampling)
    await prefill.task


async def test_patience_with_drain_ends(pods: Cluster) -> None:
    decode = await pods.decode(drain_s=0.05)
    decode.engine.hold()
    running = asyncio.create_task(pods.router.generate(ask(prompt(9)), decode.address, None))
    await decode.until(lambda pod: pod.load.requests_running > 0)
    await decode.stop()
    with pytest.raises(BaseExceptionGroup) as caught:
        await running
    assert "leaving" in sentence(caught.value)


async def test_asked_again_it_leaves_at_once(pods: Cluster) -> None:
    decode = await pods.decode()
    decode.engine.hold()
    running = asyncio.create_task(pods.router.generate(ask(prompt(9)), decode.address, None))
    await decode.until(lambda pod: pod.load.requests_running > 0)
    decode.runtime.stop.ask()
    await decode.until(lambda pod: pod.state is PodState.DRAINING)
    await decode.stop()
    with pytest.raises(BaseExceptionGroup):
        await running


async def test_a_pool_too_small_for_all_serves_all_in_turn(pods: Cluster) -> None:
    prefill = await pods.prefill(ToyEngine(pool_blocks=12, slots=3, slot_blocks=1), chunk_tokens=8)
    decode = await pods.decode(ToyEngine(pool_blocks=20, slots=2, slot_blocks=1), max_batch=4)
    requests = [ask(prompt(30 + n, start=n)) for n in range(12)]
    outcomes = await asyncio.gather(
        *(pods.router.generate(request, decode.address, prefill.address) for request in requests)
    )
    for request, outcome in zip(requests, outcomes, strict=True):
        assert outcome.token_ids == continuation(request.token_ids, request.sampling)
    await prefill.until_free()
    await decode.until_free()


async def test_a_deadline_that_passes_frees_everything(pods: Cluster) -> None:
    prefill, decode = await pods.prefill(chunk_tokens=8), await pods.decode()
    decode.engine.hold()
    request = ask(prompt(60), deadline=decode.service.loop._clock() + 0.2)
    with contextlib.suppress(BaseExceptionGroup):
        outcome = await pods.router.generate(request, decode.address, prefill.address)
        assert outcome.rejection is not None
        assert outcome.rejection.reason is RejectReason.DEADLINE
    decode.engine.going.set()
    await prefill.until_free()
    await decode.until_free()


async def test_a_second_session_speaks_for_itself_alone(pods: Cluster) -> None:
    decode = await pods.decode()
    request = ask(prompt(20), GREEDY)
    decode.engine.hold()
    running = asyncio.create_task(pods.router.generate(request, decode.address, None))
    await decode.until(lambda pod: pod.load.requests_running > 0)
    stranger = Router()
    foreign = stranger.decode.reserve(decode.address, request)
    foreign.renew()
    async for event in foreign:
        assert not isinstance(event, Reservation)
    await stranger.close()
    decode.engine.going.set()
    assert (await running).token_ids == continuation(request.token_ids, request.sampling)
