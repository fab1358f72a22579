"""``kvoy pods``: who is in the cluster, and what each pod holds."""

import asyncio
import json
from typing import Annotated, Any

import typer

from kvoy.cli.generate import Grpc
from kvoy.cli.words import router_address, show
from kvoy.core.types import Pod
from kvoy.transport.channels import Channels
from kvoy.transport.clients import ControlClient

_TIMEOUT_S = 5.0


def pods(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Show everything, as a JSON list.")] = False,
    grpc: Grpc = "",
) -> int:
    """Show the pods of a cluster: role, process, address, state, blocks, slots, leases, requests."""
    found = asyncio.run(list_pods(router_address(grpc)))
    if as_json:
        show(json.dumps([describe(pod) for pod in found], indent=1) + "\n")
    else:
        show(_table(found))
    return 0


async def list_pods(address: str) -> list[Pod]:
    """Every pod of the cluster whose router is at ``address``, each asked for its state of now."""
    channels = Channels()
    try:
        return await ControlClient(channels, _TIMEOUT_S).list_pods(address)
    finally:
        await channels.close()


def describe(pod: Pod) -> dict[str, Any]:
    """A pod as ``--json`` shows it."""
    load = pod.load
    return {
        "pod_id": pod.pod_id,
        "role": pod.role.value,
        "pid": pod.pid,
        "address": pod.address,
        "state": pod.state.value,
        "generation": pod.generation,
        "model": pod.model.name if pod.model else None,
        "block_bytes": pod.kv_spec.block_bytes if pod.kv_spec else None,
        "blocks_total": load.blocks_total,
        "blocks_used_by_requests": load.blocks_used_by_requests,
        "blocks_cached": load.blocks_cached,
        "slots_total": load.slots_total,
        "slots_used": load.slots_used,
        "leases": load.leases,
        "requests_running": load.requests_running,
        "requests_waiting": load.requests_waiting,
        "tokens_waiting": load.tokens_waiting,
        "prefilled_tokens": load.prefilled_tokens,
        "generated_tokens": load.generated_tokens,
    }


_COLUMNS = {
    "POD": "pod_id",
    "ROLE": "role",
    "PID": "pid",
    "ADDRESS": "address",
    "STATE": "state",
    "BLOCKS": "blocks_total",
    "USED": "blocks_used_by_requests",
    "CACHED": "blocks_cached",
    "SLOTS USED": "slots_used",
    "LEASES": "leases",
    "RUNNING": "requests_running",
    "WAITING": "requests_waiting",
}


def _table(found: list[Pod]) -> str:
    """One line a pod; as wide as it has to be, so that it can be cut by other programs."""
    described = [describe(pod) for pod in found]
    rows = [list(_COLUMNS), *([str(pod[field]) for field in _COLUMNS.values()] for pod in described)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)
