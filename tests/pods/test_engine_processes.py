"""Prefill, decode and kvstore as real processes with the real model: exact tokens, exact counts, clean ends.

The engine runs in fp32, where greedy output does not depend on batch, chunk or machine. Loading takes seconds, so the
processes are shared by the tests of this module, but for those that end one.
"""

import asyncio
import importlib.util
import json
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from kvoy.core.types import FinishReason, KvDtype, KvSpec, ModelInfo, Pod, Request, Role, SamplingParams
from kvoy.engine.models import resolve
from kvoy.engine.runner import Runner
from kvoy.transport.redis_directory import RedisDirectory
from tests.engine.running import Prompt, load, run_all
from tests.pods.cluster import Outcome, Router
from tests.pods.processes import Process, Stage, are_gone, wait_for

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_smollm2.json").read_text())
CASES = {case["id"]: case for case in GOLDEN["cases"]}
SPEC = KvSpec(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype=KvDtype.FP32)
ENGINE = {"dtype": "fp32", "threads": 1, "pool_bytes": "512MiB", "chunk_tokens": 256, "drain_s": 2, "check": "true"}
EOS = 2

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(slots=True)
class Pods:
    """The processes and where they serve."""

    stage: Stage
    prefill: Process
    decode: Process
    addresses: dict[str, str]

    @property
    def pair(self) -> tuple[str, str]:
        return self.addresses["decode"], self.addresses["prefill"]


@pytest.fixture(scope="module")
def pods() -> Iterator[Pods]:
    stage = Stage()
    try:
        kvstore = stage.service("kvstore", capacity_bytes="512MiB")
        prefill = stage.service("prefill", pod_id="prefill-0", **ENGINE)
        decode = stage.service("decode", pod_id="decode-0", **ENGINE)
        words = {
            role: process.ready() for role, process in (("kvstore", kvstore), ("prefill", prefill), ("decode", decode))
        }
        yield Pods(stage, prefill, decode, {role: said["grpc"] for role, said in words.items()})
    finally:
        stage.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router() -> AsyncIterator[Router]:
    made = Router()
    yield made
    await made.close()


async def model(router: Router, address: str) -> ModelInfo:
    pod = await router.control.get_pod(address)
    assert pod.model is not None
    assert pod.kv_spec == SPEC
    return pod.model


def golden(case: dict, fingerprint: str, name: str = "") -> Request:
    sampling = SamplingParams(0.0, 0, 1.0, 0, max_tokens=len(case["output_ids"]), stop_token_ids=(EOS,))
    return Request(name or case["id"], tuple(case["prompt_ids"]), sampling, fingerprint)


async def ask(pods: Pods, router: Router, case: dict, name: str = "") -> Outcome:
    info = await model(router, pods.addresses["prefill"])
    return await router.generate(golden(case, info.fingerprint, name), *pods.pair)


async def listed(stage: Stage) -> list[Pod]:
    directory = RedisDirectory(stage.redis.url)
    try:
        return await directory.list_pods()
    finally:
        await directory.close()


async def test_pods_agree_on_the_model(pods: Pods, router: Router) -> None:
    assert await model(router, pods.addresses["prefill"]) == await model(router, pods.addresses["decode"])
    assert [pod.role for pod in await listed(pods.stage)] == [Role.DECODE, Role.KVSTORE, Role.PREFILL]


async def test_golden_outputs_are_reproduced(pods: Pods, router: Router) -> None:
    cases = [case for name, case in CASES.items() if name != "long_3k"]  # tests/e2e has that one, too
    outcomes = await asyncio.gather(*(ask(pods, router, case) for case in cases))
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.token_ids == case["output_ids"], case["id"]
        assert outcome.finish is (FinishReason.STOP if case["finish"] == "stop" else FinishReason.LENGTH)
        assert outcome.reservation is not None
        shipped = SPEC.blocks_for(len(case["prompt_ids"])) - outcome.reservation.held_blocks
        assert outcome.prefill.shipped_blocks == outcome.decode.received_blocks == shipped
        assert outcome.prefill.shipped_bytes == outcome.decode.received_bytes == shipped * SPEC.block_bytes
        assert outcome.decode.prefilled_tokens == 0
    load = (await router.control.get_pod(pods.addresses["decode"])).load
    assert load.prefilled_tokens == 0
    assert (load.blocks_used_by_requests, load.leases) == (0, 0)


async def test_shipping_starts_before_the_last_chunk(pods: Pods, router: Router) -> None:
    case = CASES["long_1k"]
    foreign = {**case, "prompt_ids": case["prompt_ids"][::-1], "output_ids": [0]}
    report = (await ask(pods, router, foreign, "reversed")).prefill
    assert report.chunks >= 4
    assert report.first_step_started_at < report.first_frame_sent_at < report.last_step_started_at


