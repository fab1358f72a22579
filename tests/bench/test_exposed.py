"""What the bench of exposed handoffs promises, which answers it takes, its slow link, and a run over a real one."""

import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from bench import exposed, exposed_run
from bench.exposed import main, make_report
from bench.exposed_link import LinkSetup, Pace
from bench.exposed_run import Link, Plan, running
from bench.exposed_work import (
    CONTEXT_TOKENS,
    PROMISES,
    QUICK,
    SLOW_BYTES_S,
    LinkUse,
    Promise,
    Sample,
    Setting,
    sample_of,
    work_of,
)
from bench.peers.process import DriverCommand, DriverSet
from bench.report import Target
from kvoy.client import Answer
from kvoy.core.errors import PeerError
from kvoy.core.generate import RequestTiming
from kvoy.core.types import DecodeReport, PrefillReport, Role
from tests.bench.test_report import MACHINE

FAST = Setting("fast", "fp32")
SLOW = Setting("slow", "fp32", wire="int8", link_bytes_s=SLOW_BYTES_S)


def timing(tokens: int = 512, **changes: object) -> RequestTiming:
    """A prefill of 10 s, of whose handoff 0.3 s show."""
    prefill = PrefillReport(
        first_step_started_at=100.0,
        last_step_started_at=109.0,
        last_step_ended_at=110.0,
        chunks=-(-tokens // 128),
        computed_tokens=tokens,
        shipped_bytes=1000,
    )
    decode = DecodeReport(first_step_started_at=110.3, received_bytes=1000)
    of_prefill = {name: value for name, value in changes.items() if hasattr(prefill, name)}
    of_decode = {name: value for name, value in changes.items() if name not in of_prefill}
    return RequestTiming(99.0, 110.2, 111.0, replace(prefill, **of_prefill), replace(decode, **of_decode))


def sample(setting: Setting, number: int, share: float) -> Sample:
    return Sample(setting, 512, number, 2.0, share / 50, 0.5, 1000, 0.0)


def test_what_is_promised():
    bounds = {
        (promise.setting.dtype, promise.setting.transport, promise.setting.link_bytes_s, promise.prompt_tokens): (
            promise.target.bound
        )
        for promise in PROMISES
        if promise.target
    }
    for tokens in (512, 2048, 7000):
        assert bounds["fp32", "tcp", None, tokens] == bounds["bf16", "tcp", None, tokens] == 5
        assert bounds["fp32", "tcp", 20e6, tokens] == 20
    assert {target.bound for target in (promise.target for promise in QUICK)} == {5, 20}


def test_a_cluster_is_started_once_for_each_setting_and_those_to_compare_with_send_after_all_is_computed():
    work = work_of(PROMISES)
    assert len({setting.name for setting in work}) == len(work)
    after = [promise.against for promise in PROMISES if promise.against]
    assert {work[setting] for setting in after} == {(512, 2048)}
    assert {(setting.chunk_tokens, setting.steps(7000)) for setting in after} == {(CONTEXT_TOKENS, 1)}
    assert not any(setting.name.endswith("after prefill") for setting in work_of(QUICK))


def test_what_shows_is_a_share_of_the_prefill_time():
    found = sample_of(FAST, 512, 1, timing(), 0.2)
    assert (found.prefill_s, found.last_step_s, found.foreign_share) == (10.0, 1.0, 0.2)
    assert found.share == pytest.approx(3.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"computed_tokens": 496},
        {"chunks": 3},
        {"prefilled_tokens": 16},
        {"resent_frames": 1},
        {"received_bytes": 900},
        {"first_step_started_at": 0.0, "shipped_bytes": 0},
    ],
)
def test_what_was_cached_or_disturbed_is_no_measurement(changes):
    with pytest.raises(PeerError, match="fast: "):
        sample_of(FAST, 512, 1, timing(**changes), 0.0)


def test_an_answer_without_reports_is_no_measurement():
    with pytest.raises(PeerError, match="without the reports"):
        sample_of(FAST, 512, 1, None, 0.0)


def test_medians_are_held_against_targets_and_stand_beside_sending_after_prefill():
    promises = (
        Promise(FAST, 512, Target(5.0, at_least=False)),
        Promise(SLOW, 512, Target(20.0, at_least=False), SLOW.after),
    )
    shares = {FAST: (9.0, 3.0, 4.0), SLOW: (21.0, 30.0, 5.0), SLOW.after: (70.0, 61.0, 50.0)}
    samples = [sample(setting, number, share) for setting in shares for number, share in enumerate(shares[setting])]
    uses = [LinkUse(SLOW, 20e6, 40_000_000, 0.1)]
    report = make_report(Plan("toy", promises, 3), samples, uses, MACHINE)
    fast, slow = report.lines
    assert (fast.value, fast.against, fast.against_value, fast.is_held) == (4.0, "ms of prefill", 2000.0, True)
    assert (slow.value, slow.against, slow.against_value, slow.is_held) == (21.0, "% if sent after", 61.0, False)
    assert any("it takes 5.0 % of a core" in note for note in report.notes)


