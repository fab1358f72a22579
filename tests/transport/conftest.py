"""A server and channels for each test, and proof that nothing of them is left running."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvoy.transport.channels import Channels
from kvoy.transport.rpc import Registration
from kvoy.transport.server import GrpcServer

ROOT = Path(__file__).parents[2]
Serve = Callable[..., Awaitable[GrpcServer]]


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    """Every task that a test started, in our code or in a library, has ended when the test has."""
    before = asyncio.all_tasks()
    yield
    async with asyncio.timeout(5):
        while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
            await asyncio.wait(left, timeout=1)


@pytest.fixture
async def serve(nothing_left: None) -> AsyncIterator[Serve]:
    """Starts servers that end with the test."""
    servers: list[GrpcServer] = []

    async def start(*services: Registration, listen: str = "127.0.0.1:0", **options: int) -> GrpcServer:
        servers.append(await GrpcServer.start(listen, services, **options))
        return servers[-1]

    yield start
    for server in servers:
        await server.stop(0)


@pytest.fixture
async def channels(nothing_left: None) -> AsyncIterator[Channels]:
    """Channels that end with the test."""
    channels = Channels()
    yield channels
    await channels.close()


@pytest.fixture
async def peer(nothing_left: None) -> AsyncIterator[Callable[..., Any]]:
    """Starts a peer process and returns it with its first line; none outlives the test."""
    started = []

    async def start(*arguments: str):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.transport.peer", *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        started.append(process)
        async with asyncio.timeout(60):
            return process, (await process.stdout.readline()).decode().strip()

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()
