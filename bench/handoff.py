"""``python -m bench.handoff``: how fast KV goes from one process to another, beside what else could carry it.

Reads the command line and makes the report: handoff_run measures, handoff_work says what is promised.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from statistics import median

from rich.console import Console

from bench.command import Command, at_least_one
from bench.handoff_pairs import PEERS
from bench.handoff_run import Plan, run
from bench.handoff_work import (
    COPIES,
    FRAME_BYTES,
    PEER_WAYS,
    TOKEN_BYTES,
    TRANSPORTS,
    Load,
    Program,
    Promise,
    Sample,
    Way,
    promises,
    ways_of,
)
from bench.load import QUIET_SHARE
from bench.machine import Machine, this_machine, usable_cores
from bench.report import Line, Report
from bench.stats import paired_ratio, spread
from kvoy.core.wire import NIXL, WirePolicy

_ROUNDS = 7
_REPEATS = 5
_NAMES = tuple(transport.name for transport in TRANSPORTS)
_ABOUT = "How fast KV is handed over between two pods, beside raw TCP, Mooncake's transfer engine and NIXL."


def main(words: list[str] | None = None) -> int:
    return Command("handoff", _ABOUT, _add_options, _measure).run(words)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=at_least_one, default=_ROUNDS, help="times everything is measured in turn")
    parser.add_argument("--requests", type=at_least_one, default=Load().requests, help="prompts handed over at once")
    parser.add_argument(
        "--transports",
        type=transports_of,
        default=_available(),
        metavar="NAME,…",
        help=f"of {', '.join(_NAMES)}; all by default, but nixl only where kvoy[nixl] is installed",
    )
    parser.add_argument("--quick", action="store_true", help="one round of what has a target")


def transports_of(words: str) -> tuple[str, ...]:
    """Names of transports, in the order given."""
    names = tuple(filter(None, map(str.strip, words.split(","))))
    unknown = [name for name in names if name not in _NAMES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"there is no transport {', '.join(map(repr, unknown or [words]))}; use {', '.join(_NAMES)}"
        )
    return names


def _available() -> tuple[str, ...]:
    return tuple(name for name in _NAMES if name != NIXL or find_spec("nixl_cu12") is not None)


def _measure(options: argparse.Namespace, console: Console) -> Report:
    found = promises(options.transports, promised_only=options.quick)
    load, rounds = replace(Load(), requests=options.requests), 1 if options.quick else options.rounds
    plan = Plan(ways_of(found), load, usable_cores(), rounds, _REPEATS)
    versions = {program.value: PEERS[program]().version for program in (Program.MOONCAKE, Program.NIXL)}
    return make_report(plan, found, run(plan, console), this_machine(**versions))


def make_report(plan: Plan, found: Sequence[Promise], samples: Sequence[Sample], machine: Machine) -> Report:
    """Peers first, each alone; then ours beside them."""
    lines = [_peer_line(way, plan, samples) for way in PEER_WAYS]
    lines += [_line(promise, plan, samples) for promise in found]
    details: dict[str, object] = {
        "settings": {"load": asdict(plan.load), "cores": plan.cores, "rounds": plan.rounds, "repeats": plan.repeats},
        "copies_per_byte": {name: {"sender": ends[0], "receiver": ends[1]} for name, ends in COPIES.items()},
        "samples": [_sample_json(sample, plan.load) for sample in samples],
    }
    return Report("handoff", machine, lines, [*_notes(plan, samples), _copies()], details)


def _peer_line(way: Way, plan: Plan, samples: Sequence[Sample]) -> Line:
    rates = _rates(way, plan.load, samples)
    return Line(way.name, median(rates) * TOKEN_BYTES / 1e9, "GB/s", spread=spread(rates))


def _line(promise: Promise, plan: Plan, samples: Sequence[Sample]) -> Line:
    """int8 is compared in tokens: its bytes are others."""
    ours, theirs = (_rates(way, plan.load, samples) for way in (promise.way, promise.against))
    scale, unit = (TOKEN_BYTES / 1e9, "GB/s") if promise.way.wire is WirePolicy.RAW else (1.0, "KV tok/s")
    return Line(
        what=promise.way.name,
        value=median(ours) * scale,
        unit=unit,
        against=promise.against.name,
        against_value=median(theirs) * scale,
        ratio=paired_ratio(ours, theirs),
        spread=spread([mine / other for mine, other in zip(ours, theirs, strict=True)]),
        target=promise.target,
    )


def _rates(way: Way, load: Load, samples: Sequence[Sample]) -> list[float]:
    """KV tokens/s, one a round, in the order of rounds."""
    of_way = sorted((sample for sample in samples if sample.way == way), key=lambda sample: sample.round)
    return [sample.tokens_per_s(load) for sample in of_way]


def _notes(plan: Plan, samples: Sequence[Sample]) -> list[str]:
    load, foreign = plan.load, [sample.foreign_share for sample in samples]
    moved = (
        f"{load.requests} prompts of {load.prompt_tokens:,} tokens at once: {load.kv_bytes / 1e6:.0f} MB of "
        f"SmolLM2's KV in bf16, in frames of {FRAME_BYTES:,} bytes; rounds: {plan.rounds}, of {plan.repeats} each."
    )
    ours = (
        "Ours: from memory to memory as the peers do it, but in frames that are hashed, sent with credits, verified "
        "and acknowledged; int8 is quantised and restored by a thread of each end. Whole pods: two, each a service "
        "and its worker, which pack from a pool and unpack into the other; only the model is missing."
    )
    notes = [
        moved,
        ours,
        "Peers move bytes from one memory to another and check nothing. Ratios are taken within a round.",
        f"Others took {100 * median(foreign):.0f} % of the machine in the median, at most {100 * max(foreign):.0f} %.",
    ]
    if max(foreign) >= QUIET_SHARE:
        notes.append("The machine was busy: repeat this when it is quiet before believing a figure.")
    return notes


def _copies() -> str:
    told = ", ".join(f"{name} {sender} + {receiver}" for name, (sender, receiver) in COPIES.items())
    return f"Copies of a byte from memory to memory, sender + receiver, the kernel's included: {told}; pools add 1 + 1."


def _sample_json(sample: Sample, load: Load) -> dict[str, object]:
    return {
        "way": sample.way.name,
        "round": sample.round,
        "bytes_per_s": round(sample.bytes_per_s(load)),
        "tokens_per_s": round(sample.tokens_per_s(load)),
        "seconds": [round(second, 6) for second in sample.seconds],
        "foreign_share": round(sample.foreign_share, 4),
    }


if __name__ == "__main__":
    sys.exit(main())
