"""``python -m bench.exposed``: how much of a handoff shows between the end of prefill and the first decode step.

Reads the command line and makes the report: exposed_run measures, exposed_work says what is promised.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from rich.console import Console

from bench.command import Command, at_least_one
from bench.exposed_run import Plan, run
from bench.exposed_work import MODEL, PROMISES, QUICK, LinkUse, Promise, Sample, Setting
from bench.load import QUIET_SHARE
from bench.machine import Machine, this_machine
from bench.report import Line, Report
from bench.stats import spread

_ROUNDS = 3
_ABOUT = "How much of a handoff shows after prefill, at full speed and over a slow link, in a local cluster."


def main(words: list[str] | None = None) -> int:
    return Command("exposed", _ABOUT, _add_options, _measure).run(words)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODEL, help="as kvoy takes it")
    parser.add_argument("--rounds", type=at_least_one, default=_ROUNDS, help="prompts of each length")
    parser.add_argument("--quick", action="store_true", help="one round of the shortest prompts")


def _measure(options: argparse.Namespace, console: Console) -> Report:
    plan = Plan(options.model, QUICK if options.quick else PROMISES, 1 if options.quick else options.rounds)
    samples, uses = run(plan, console)
    return make_report(plan, samples, uses, this_machine())


def make_report(plan: Plan, samples: Sequence[Sample], uses: Sequence[LinkUse], machine: Machine) -> Report:
    lines = [_line(promise, samples) for promise in plan.promises]
    details: dict[str, object] = {
        "settings": {"model": plan.model, "rounds": plan.rounds},
        "samples": [_sample_json(sample) for sample in samples],
        "links": [asdict(use) | {"setting": use.setting.name} for use in uses],
    }
    return Report("exposed", machine, lines, _notes(plan, samples, uses), details)


def _line(promise: Promise, samples: Sequence[Sample]) -> Line:
    """Beside it: the same sent after prefill, else how long prefill takes."""
    found = _of(promise.setting, promise.prompt_tokens, samples)
    shares = [sample.share for sample in found]
    if promise.against is None:
        against, other = "ms of prefill", 1000 * median(sample.prefill_s for sample in found)
    else:
        against = "% if sent after"
        other = median(sample.share for sample in _of(promise.against, promise.prompt_tokens, samples))
    return Line(promise.name, median(shares), "%", against, other, spread=spread(shares), target=promise.target)


def _of(setting: Setting, prompt_tokens: int, samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.setting == setting and sample.prompt_tokens == prompt_tokens]


def _notes(plan: Plan, samples: Sequence[Sample], uses: Sequence[LinkUse]) -> list[str]:
    foreign = [sample.foreign_share for sample in samples]
    measured = (
        f"{plan.model} in a local cluster, a thread an engine; {plan.rounds} prompts of each length, no two alike. "
        "Value: from the end of the last prefill step to the start of the first decode step, as the engines say, in "
        "percent of the time from the start of the first prefill step to the end of the last. Medians."
    )
    notes = [
        measured,
        "If sent after: the whole prompt is one chunk, so nothing can be sent before its end; measured like the rest.",
        *_link_notes(uses),
        f"Others took {100 * median(foreign):.0f} % of the machine in the median, at most {100 * max(foreign):.0f} %.",
    ]
    if max(foreign) >= QUIET_SHARE:
        notes.append("The machine was busy: repeat this when it is quiet before believing a figure.")
    return notes


def _link_notes(uses: Sequence[LinkUse]) -> list[str]:
    if not uses:
        return []
    took = (
        "Over the slow link go int8 or fp32, as said, from pools in fp32. It is a process on the same cores that "
        "carries gRPC and payloads, towards the decode pod at that rate; while it carries, it takes "
        f"{100 * max(use.core_share for use in uses):.1f} % of a core."
    )
    return [took]


def _sample_json(sample: Sample) -> dict[str, object]:
    return {
        "setting": sample.setting.name,
        "prompt_tokens": sample.prompt_tokens,
        "round": sample.round,
        "share_percent": round(sample.share, 3),
        "prefill_s": round(sample.prefill_s, 4),
        "exposed_s": round(sample.exposed_s, 5),
        "last_step_s": round(sample.last_step_s, 4),
        "shipped_bytes": sample.shipped_bytes,
        "foreign_share": round(sample.foreign_share, 4),
    }


if __name__ == "__main__":
    sys.exit(main())