async def test_a_prefix_is_reused_and_says_the_same(pods: Pods, router: Router) -> None:
    case = CASES["chat_turns3"]
    first = await ask(pods, router, case, "first")
    again = await ask(pods, router, case, "again")
    assert first.token_ids == again.token_ids == case["output_ids"]
    cached = (len(case["prompt_ids"]) - 1) // 16 * 16
    assert again.cached_tokens == again.prefill.cached_tokens == again.decode.held_tokens == cached
    assert again.prefill.computed_tokens == len(case["prompt_ids"]) - cached


async def test_a_new_prefill_pod_finds_prefixes_at_the_decode_pod_and_in_the_kvstore(
    pods: Pods, router: Router
) -> None:
    cases = CASES["block_edge_31"], CASES["chat_turns3"]
    for case in cases:
        await ask(pods, router, case, f"before {case['id']}")
    fresh, other = (pods.stage.service(role, **ENGINE) for role in ("prefill", "decode"))
    address = fresh.ready()["grpc"]
    decodes = pods.addresses["decode"], other.ready()["grpc"]
    reports = []
    for case, decode in zip(cases, decodes, strict=True):
        pair = replace(pods, addresses={"prefill": address, "decode": decode})
        outcome = await ask(pair, router, case, f"after {case['id']}")
        assert outcome.token_ids == case["output_ids"]
        cached = (len(case["prompt_ids"]) - 1) // 16 * 16
        assert outcome.prefill.cached_tokens == cached
        assert outcome.prefill.computed_tokens == len(case["prompt_ids"]) - cached
        reports.append(outcome.prefill)
    assert (reports[0].fetched_tokens, reports[0].reloaded_tokens) == (16, 0)
    assert (reports[1].fetched_tokens, reports[1].reloaded_tokens) == (0, reports[1].cached_tokens)
    assert other.terminate() == 0
    family = fresh.family()
    assert len(family) == 2
    assert fresh.terminate() == 0
    assert are_gone(family)
    assert fresh.popen.stdout is not None
    assert fresh.popen.stdout.read() == b""


async def test_int8_kv_moves_between_pods_as_it_is(pods: Pods, router: Router) -> None:
    """Two pods say what one engine with KV in int8 says, which is not everywhere what fp32 says."""
    spec = replace(SPEC, dtype=KvDtype.INT8)
    processes = {role: pods.stage.service(role, **ENGINE, kv_dtype="int8") for role in ("prefill", "decode")}
    addresses = {role: process.ready()["grpc"] for role, process in processes.items()}
    info = (await router.control.get_pod(addresses["prefill"])).model
    assert info is not None
    alone = [
        Prompt(name, tuple(CASES[name]["prompt_ids"]), len(CASES[name]["output_ids"]))
        for name in ("chat_france", "chat_turns3")
    ]
    decoder, pool = load(resolve("smollm2-135m"), blocks=40, block_tokens=16, kv_dtype=KvDtype.INT8)
    run_all(Runner(decoder, pool, 8192), pool, alone, chunk_tokens=256, at_once=1)
    assert alone[0].output_ids == CASES["chat_france"]["output_ids"]
    for prompt in alone:
        case = CASES[prompt.name]
        request = golden(case, info.fingerprint, f"int8-{prompt.name}")
        outcome = await router.generate(request, addresses["decode"], addresses["prefill"])
        assert outcome.token_ids == prompt.output_ids
        assert outcome.reservation is not None
        shipped = spec.blocks_for(len(case["prompt_ids"])) - outcome.reservation.held_blocks
        assert outcome.prefill.shipped_bytes == outcome.decode.received_bytes == shipped * spec.block_bytes
    assert all(process.terminate() == 0 for process in processes.values())


async def test_kv_crosses_in_int8_into_pools_of_floats_and_never_back(pods: Pods, router: Router) -> None:
    sender = pods.stage.service("prefill", **ENGINE, wire="int8")
    address = sender.ready()["grpc"]
    case = CASES["unicode"]
    info = await model(router, address)
    request = replace(golden(case, info.fingerprint, "quantised"), cache_salt="int8")
    outcome = await router.generate(request, pods.addresses["decode"], address)
    assert outcome.token_ids == case["output_ids"]
    blocks = SPEC.blocks_for(len(case["prompt_ids"]))
    again = await router.generate(replace(request, request_id="raw"), *pods.pair)
    assert again.token_ids == case["output_ids"]
    assert again.reservation is not None
    assert (again.reservation.held_blocks, again.reservation.lendable_blocks) == (blocks - 1, 0)
    assert again.prefill.fetched_tokens == 0
    wire = replace(SPEC, dtype=KvDtype.INT8_CHANNEL)
    assert outcome.prefill.shipped_bytes == outcome.decode.received_bytes == blocks * wire.block_bytes
    assert wire.block_bytes <= 0.54 * replace(SPEC, dtype=KvDtype.BF16).block_bytes
    assert sender.terminate() == 0


