"""A prefill pod that takes over gets back what the decode pod holds; whatever goes wrong then, tokens are right."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import pytest

from kvoy.core.frames import FetchCall, FrameHeader, HandoffKey
from kvoy.core.prefill import PrefillParams
from kvoy.core.types import PrefillWork, Request, Reservation
from kvoy.transport import kv_held
from kvoy.transport.decode_client import DecodeRequest
from kvoy.transport.kv_held import GrpcLender
from services.prefill import service as prefill_service
from tests.pods.cluster import Cluster, Outcome, RunningPod, ask, cluster, note, until_reserved
from tests.pods.test_faults import prompt
from tests.pods.toy_engine import SPEC, ToyEngine, continuation

TOKENS = 90


@pytest.fixture
async def pods() -> AsyncIterator[Cluster]:
    async with cluster() as made:
        yield made


@dataclass
class Half:
    """A request that lost its prefill pod half-way; the reservation is of the next epoch."""

    request: Request
    reservation: Reservation
    ongoing: DecodeRequest
    decode: RunningPod

    async def finish(self, pods: Cluster, prefill: RunningPod) -> Outcome:
        outcome = Outcome()
        await pods.router.hand_over(PrefillWork(self.request, self.reservation), prefill.address, outcome)
        async for event in self.ongoing:
            note(outcome, event)
        assert outcome.token_ids == continuation(self.request.token_ids, self.request.sampling)
        await prefill.until_free()
        await self.decode.until_free()
        return outcome


@asynccontextmanager
async def half(pods: Cluster, decode_engine: ToyEngine | None = None) -> AsyncIterator[Half]:
    first = await pods.prefill(chunk_tokens=8)
    decode = await pods.decode(decode_engine)
    first.engine.hold_before_step = 1
    request = ask(prompt(TOKENS))
    async with pods.router.decode.reserve(decode.address, request) as ongoing:
        work = PrefillWork(request, await until_reserved(ongoing))
        handing = asyncio.create_task(pods.router.hand_over(work, first.address, Outcome()))
        await first.until(lambda pod: pod.load.slots_used > 0)
        first.engine.hold_before_step = 6
        first.engine.going.set()
        brain = decode.service.brain
        await decode.until(lambda pod: brain.counters.frames_received and not pod.load.slots_used)
        handing.cancel()
        await asyncio.wait({handing})
        ongoing.renew()
        yield Half(request, await until_reserved(ongoing), ongoing, decode)


async def test_what_has_come_is_not_computed_again(pods: Cluster) -> None:
    second = await pods.prefill(chunk_tokens=8)
    async with half(pods) as it:
        lendable = it.reservation.lendable_blocks
        assert lendable == it.reservation.held_blocks >= 2
        outcome = await it.finish(pods, second)
        assert outcome.prefill.fetched_tokens == outcome.cached_tokens == lendable * SPEC.block_tokens
        assert outcome.prefill.computed_tokens == TOKENS - outcome.prefill.fetched_tokens
        assert outcome.prefill.shipped_blocks == SPEC.blocks_for(TOKENS) - lendable
        assert it.decode.service.brain.counters.lent_blocks == lendable
        assert second.service.brain.counters.fetched_blocks == lendable


async def test_slots_of_two_sizes(pods: Cluster) -> None:
    second = await pods.prefill(ToyEngine(slot_blocks=5), chunk_tokens=8)
    async with half(pods, ToyEngine(slot_blocks=1, slots=2)) as it:
        outcome = await it.finish(pods, second)
        assert outcome.prefill.fetched_tokens == it.reservation.lendable_blocks * SPEC.block_tokens > 0


async def test_what_comes_back_damaged_is_computed(pods: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    intact = kv_held.lent_to_wire

    def damage(header: FrameHeader, payload: memoryview) -> bytes:
        wire = bytearray(intact(header, payload))
        if header.seq == 0:
            wire[-5] ^= 0x40
        return bytes(wire)

    monkeypatch.setattr(kv_held, "lent_to_wire", damage)
    second = await pods.prefill(chunk_tokens=8)
    async with half(pods) as it:
        outcome = await it.finish(pods, second)
        assert (outcome.prefill.fetched_tokens, outcome.prefill.computed_tokens) == (0, TOKENS)
        counters = second.service.brain.counters
        assert (counters.fetches_corrupt, counters.fetches_short) == (1, 1)


async def test_a_decode_pod_that_is_too_slow_is_not_waited_for(pods: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_service, "PrefillParams", partial(PrefillParams, fetch_s=0.1))
    second = await pods.prefill(chunk_tokens=8)
    async with half(pods) as it:
        it.decode.engine.hold()
        finishing = asyncio.create_task(it.finish(pods, second))
        await second.until(lambda _: bool(second.engine.steps))
        it.decode.engine.going.set()
        assert (await finishing).prefill.fetched_tokens == 0
        assert second.service.brain.counters.fetches_given_up == 1
        assert it.decode.service.brain.counters.fetches_cut == 1


async def test_cancelled_while_it_fetches_the_prefill_pod_is_free_at_once(pods: Cluster) -> None:
    second = await pods.prefill(chunk_tokens=8)
    async with half(pods) as it:
        it.decode.engine.hold()
        running = asyncio.create_task(it.finish(pods, second))
        await it.decode.until(lambda pod: pod.load.slots_used > 0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await second.until_free()
    it.decode.engine.going.set()
    await it.decode.until_free()
    assert it.decode.service.brain.is_idle


@pytest.mark.parametrize("lease", [None, "stolen"])
async def test_nobody_else_gets_any_of_it(pods: Cluster, lease: str | None) -> None:
    lender = GrpcLender(pods.router.channels)
    async with half(pods) as it:
        key = HandoffKey(it.request.request_id, it.reservation.epoch)
        call = FetchCall(key, it.reservation.lease, it.request.fingerprint, SPEC, 0, 2)
        into = bytearray(2 * SPEC.block_bytes)
        lent = await lender.fetch(it.decode.address, replace(call, lease=lease or call.lease), memoryview(into), 5.0)
        assert lent.blocks == (0 if lease else 2)
        assert ("no_lease" in lent.problem) == bool(lease)
        assert any(into) != bool(lease)
