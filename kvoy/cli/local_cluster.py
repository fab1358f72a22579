"""A local cluster for as long as a command needs it: from fetching the model to the last sweep.

Owns the signals and the data folder; kvoy.runtime.cluster owns the processes. Whatever ends it, nothing stays behind.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from kvoy.cli.words import AlreadySaid, say
from kvoy.runtime import cluster_files
from kvoy.runtime.cluster import Cluster, ClusterPlan, Endpoints
from kvoy.runtime.config import SHARED_VARIABLES
from kvoy.runtime.process import Child, Command, child_environ, python
from kvoy.runtime.stopping import StopSignal, stop_on_signals

T = TypeVar("T")

Body = Callable[[Endpoints], Coroutine[Any, Any, int]]
"""What is done while the cluster runs; returns the command's exit status."""

_FETCH_S = 24 * 3600.0
_STOP_S = 2.0


def run_cluster(plan: ClusterPlan, data_dir: Path | None, body: Body) -> int:
    """Starts what is planned, does ``body`` and ends it all; a signal ends it earlier. The exit status."""
    cluster_files.running(cluster_files.state_dir(os.environ))  # sweeps up after clusters that were killed
    with _data_folder(data_dir) as folder:
        return asyncio.run(_run(replace(plan, data_dir=folder), data_dir is None, body))


async def _run(plan: ClusterPlan, temporary: bool, body: Body) -> int:
    stop = StopSignal()
    stop_on_signals(stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, stop.ask)
    cluster = Cluster(plan, say, os.environ)
    try:
        endpoints = await _unless_stopped(_start(cluster, plan, stop), stop)
        if endpoints is None:
            return 0
        with _recorded(plan, endpoints, temporary=temporary):
            return await _unless_stopped(_while_kept(cluster, body(endpoints)), stop) or 0
    finally:
        await cluster.end(stop.hurried)


async def _start(cluster: Cluster, plan: ClusterPlan, stop: StopSignal) -> Endpoints:
    await _fetch_model(plan.model, stop)
    return await cluster.start()


async def _fetch_model(model: str, stop: StopSignal) -> None:
    """Has the model on this machine before anybody needs it. A process of its own, as it may have to be stopped."""
    words = python("-m", "kvoy.cli", "models", "pull", model)
    child = await Child.start(Command("models pull", words, child_environ(os.environ, SHARED_VARIABLES), None))
    try:
        if await child.until(child.ended(), _FETCH_S) != 0:
            raise AlreadySaid
    finally:
        await child.end(_STOP_S, stop.hurried)


async def _while_kept(cluster: Cluster, body: Coroutine[Any, Any, int]) -> int:
    keeping = asyncio.ensure_future(cluster.keep())
    working = asyncio.ensure_future(body)
    try:
        await asyncio.wait({keeping, working}, return_when=asyncio.FIRST_COMPLETED)
        return await (working if working.done() else _never(keeping))
    finally:
        await _cancelled(keeping, working)


async def _never(keeping: "asyncio.Future[None]") -> int:
    await keeping
    raise AssertionError("the keeper of a cluster does not end by itself")


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: StopSignal) -> T | None:
    """What ``work`` returns; None if it was cut short by a signal."""
    working = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.asked())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        say("stopping; press Ctrl-C again to stop at once.")
        return None
    finally:
        await _cancelled(working, stopped)


async def _cancelled(*futures: "asyncio.Future[Any]") -> None:
    """Cancels what still runs and waits until it has ended."""
    running = [future for future in futures if not future.done()]
    for future in running:
        future.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@contextlib.contextmanager
def _recorded(plan: ClusterPlan, endpoints: Endpoints, *, temporary: bool) -> Iterator[None]:
    """Lets other commands find the cluster while it runs."""
    folder = cluster_files.state_dir(os.environ)
    record = cluster_files.ClusterRecord(
        os.getpid(), endpoints["http"], endpoints["grpc"], plan.model, str(plan.data_dir), temporary, time.time()
    )
    try:
        cluster_files.write(record, folder)
    except OSError as error:
        say(f"other commands will need --grpc {record.grpc}, for {error.filename} cannot be written.")
    try:
        yield
    finally:
        cluster_files.remove(record, folder)


@contextlib.contextmanager
def _data_folder(given: Path | None) -> Iterator[Path]:
    """The folder that was asked for, which must not be another cluster's; or a new one that goes with the cluster."""
    folder = given.absolute() if given else Path(tempfile.mkdtemp(prefix="kvoy-"))
    try:
        with cluster_files.claimed(folder):
            yield folder
    finally:
        if given is None:
            shutil.rmtree(folder, ignore_errors=True)