@pytest.mark.parametrize("block_tokens", [8, 32])
async def test_pods_with_blocks_of_other_sizes_understand_each_other(
    pods: Pods, router: Router, block_tokens: int
) -> None:
    receiver = pods.stage.service("decode", **{**ENGINE, "block_tokens": block_tokens})
    address = receiver.ready()["grpc"]
    pair = replace(pods, addresses={**pods.addresses, "decode": address})
    for name in ("chat_turns3", "block_edge_31"):
        outcome = await ask(pair, router, CASES[name], f"{name}-in-blocks-of-{block_tokens}")
        assert outcome.token_ids == CASES[name]["output_ids"]
    assert receiver.terminate() == 0


def slabs_mapped_by(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("kvoy-slab")


async def test_pods_of_one_host_hand_over_by_shared_memory(pods: Pods, router: Router) -> None:
    ends = [pods.stage.service(role, **ENGINE, transport="shm,tcp") for role in ("prefill", "decode")]
    addresses = {role: end.ready()["grpc"] for role, end in zip(("prefill", "decode"), ends, strict=True)}
    pair = replace(pods, addresses={**pods.addresses, **addresses})
    for name in ("chat_turns3", "block_edge_31"):
        outcome = await ask(pair, router, CASES[name], f"{name}-shared")
        assert outcome.token_ids == CASES[name]["output_ids"]
        assert outcome.reservation is not None
        assert [offer.name for offer in outcome.reservation.transports] == ["shm", "tcp"]
    assert "do without shm" not in ends[0].stderr
    assert slabs_mapped_by(ends[1].pid) == 2  # its own, and the prefill pod's
    socket_folder = Path(outcome.reservation.transports[0].address.partition(":")[2]).parent
    assert socket_folder.exists()
    assert all(end.terminate() == 0 for end in ends)
    assert not socket_folder.exists()


@pytest.mark.parametrize("transport", ["tcp", "nixl"] if importlib.util.find_spec("nixl_cu12") else ["tcp"])
async def test_pods_hand_over_by_a_connection_beside_grpc(
    pods: Pods, router: Router, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    ends = [pods.stage.service(role, **ENGINE, transport=transport) for role in ("prefill", "decode")]
    addresses = {role: end.ready()["grpc"] for role, end in zip(("prefill", "decode"), ends, strict=True)}
    pair = replace(pods, addresses={**pods.addresses, **addresses})
    for name in ("chat_turns3", "block_edge_31"):
        outcome = await ask(pair, router, CASES[name], f"{name}-by-{transport}")
        assert outcome.token_ids == CASES[name]["output_ids"]
        assert outcome.reservation is not None
        assert [offer.name for offer in outcome.reservation.transports] == [transport]
    assert f"do without {transport}" not in ends[0].stderr
    assert all(end.terminate() == 0 for end in ends)


async def test_killed_it_leaves_no_worker(pods: Pods) -> None:
    victim = pods.stage.service("decode", **ENGINE)
    victim.ready()
    family = victim.family()
    assert len(family) == 2
    victim.popen.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    wait_for(lambda: are_gone(family))


async def test_it_leaves_with_its_parent_and_takes_its_worker_along(pods: Pods) -> None:
    orphan = pods.stage.service("prefill", **ENGINE)
    orphan.ready()
    family = orphan.family()
    assert orphan.popen.stdin is not None
    orphan.popen.stdin.close()
    assert orphan.wait() == 0
    wait_for(lambda: are_gone(family))


async def test_asked_to_stop_while_it_loads_it_stops(pods: Pods) -> None:
    process = pods.stage.service("decode", **ENGINE)
    wait_for(lambda: len(psutil.Process(process.pid).children()) == 1)
    family = process.family()
    assert process.terminate() == 0
    assert are_gone(family)


async def test_an_unknown_model_is_said_in_a_sentence(pods: Pods) -> None:
    process = pods.stage.service("prefill", **{**ENGINE, "model": "/no/such/model.gguf"})
    assert process.wait() == 1
    assert "/no/such/model.gguf" in process.stderr
    assert "Traceback" not in process.stderr
    assert process.popen.stdout is not None
    assert process.popen.stdout.read() == b""


async def test_a_dead_worker_ends_the_service_with_its_requests(pods: Pods, router: Router) -> None:
    """Last, for it ends the decode pod that the others use."""
    (worker,) = pods.decode.family()[1:]
    running = asyncio.create_task(ask(pods, router, CASES["chat_why_sky"], "doomed"))
    while not (await router.control.get_pod(pods.addresses["decode"])).load.requests_running:
        assert not running.done()
    worker.kill()
    outcome = await running
    assert outcome.rejection is not None
    assert "killed by SIGKILL" in outcome.rejection.message
    assert pods.decode.wait() == 1
    said = [line for line in pods.decode.stderr.splitlines() if "critical" in line]
    assert len(said) == 1
    assert "killed by SIGKILL" in said[0]
    assert "Traceback" not in pods.decode.stderr
    assert "decode-0" not in [pod.pod_id for pod in await listed(pods.stage)]
