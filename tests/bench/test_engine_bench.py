"""What ``bench.engine`` asks for, how it judges the answers, and what it says to a person who mistypes."""

import argparse
from pathlib import Path

import pytest

from bench.command import at_least_one
from bench.engine import main, peers_of
from bench.engine_report import make_report
from bench.engine_run import Measured, Plan, Sample
from bench.engine_work import SERVED_CHUNK_TOKENS, STEPS, TARGETS, Decode, Prefill, rate, works
from bench.peers.commands import RECIPES
from bench.peers.model_files import ModelCopies
from kvoy.engine.models import resolve
from tests.bench.test_report import MACHINE

FAMILIES = Path(__file__).parents[1] / "data" / "families"
DECODE = Decode(8, 128)


def test_every_engine_is_given_the_same_ids_and_every_round_others():
    order = DECODE.order(1, 49152, brief=False)
    assert order == DECODE.order(1, 49152, brief=False)
    assert order != DECODE.order(2, 49152, brief=False)
    assert len({tuple(prompt) for prompt in order["prompts"]}) == 8


def test_decoding_passes_through_the_context_it_is_named_after():
    order = DECODE.order(1, 49152, brief=False)
    start = len(order["prompts"][0])
    assert start < 128 < start + order["steps"] <= DECODE.context_tokens
    assert order["steps"] == STEPS


def test_ids_stay_within_a_small_vocabulary():
    assert max(Prefill(512).order(1, 64, brief=True)["prompts"][0]) < 64


def test_rates_are_of_the_median_step():
    assert rate(Decode(8, 128), [0.1, 0.2, 9.0]) == 40.0
    assert rate(Prefill(512), [0.5]) == 1024.0


def test_a_step_reads_all_weights_once_and_the_kv_of_every_row():
    assert Decode(8, 128).bytes_read(1000, 2) == 1000 + 8 * 128 * 2


def test_targets_are_of_work_that_every_round_does_and_of_peers_that_exist():
    every, once = works(quick=False)
    assert TARGETS.keys() == RECIPES.keys()
    assert {work for targets in TARGETS.values() for work in targets} <= set(every)
    assert not set(every) & set(once)
    assert works(quick=True) == (every, ())


def measured(foreign_share: float = 0.0) -> Measured:
    """Two rounds; the second is three times slower for both engines. The peer's decode is faster by a quarter."""
    copies = ModelCopies("toy", Path(), Path(), resolve(str(FAMILIES / "llama")).spec(), 4000, 8)
    found = Measured(copies, {"vllm": "0.32.0"}, {"kvoy": "about kvoy"}, bandwidths=[1e6, 1e6])
    every, once = works(quick=False)
    for number, slowness in ((1, 1.0), (2, 3.0)):
        for work in every + (once if number == 1 else ()):
            alone = isinstance(work, Prefill) and work.chunk_tokens > 0
            for engine in ("kvoy",) if alone else ("kvoy", "vllm"):
                faster = 0.8 if engine == "vllm" and isinstance(work, Decode) else 1.0
                found.samples.append(Sample(engine, work, number, (0.1 * slowness * faster,), foreign_share))
    return found


PLAN = Plan("toy", "bf16", ("vllm",), (0, 1), 2, quick=False)


def test_the_report_pairs_rounds_and_holds_what_reaches_its_target():
    report = make_report(PLAN, measured(), MACHINE)
    lines = {line.what: line for line in report.lines}
    assert lines["prefill 512"].ratio == pytest.approx(1.0)
    assert lines["prefill 512"].is_held
    assert lines["decode, batch 1 at 128"].ratio == pytest.approx(0.8)
    assert lines["decode, batch 1 at 128"].is_held is False
    assert lines["decode, batch 8 at 1024"].is_held is None
    assert {line.what for line in report.missed} == {f"decode, batch {batch} at 128" for batch in (1, 8, 32)}


def test_chunks_are_compared_with_the_same_rounds_whole_prompt():
    lines = {line.what: line for line in make_report(PLAN, measured(), MACHINE).lines}
    chunked = lines[f"prefill 512, chunks of {SERVED_CHUNK_TOKENS}"]
    assert chunked.ratio == pytest.approx(1.0)
    assert chunked.against_value == pytest.approx(5120.0)


def test_the_share_of_the_floor_is_the_time_that_reading_takes():
    lines = {line.what: line for line in make_report(PLAN, measured(), MACHINE).lines}
    # 4000 + 128 * 8 bytes at 1e6 bytes/s, of steps whose median rate is that of 0.15 s.
    share = lines["floor share, batch 1 at 128"]
    assert share.value == pytest.approx(100 * 5024e-6 * (1 / 0.1 + 1 / 0.3) / 2)
    assert share.against_value == pytest.approx(share.value / 0.8)


def test_a_busy_machine_is_said():
    assert not any("busy" in note for note in make_report(PLAN, measured(), MACHINE).notes)
    notes = " ".join(make_report(PLAN, measured(foreign_share=0.4), MACHINE).notes)
    assert "at most 40 %" in notes
    assert "busy in 28 of 28 measurements" in notes


def test_names_of_peers():
    assert peers_of("vllm, transformers,vllm") == ("vllm", "transformers")
    for words in ("vlllm", "vllm,nobody", "", ","):
        with pytest.raises(argparse.ArgumentTypeError, match="there is no peer"):
            peers_of(words)


@pytest.mark.parametrize("word", ["0", "-1", "two", "1.5", ""])
def test_numbers_that_must_be_at_least_one(word):
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        at_least_one(word)


def test_an_unknown_peer_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--against", "vllm,ollama"])
    assert left.value.code == 2
    assert "there is no peer 'ollama'; use transformers, vllm, llamacpp" in capsys.readouterr().err


def test_more_threads_than_cores_are_refused(capsys):
    assert main(["--threads", "4096"]) == 1
    assert "--threads 4096" in capsys.readouterr().err


def test_a_model_that_does_not_exist_is_a_sentence(capsys):
    assert main(["--against", "llamacpp", "--model", "./nowhere", "--threads", "1"]) == 1
    assert capsys.readouterr().err.startswith("bench.engine: there is no file or directory")