def test_bytes_wait_their_turn_and_a_late_thread_may_catch_up_a_little():
    pace = Pace(100.0)
    assert pace.wait_s(50, 10.0) == pytest.approx(0.49)  # it was free before
    assert pace.wait_s(50, 10.0) == pytest.approx(0.99)
    assert pace.wait_s(50, 10.995) == pytest.approx(0.495)
    assert pace.wait_s(50, 20.0) == pytest.approx(0.49)
    assert pace.passed_bytes == 200


def test_a_link_carries_both_ways_counts_one_and_ends_with_either_end():
    with socket.create_server(("127.0.0.1", 0)) as target, DriverSet() as drivers:
        address = f"127.0.0.1:{target.getsockname()[1]}"
        setup = LinkSetup((address, "127.0.0.1:1"), 1e9)
        link = drivers.start(DriverCommand("link", Path(sys.executable), "bench.exposed_link", setup, {}))
        to_target, to_nobody = (place.rpartition(":") for place in link.wait_ready().split())
        with socket.create_connection((to_target[0], int(to_target[2]))) as near, target.accept()[0] as far:
            near.sendall(bytes(100_000))
            assert len(far.recv(100_000, socket.MSG_WAITALL)) == 100_000
            far.sendall(b"taken")
            assert near.recv(5, socket.MSG_WAITALL) == b"taken"
            far.close()
            assert near.recv(1) == b""
        with socket.create_connection((to_nobody[0], int(to_nobody[2]))) as near:
            assert near.recv(1) == b""
        passed_bytes, cpu_s = link.ask_numbers({}, "passed_bytes and cpu_s")
        assert passed_bytes == 100_000
        assert cpu_s > 0


def test_kv_that_did_not_go_over_the_slow_link_is_no_measurement():
    with DriverSet() as drivers:
        link = Link(SLOW_BYTES_S, drivers)
        with pytest.raises(PeerError, match="1000 bytes were shipped, 0 over the slow link"):
            link.use(SLOW, [sample(SLOW, 1, 10.0)])


class FakeCluster:
    """Knows what it was to be."""

    def __init__(self, plan, _say, _environ) -> None:
        self.plan = plan
        self.is_ended = False
        made.append(self)

    async def start(self) -> dict[str, str]:
        return {"grpc": "127.0.0.1:1"}

    async def end(self, _hurry) -> None:
        self.is_ended = True


made: list[FakeCluster] = []


async def test_a_cluster_is_told_what_its_setting_says_and_has_a_thread_an_engine(monkeypatch):
    monkeypatch.setattr(exposed_run, "Cluster", FakeCluster)
    made.clear()
    async with running("toy", replace(SLOW, transport="grpc"), {"listen": "here:1"}) as address:
        assert address == "127.0.0.1:1"
        assert not made[0].is_ended
    plan = made[0].plan
    assert plan.overrides == {
        Role.PREFILL: {"transport": "grpc", "wire": "int8", "chunk_tokens": "128"},
        Role.DECODE: {"transport": "grpc", "listen": "here:1"},
    }
    assert (plan.model, plan.dtype, plan.prefill, plan.decode, plan.cores) == ("toy", "fp32", 1, 1, 2)
    assert made[0].is_ended


prompts: list[tuple[int, ...]] = []


class FakeClient:
    """Answers at once."""

    def __init__(self, _address: str) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(self, prompt, **_: object) -> Answer:
        prompts.append(tuple(prompt))
        return Answer("", (1, 2), (), None, None, timing(len(prompt)))


def test_a_run_asks_for_all_lengths_in_turn_writes_and_judges(monkeypatch, tmp_path, capsys):
    @asynccontextmanager
    async def no_cluster(*_: object) -> AsyncIterator[str]:
        yield "nowhere"

    monkeypatch.setattr(exposed_run, "running", no_cluster)
    monkeypatch.setattr(exposed_run, "AsyncClient", FakeClient)
    monkeypatch.setattr(exposed_run, "wait_quiet", lambda *_: None)
    monkeypatch.setattr(exposed_run, "foreign_share", lambda *_: 0.0)
    monkeypatch.setattr(
        exposed, "PROMISES", tuple(promise for promise in PROMISES if promise.setting.name == "bf16, tcp")
    )
    prompts.clear()
    path = tmp_path / "exposed.json"
    assert main(["--rounds", "2", "--json", str(path), "--check"]) == 0
    assert [len(prompt) for prompt in prompts] == [512, 512, *[512, 2048, 7000] * 2]
    assert len({prompt[:16] for prompt in prompts}) == 8
    content = json.loads(path.read_text())
    assert [(found["prompt_tokens"], found["share_percent"]) for found in content["samples"]] == [
        (512, 3.0),
        (2048, 3.0),
        (7000, 3.0),
    ] * 2
    assert "3 of 3 targets held" in capsys.readouterr().out


async def test_pods_behind_a_slow_link_hand_over_by_it(monkeypatch):
    monkeypatch.setattr(exposed_run, "SHORT", 32)
    monkeypatch.setattr(exposed_run, "wait_quiet", lambda *_: None)
    setting = replace(SLOW, chunk_tokens=32)
    (found,), use = await exposed_run.measure(Plan("smollm2-135m", (), 1), setting, [64])
    assert found.exposed_s > 0
    assert use.passed_bytes > found.shipped_bytes
