"""Blocks that a decode pod gives back: the same suite over loopback gRPC and for the in-memory twin, then damage, a
peer that does not read, and absence."""
# ruff: noqa: ARG002 - the handler answers to a protocol, and need not look at all it is given

import asyncio
from dataclasses import replace

import grpc.aio
import pytest

from kvoy.core.frames import FetchCall
from kvoy.transport import kv_held
from kvoy.transport.codec import kv
from kvoy.transport.kv_held import GrpcLender, HeldCall, held_service
from kvoy.transport.memory import MemoryLender
from kvoy.transport.ports import KvLender, Lent
from tests.transport import values
from tests.transport.handlers import until

SPEC = values.SPEC
SIZE = SPEC.block_bytes
CALL = FetchCall(values.KEY, "lease-1", "ab12", SPEC, 2, 4)
KV = bytes((7 * index) % 251 for index in range(4 * SIZE))


class Held:
    """Gives the blocks of ``plan``: how many in each frame. Records what it is told."""

    def __init__(self, plan=(2, 2), reason=""):
        self.plan, self.reason = plan, reason
        self.calls: list[HeldCall] = []
        self.taken_frames = 0
        self.ended_calls: list[HeldCall] = []
        self.first_block = CALL.first_block

    async def asked(self, call: HeldCall) -> None:
        self.calls.append(call)
        buffer = bytearray(KV)
        block = 0
        for seq, blocks in enumerate(self.plan):
            header = replace(values.header(seq, blocks), first_block=self.first_block + block)
            call.lend(header, memoryview(buffer)[block * SIZE : (block + blocks) * SIZE])
            block += blocks
        buffer[:] = bytes(len(buffer))  # a slot may be filled anew once lend has returned
        if self.reason is not None:
            call.end(self.reason)

    def taken(self, call: HeldCall) -> None:
        self.taken_frames += 1

    async def ended(self, call: HeldCall) -> None:
        self.ended_calls.append(call)


@pytest.fixture
def held():
    return Held()


@pytest.fixture(params=["grpc", "memory"])
async def lender(request, held, serve, channels):
    """The decode pod's address, and what a prefill pod has to ask it."""
    if request.param == "memory":
        return "decode:1", MemoryLender({"decode:1": held})
    server = await serve(held_service(held))
    return server.address, GrpcLender(channels)


async def fetch(lender, call=CALL, timeout_s=10.0):
    address, port = lender
    into = bytearray(4 * SIZE)
    return await port.fetch(address, call, memoryview(into), timeout_s), into


async def test_blocks_come_back_as_they_are(held, lender):
    lent, into = await fetch(lender)
    assert lent == Lent(4)
    assert into == KV
    assert held.calls[0].call == CALL
    await until(lambda: held.ended_calls == held.calls)
    assert held.taken_frames == 2


async def test_a_pod_that_gives_less_says_so_by_its_end(held, lender):
    held.plan = (1, 1)
    lent, into = await fetch(lender)
    assert (lent.blocks, lent.is_damaged) == (2, False)
    assert "2 of 4" in lent.problem
    assert into == KV[: 2 * SIZE] + bytes(2 * SIZE)


async def test_a_pod_that_does_not_want_it_says_why(held, lender):
    held.plan, held.reason = (), "no_lease"
    lent, _ = await fetch(lender)
    assert (lent.blocks, lent.is_damaged) == (0, False)
    assert "no_lease" in lent.problem


@pytest.mark.parametrize(("plan", "first_block"), [((2, 3), 2), ((5,), 2), ((2, 2), 1)])
async def test_what_was_not_asked_for_is_not_taken(held, lender, plan, first_block):
    held.plan, held.first_block = plan, first_block
    lent, into = await fetch(lender)
    assert lent.is_damaged
    assert lent.blocks == (2 if plan == (2, 3) else 0)
    assert not any(into[lent.blocks * SIZE :])


@pytest.mark.parametrize("at", [-5, 30])
async def test_a_flipped_bit_ends_what_is_taken(held, lender, monkeypatch, at):
    intact = kv_held.lent_to_wire

    def damage(header, payload):
        wire = bytearray(intact(header, payload))
        if header.seq == 1:
            wire[at] ^= 0x40
        return bytes(wire)

    monkeypatch.setattr(kv_held, "lent_to_wire", damage)
    lent, into = await fetch(lender)
    assert (lent.blocks, into[: 2 * SIZE]) == (2, KV[: 2 * SIZE])
    assert lent.problem


async def test_a_silent_pod_is_waited_for_as_long_as_was_said(held, lender):
    held.plan, held.reason = (2,), None
    lent, into = await fetch(lender, timeout_s=0.2)
    assert (lent.blocks, lent.is_damaged) == (2, False)
    assert into[: 2 * SIZE] == KV[: 2 * SIZE]
    await until(lambda: held.ended_calls)


async def test_who_gives_up_is_heard_of(held, lender):
    held.reason = None
    running = asyncio.create_task(fetch(lender))
    await until(lambda: held.taken_frames)
    running.cancel()
    await asyncio.wait({running})
    await until(lambda: held.ended_calls == held.calls)


async def test_nobody_there(lender):
    lent, _ = await fetch(("127.0.0.1:1", lender[1]))
    assert lent.blocks == 0
    assert "127.0.0.1:1 cannot be reached" in lent.problem


async def test_a_call_is_ended_while_its_peer_takes_nothing(held, serve, channels):
    """Frames of 4 MiB are more than a connection takes while nobody reads."""
    server = await serve(held_service(held))
    held.plan, held.reason = (1,), None
    wire = kv.fetch_to_proto(CALL).SerializeToString()
    call = channels.to(server.address).unary_stream(kv_held.FETCH_PATH)(wire, timeout=30)
    await until(lambda: held.taken_frames)
    for seq in range(1, 7):
        held.calls[0].lend(values.header(seq), memoryview(bytes(4 << 20)))
    await turns()
    assert held.taken_frames < 7
    held.calls[0].end("old_epoch")
    await until(lambda: held.ended_calls)
    with pytest.raises(grpc.aio.AioRpcError, match="old_epoch"):
        await drain(call)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def drain(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_pod_that_leaves_ends_its_calls(held, serve, channels):
    server = await serve(held_service(held))
    held.plan, held.reason = (2,), None
    running = asyncio.create_task(fetch((server.address, GrpcLender(channels))))
    await until(lambda: held.taken_frames)
    await server.stop(5)
    lent, _ = await running
    assert lent.blocks == 2
    assert "leaving" in lent.problem


def test_both_are_the_port():
    port: KvLender = MemoryLender({})
    assert port is not None
