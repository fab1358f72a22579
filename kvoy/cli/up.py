"""``kvoy up``: a whole cluster on this machine, until Ctrl-C."""

import asyncio
import difflib
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvoy.cli.local_cluster import run_cluster
from kvoy.cli.models import DEFAULT_MODEL
from kvoy.cli.words import show
from kvoy.core.types import Role
from kvoy.runtime.cluster import ClusterPlan, Endpoints


class Device(StrEnum):
    """Where an engine computes."""

    CPU = "cpu"
    CUDA = "cuda"
    AUTO = "auto"


class Dtype(StrEnum):
    """Number format of weights and activations."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT4 = "int4"


class PoolDtype(StrEnum):
    """Number format of the KV pools."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"


def up(
    *,
    prefill: Annotated[int, typer.Option(help="Number of prefill pods.", min=1)] = 1,
    decode: Annotated[int, typer.Option(help="Number of decode pods.", min=1)] = 1,
    single: Annotated[bool, typer.Option("--single", help="One pod prefills and decodes; for comparison.")] = False,
    model: Annotated[str, typer.Option(help="Preset, GGUF file, Hugging Face folder or hub id.")] = DEFAULT_MODEL,
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="Number format of weights and activations; bf16 is faster, int4 (with a GGUF file that has 4-bit "
            "weights) is faster still with few requests at once."
        ),
    ] = Dtype.FP32,
    kv_dtype: Annotated[
        PoolDtype, typer.Option(help="Number format of the KV; auto is that of --dtype, int8 takes half of bf16.")
    ] = PoolDtype.AUTO,
    device: Annotated[
        Device, typer.Option(help="Where engines compute; auto is a GPU if all that it needs is there, else the CPU.")
    ] = Device.AUTO,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Prove that no output depends on what else is served; fp32 only.")
    ] = False,
    http: Annotated[str, typer.Option(help="host:port of the OpenAI API; port 0 takes any.")] = "127.0.0.1:8000",
    grpc: Annotated[str, typer.Option(help="host:port of the gRPC API; port 0 takes any.")] = "127.0.0.1:8001",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of logs and state; without it a temporary one, removed at the end.")
    ] = None,
    kvstore: Annotated[bool, typer.Option(help="Run a kvstore pod, which keeps KV that pools evict.")] = True,
    redis_url: Annotated[str, typer.Option(help="A Redis that runs already; without it one is started.")] = "",
    nats_url: Annotated[str, typer.Option(help="A NATS that runs already; without it one is started.")] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="ROLE.FIELD=VALUE", help="Set any option of a service; may be repeated."),
    ] = None,
) -> int:
    """Start a cluster on this machine: Redis, NATS, a kvstore, decode and prefill pods, and a router.

    Prints one line `ready http=HOST:PORT grpc=HOST:PORT` when it serves; Ctrl-C ends it, and nothing stays behind.
    """
    if single and prefill > 1:
        raise typer.BadParameter("--single has no prefill pods; leave --prefill out.")
    plan = ClusterPlan(
        model=model,
        dtype=dtype.value,
        kv_dtype=kv_dtype.value,
        prefill=0 if single else prefill,
        decode=decode,
        kvstore=kvstore,
        http=http,
        grpc=grpc,
        data_dir=Path(),
        redis_url=redis_url,
        nats_url=nats_url,
        overrides=parse_overrides(set_ or []),
        deterministic=deterministic,
        device=device.value,
    )
    return run_cluster(plan, data_dir, _serve)


async def _serve(endpoints: Endpoints) -> int:
    show(f"ready http={endpoints['http']} grpc={endpoints['grpc']}\n")
    await asyncio.Event().wait()
    return 0


def parse_overrides(settings: Sequence[str]) -> dict[Role, dict[str, str]]:
    """``decode.max_batch=8`` as {Role.DECODE: {"max_batch": "8"}}; BadParameter for anything else."""
    overrides: dict[Role, dict[str, str]] = {}
    for setting in settings:
        target, equals, value = setting.partition("=")
        role, dot, name = target.partition(".")
        if not (equals and dot and name):
            raise typer.BadParameter(f"{setting!r} is not ROLE.FIELD=VALUE, such as decode.max_batch=8.")
        if role not in list(Role):
            close = difflib.get_close_matches(role, list(Role), n=1)
            hint = f"did you mean {close[0]}?" if close else f"roles are {', '.join(Role)}."
            raise typer.BadParameter(f"{role!r} in {setting!r} is no role; {hint}")
        overrides.setdefault(Role(role), {})[name] = value
    return overrides
