"""``python -m bench.sharing``: what a prefill and a decode worker keep of their speed when both run on two cores.

Reads the command line and makes the report: sharing_run measures, sharing_work says what counts.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

from rich.console import Console

from bench.command import Command, add_model_options
from bench.engine_work import Work
from bench.load import QUIET_SHARE
from bench.machine import Machine, this_machine, usable_cores
from bench.report import Line, Report
from bench.sharing_run import Plan, run
from bench.sharing_work import DECODE, KEPT, PREFILL, Sample
from bench.stats import paired_ratio, spread
from kvoy.core.errors import ConfigError

_CORES = 2
_ROUNDS = 5
_ABOUT = "What a prefill and a decode worker, a thread each, keep of their speed alone when both run on two cores."


def main(words: list[str] | None = None) -> int:
    return Command("sharing", _ABOUT, _add_options, _measure).run(words)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, rounds=_ROUNDS, quick="one round")


def _measure(options: argparse.Namespace, console: Console) -> Report:
    cores = usable_cores()[:_CORES]
    if len(cores) < _CORES:
        raise ConfigError("this machine gives one core, and two workers would halve it: run it where there are two")
    plan = Plan(options.model, options.dtype, cores, 1 if options.quick else options.rounds)
    return make_report(plan, run(plan, console), this_machine())


def make_report(plan: Plan, samples: Sequence[Sample], machine: Machine) -> Report:
    lines = [_line(work, samples) for work in (PREFILL, DECODE)]
    details: dict[str, object] = {"settings": asdict(plan), "samples": [_sample_json(sample) for sample in samples]}
    return Report("sharing", machine, lines, _notes(plan, samples), details)


def _line(work: Work, samples: Sequence[Sample]) -> Line:
    """A kept share is the quotient of two measurements of one round."""
    together, alone = _rates(work, samples, together=True), _rates(work, samples, together=False)
    return Line(
        what=work.name,
        value=median(together),
        unit="tok/s",
        against="alone",
        against_value=median(alone),
        ratio=paired_ratio(together, alone),
        spread=spread([shared / own for shared, own in zip(together, alone, strict=True)]),
        target=KEPT,
    )


def _rates(work: Work, samples: Sequence[Sample], *, together: bool) -> list[float]:
    """One a round, in the order of rounds."""
    return [sample.tokens_per_s for sample in samples if sample.work == work and sample.together is together]


def _notes(plan: Plan, samples: Sequence[Sample]) -> list[str]:
    foreign = [sample.foreign_share for sample in samples]
    notes = [
        f"{plan.model} in {plan.dtype}, a thread each, cores {', '.join(map(str, plan.cores))}, rounds: {plan.rounds}.",
        "Value: with both running; only prompts and steps count that ran wholly while the other worker was busy.",
        "Ratios are the share kept, taken within a round, and their median is shown.",
        f"Others took {100 * median(foreign):.0f} % of the machine in the median, at most {100 * max(foreign):.0f} %.",
    ]
    if max(foreign) >= QUIET_SHARE:
        notes.append("The machine was busy: repeat this when it is quiet before believing a figure.")
    return notes


def _sample_json(sample: Sample) -> dict[str, object]:
    return {
        "work": sample.work.name,
        "round": sample.round,
        "together": sample.together,
        "tokens_per_s": round(sample.tokens_per_s, 2),
        "seconds": [round(second, 6) for second in sample.seconds],
        "foreign_share": round(sample.foreign_share, 4),
    }


if __name__ == "__main__":
    sys.exit(main())
