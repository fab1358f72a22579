"""How figures become ratios, lines, a table, a file and a verdict."""

import json
from io import StringIO

import pytest
from rich.console import Console

from bench.machine import Machine
from bench.report import Line, Report, Target
from bench.stats import paired_ratio, spread

MACHINE = Machine("a processor", 2, ("avx512_bf16",), 8 << 30, "Linux 6", "3.11", {"kvoy": "0.1.0"}, "2026-01-01")


def test_a_ratio_is_taken_within_a_round():
    # The machine was three times slower in the second round, for both: the ratio does not notice.
    assert paired_ratio([30.0, 10.0, 33.0], [20.0, 5.0, 22.0]) == 1.5


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0])])
def test_figures_that_are_no_pairs_are_refused(ours, theirs):
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_ratio(ours, theirs)


def test_spread_is_relative_to_the_median():
    assert spread([8.0, 10.0, 13.0]) == 0.5
    assert spread([7.0]) == 0.0


@pytest.mark.parametrize(
    ("line", "held"),
    [
        (Line("a", 90.0, "tok/s", "b", 100.0, 0.9, target=Target(1.0)), False),
        (Line("a", 90.0, "tok/s", "b", 90.0, 1.0, target=Target(1.0)), True),
        (Line("a", 90.0, "tok/s", "b", 45.0, 2.0), None),
        (Line("start", 9.9, "s", target=Target(10.0, at_least=False)), True),
        (Line("start", 10.1, "s", target=Target(10.0, at_least=False)), False),
    ],
)
def test_a_target_is_the_ratios_if_there_is_one_else_the_values(line, held):
    assert line.is_held is held


def test_the_report_names_the_machine_and_what_was_missed(tmp_path):
    lines = [
        Line("decode", 1234.5, "tok/s", "vllm", 1000.0, 1.23, target=Target(1.0)),
        Line("prefill", 90.0, "tok/s", "vllm", 100.0, 0.9, target=Target(1.0)),
        Line("bandwidth", 43.21, "GB/s"),
    ]
    report = Report("engine", MACHINE, lines, ["A note [with brackets]."], {"samples": [1, 2]})
    shown = StringIO()
    report.show(Console(file=shown, width=120))
    for words in ("a processor, 2 cores, avx512_bf16, 8 GiB", "1,234 tok/s", "≥ 1", "held", "missed", "43.2 GB/s"):
        assert words in shown.getvalue()
    assert "A note [with brackets]." in shown.getvalue()
    assert shown.getvalue().rstrip().endswith("1 of 2 targets held")
    report.write(tmp_path / "made" / "engine.json")
    content = json.loads((tmp_path / "made" / "engine.json").read_text())
    assert content["machine"]["cpu"] == "a processor"
    assert [line["is_held"] for line in content["lines"]] == [True, False, None]
    assert content["samples"] == [1, 2]
