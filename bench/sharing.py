"""``python -m bench.sharing``: what a prefill and a decode worker keep of their speed when both run on two cores.

Reads the command line and makes the report: sharing_run measures, sharing_work says what counts.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console

from bench.engine import at_least_one
from bench.engine_work import Work
from bench.load import QUIET_SHARE
from bench.machine import Machine, this_machine, usable_cores
from bench.report import RESULTS, Line, Report, output
from bench.sharing_run import Plan, run
from bench.sharing_work import DECODE, KEPT, PREFILL, Sample
from bench.stats import paired_ratio, spread
from kvoy.core.errors import ConfigError, KvoyError

_CORES = 2
_ROUNDS = 5
_ABOUT = "What a prefill and a decode worker, a thread each, keep of their speed alone when both run on two cores."


def main(words: list[str] | None = None) -> int:
    """The exit status: 0; 1 when a target is missed (with --check) or nothing could be measured; 130 for Ctrl-C."""
    options = _parser().parse_args(words)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _bench(options, console)
    except KvoyError as error:
        console.print(f"bench.sharing: {error}")
        return 1
    except KeyboardInterrupt:
        console.print("bench.sharing: stopped; nothing is left running")
        return 130


def _bench(options: argparse.Namespace, console: Console) -> int:
    cores = usable_cores()[:_CORES]
    if len(cores) < _CORES:
        raise ConfigError("this machine gives one core, and two workers would halve it: run it where there are two")
    plan = Plan(options.model, options.dtype, cores, 1 if options.quick else options.rounds)
    report = make_report(plan, run(plan, console), this_machine())
    report.show(output())
    report.write(options.json)
    console.print(f"written to {options.json}")
    return 1 if options.check and report.missed else 0


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=_ABOUT)
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--model", default="smollm2-135m", help="a Llama-like model, as kvoy takes it")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of weights, activations and KV")
    parser.add_argument("--rounds", type=at_least_one, default=_ROUNDS, help="times everything is measured in turn")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, default=RESULTS / "sharing.json", help="where the figures go")
    return parser


if __name__ == "__main__":
    sys.exit(main())
