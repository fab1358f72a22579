"""What counts of two workers that run at once, how it becomes kept shares, and the run around it without a model."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench import sharing, sharing_run
from bench.peers.model_files import ModelCopies
from bench.sharing import main, make_report
from bench.sharing_run import Plan, Side, measure
from bench.sharing_work import CONTEXT_TOKENS, DECODE, PREFILL, Answer, Sample, counted, order_of
from kvoy.core.errors import PeerError
from kvoy.engine.models import resolve
from tests.bench.test_report import MACHINE

FAMILIES = Path(__file__).parents[1] / "data" / "families"
PLAN = Plan("toy", "bf16", (0, 1), 2)


class Worker:
    """Answers at once, and with the time that this took."""

    name, pid = "worker", os.getpid()

    def __init__(self) -> None:
        self.orders = []

    def wait_ready(self) -> str:
        return "a worker"

    def ask(self, order) -> dict[str, object]:
        started_at = time.monotonic()
        self.orders.append(order)
        return {"seconds": [time.monotonic() - started_at]}

    def ask_numbers(self, order, key) -> list[float]:
        return self.ask(order)[key]


class DyingWorker(Worker):
    def ask(self, _order) -> dict[str, object]:
        raise PeerError("worker ended with status 3")


def test_decoding_passes_through_the_context_it_is_named_after_as_long_before_as_behind():
    order = order_of(DECODE, 1, 49152, brief=False)
    starts = {len(prompt) for prompt in order["prompts"]}
    assert starts == {DECODE.middle_tokens - order["steps"] // 2}
    assert len(order["prompts"]) == 8
    assert DECODE.middle_tokens + order["steps"] // 2 <= CONTEXT_TOKENS


def test_prefill_is_ordered_in_the_chunks_of_a_prefill_pod():
    order = order_of(PREFILL, 1, 49152, brief=False)
    assert (len(order["prompts"][0]), order["chunk_tokens"]) == (512, 128)


def test_only_what_ran_wholly_while_the_other_was_busy_counts():
    # prefill  |0    2    4|4    6    8|
    # decode     |1  (prompts) 3  5  7  9|
    prefill = [Answer(0, 4, (2, 2)), Answer(4, 8, (2, 2))]
    decode = [Answer(1, 9, (2, 2, 2))]
    found = counted({PREFILL: prefill, DECODE: decode})
    assert found == {PREFILL: [2, 2, 2], DECODE: [2, 2]}


def test_all_counts_of_who_is_alone_and_nothing_before_the_other_has_answered():
    answers = [Answer(0.0, 1.0, (0.25, 0.5))]
    assert counted({PREFILL: answers}) == {PREFILL: [0.5, 0.25]}
    assert counted({PREFILL: answers, DECODE: []}) == {PREFILL: [], DECODE: []}


def test_slow_steps_count_for_the_rate():
    assert Sample(DECODE, 1, True, (0.1, 0.1, 0.4), 0.0).tokens_per_s == pytest.approx(40.0)


def test_both_are_asked_again_until_both_have_measured_long_enough():
    sides = [Side(PREFILL, Worker()), Side(DECODE, Worker())]
    with ThreadPoolExecutor() as pool:
        found = measure(pool, {side: {"of": side.work.name} for side in sides}, 1e-4)
    assert all(sum(seconds) >= 1e-4 for seconds in found.values())
    for side in sides:
        assert len(side.driver.orders) > 1
        assert {order["of"] for order in side.driver.orders} == {side.work.name}


def test_a_worker_that_dies_ends_the_measurement():
    orders = {Side(PREFILL, Worker()): {}, Side(DECODE, DyingWorker()): {}}
    with ThreadPoolExecutor() as pool, pytest.raises(PeerError, match="status 3"):
        measure(pool, orders, 60.0)


def samples(foreign_share: float = 0.0) -> list[Sample]:
    """Two rounds, the second three times slower. Together prefill keeps 0.9 and decode 0.8."""
    return [
        Sample(work, number, together, (slowness / (kept if together else 1.0),), foreign_share)
        for number, slowness in ((1, 1.0), (2, 3.0))
        for together in (True, False)
        for work, kept in ((PREFILL, 0.9), (DECODE, 0.8))
    ]


def test_the_share_kept_is_of_the_same_round_and_held_or_missed():
    prefill, decode = make_report(PLAN, samples(), MACHINE).lines
    assert (prefill.what, prefill.ratio, prefill.is_held) == (PREFILL.name, pytest.approx(0.9), True)
    assert (decode.what, decode.ratio, decode.is_held) == (DECODE.name, pytest.approx(0.8), False)
    assert prefill.against_value == pytest.approx((512 + 512 / 3) / 2)
    assert prefill.value == pytest.approx(0.9 * prefill.against_value)


def test_a_busy_machine_is_said():
    assert not any("busy:" in note for note in make_report(PLAN, samples(), MACHINE).notes)
    notes = " ".join(make_report(PLAN, samples(0.4), MACHINE).notes)
    assert "at most 40 %" in notes
    assert "The machine was busy: repeat" in notes


class Workers:
    """In place of the processes."""

    def __init__(self) -> None:
        self.commands = []

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def start(self, command) -> Worker:
        self.commands.append(command)
        return Worker()


def test_a_run_measures_each_alone_and_both_and_writes_what_it_found(monkeypatch, tmp_path, capsys):
    workers = Workers()
    copies = ModelCopies("toy", Path(), Path(), resolve(str(FAMILIES / "llama")).spec(), 4000, 8)
    monkeypatch.setattr(sharing_run, "DriverSet", lambda: workers)
    monkeypatch.setattr(sharing_run, "model_copies", lambda *_: copies)
    monkeypatch.setattr(sharing_run, "wait_quiet", lambda *_: None)
    monkeypatch.setattr(sharing_run, "AT_LEAST_S", 1e-4)
    monkeypatch.setattr(sharing, "usable_cores", lambda: (3, 5, 7))
    assert main(["--rounds", "3", "--json", str(tmp_path / "found.json")]) == 0
    assert [command.name for command in workers.commands] == ["prefill-worker", "decode-worker"]
    assert all((command.setup.threads, command.setup.cores) == (1, (3, 5)) for command in workers.commands)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"]["cpu"]
    assert [(line["what"], line["target"]["bound"]) for line in found["lines"]] == [
        (PREFILL.name, 0.85),
        (DECODE.name, 0.85),
    ]
    measured = {(sample["round"], sample["work"], sample["together"]) for sample in found["samples"]}
    assert len(measured) == len(found["samples"]) == 3 * 4
    assert "targets held" in capsys.readouterr().out


def test_one_core_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sharing, "usable_cores", lambda: (0,))
    assert main([]) == 1
    assert capsys.readouterr().err.startswith("bench.sharing: this machine gives one core")
