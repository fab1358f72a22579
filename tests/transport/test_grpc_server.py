"""The server itself: health, reflection, ports, limits, and its end."""

import asyncio
import subprocess
import sys
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from kvoy.core.errors import ConfigError, KvoyError, Overloaded
from kvoy.core.generate import GenerateCall, GenerateChunk, TextPrompt, TokenizeCall
from kvoy.transport.clients import InferenceClient
from kvoy.transport.control import control_service
from kvoy.transport.inference import inference_service
from kvoy.transport.server import GrpcServer
from tests.transport.handlers import Control, Inference, until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def check(channel, name: str):
    method = channel.unary_unary("/grpc.health.v1.Health/Check")
    wire = await method(health_pb2.HealthCheckRequest(service=name).SerializeToString(), timeout=5)
    return health_pb2.HealthCheckResponse.FromString(wire).status


def watch(channel, name: str):
    method = channel.unary_stream("/grpc.health.v1.Health/Watch")
    return method(health_pb2.HealthCheckRequest(service=name).SerializeToString(), timeout=20)


async def watched(call):
    return health_pb2.HealthCheckResponse.FromString(await call.read()).status


async def test_health_of_each_service(serve, channels):
    server = await serve(control_service(Control()), inference_service(Inference()))
    channel = channels.to(server.address)
    for name in ("", "kvoy.v1.Control", "kvoy.v1.Inference"):
        assert await check(channel, name) == SERVING
    server.set_serving(False)
    for name in ("", "kvoy.v1.Control"):
        assert await check(channel, name) == NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(channel, "kvoy.v1.Nope")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "kvoy.v1.Control" in caught.value.details()


async def read_all(call):
    while True:
        await call.read()


async def test_health_may_be_watched(serve, channels):
    server = await serve(control_service(Control()))
    channel = channels.to(server.address)
    call, other = watch(channel, "kvoy.v1.Control"), watch(channel, "nope")
    assert await watched(call) == SERVING
    assert await watched(other) == UNKNOWN
    server.set_serving(False)
    assert await watched(call) == NOT_SERVING
    server.set_serving(True)
    assert await watched(call) == SERVING
    await server.stop(30)  # does not wait for watchers
    with pytest.raises(grpc.aio.AioRpcError, match="leaving"):
        await read_all(call)
    other.cancel()


async def test_grpcurl_lists_describes_and_calls(serve):
    server = await serve(inference_service(Inference([GenerateChunk("r", "Hello")])), control_service(Control()))
    grpcurl = str(Path(sys.executable).parent / "grpcurl")

    def run(*args: str) -> str:
        done = subprocess.run([grpcurl, "-plaintext", *args], capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = await asyncio.to_thread(run, server.address, "list")
    assert {"kvoy.v1.Inference", "kvoy.v1.Control", "grpc.health.v1.Health"} <= set(listed.split())
    described = await asyncio.to_thread(run, server.address, "describe", "kvoy.v1.Inference")
    assert "rpc Generate ( .kvoy.v1.GenerateRequest ) returns ( stream .kvoy.v1.GenerateResponse )" in described
    said = await asyncio.to_thread(run, "-d", '{"text": "hi"}', server.address, "kvoy.v1.Inference/Generate")
    assert '"text": "Hello"' in said
    health = await asyncio.to_thread(run, server.address, "grpc.health.v1.Health/Check")
    assert "SERVING" in health


async def test_a_port_that_is_taken(serve):
    server = await serve(control_service(Control()))
    assert not server.address.endswith(":0")
    with pytest.raises(ConfigError, match=f"Cannot listen on {server.address}.*Choose another"):
        await GrpcServer.start(server.address, [])


@pytest.mark.parametrize("listen", ["", "nowhere", ":5000", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000"])
async def test_addresses_that_are_none(listen):
    with pytest.raises(ConfigError, match="host:port"):
        await GrpcServer.start(listen, [])


async def test_a_host_that_is_not_here():
    with pytest.raises(ConfigError, match="Cannot listen on 203"):
        await GrpcServer.start("203.0.113.1:0", [])


async def test_too_many_calls_at_once_are_refused(serve):
    handler = Inference([GenerateChunk("r", "x")], hang=True)
    server = await serve(inference_service(handler), max_concurrent_calls=2)
    client = InferenceClient(server.address)
    running = [client.generate(GenerateCall(TextPrompt("x"))) for _ in range(2)]
    for one in running:
        await anext(one)
    with pytest.raises(Overloaded):
        await client.tokenize(TokenizeCall(TextPrompt("x")))
    for one in running:
        await one.aclose()
    await client.close()


async def test_stop_lets_calls_end_within_the_grace(serve):
    class Slow(Inference):
        async def tokenize(self, call):
            self.closed.set()
            await asyncio.sleep(0.2)
            return (len(call.prompt.text),)

    handler = Slow()
    server = await serve(inference_service(handler))
    client = InferenceClient(server.address)
    answer = asyncio.create_task(client.tokenize(TokenizeCall(TextPrompt("abc"))))
    await handler.closed.wait()
    stops = [asyncio.create_task(server.stop(30)) for _ in range(2)]
    assert await answer == (3,)
    await asyncio.gather(*stops)
    with pytest.raises(KvoyError):
        await client.list_models()
    await client.close()


async def test_stop_cuts_what_outlives_the_grace_and_waits_for_its_cleaning_up(serve):
    cleaned = asyncio.Event()

    class Hanging(Inference):
        async def generate(self, call):
            try:
                yield GenerateChunk("r", call.prompt.text)
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
                cleaned.set()

    server = await serve(inference_service(Hanging()))
    client = InferenceClient(server.address)
    answers = client.generate(GenerateCall(TextPrompt("x")))
    await anext(answers)
    await server.stop(0.05)
    assert cleaned.is_set()
    with pytest.raises(KvoyError):
        await anext(answers)
    await client.close()


async def test_a_caller_cancelled_in_stop_leaves_the_stop_going_on(serve):
    handler = Inference([GenerateChunk("r", "x")], hang=True)
    server = await serve(inference_service(handler))
    client = InferenceClient(server.address)
    answers = client.generate(GenerateCall(TextPrompt("x")))
    await anext(answers)
    stopping = asyncio.create_task(server.stop(0.2))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await until(handler.closed.is_set)
    await server.stop(0)
    with pytest.raises(KvoyError):
        await anext(answers)
    await client.close()


def test_grpc_itself_writes_nothing_to_standard_error():
    """A taken port, a peer that is away: the error says it, in our words, once."""
    script = """
import asyncio
from kvoy.core.errors import ConfigError, PeerError
from kvoy.transport.clients import InferenceClient
from kvoy.transport.server import GrpcServer

async def main():
    server = await GrpcServer.start("127.0.0.1:0", [])
    try:
        await GrpcServer.start(server.address, [])
    except ConfigError:
        print("taken")
    client = InferenceClient(server.address)
    await server.stop(0)
    try:
        await client.list_models()
    except PeerError:
        print("away")
    await client.close()

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("taken\naway\n", "")
