"""``python -m bench.engine``: how fast kvoy's engine is beside others, on the same weights, ids, threads and cores.

Reads the command line and puts the parts together: peers/ installs and starts, engine_run measures, engine_report
judges.
"""

import argparse
import sys

from rich.console import Console

from bench.command import Command, add_model_options, at_least_one
from bench.engine_report import make_report
from bench.engine_run import Plan, run
from bench.machine import this_machine, usable_cores
from bench.peers.commands import RECIPES
from bench.report import Report
from kvoy.core.errors import ConfigError

_ROUNDS = 5
_ABOUT = "How fast kvoy's engine is beside others, on the same weights, ids, threads and cores."


def main(words: list[str] | None = None) -> int:
    return Command("engine", _ABOUT, _add_options, _measure).run(words)


def _measure(options: argparse.Namespace, console: Console) -> Report:
    cores = usable_cores()
    if options.threads > len(cores):
        raise ConfigError(f"this machine gives {len(cores)} cores, so --threads {options.threads} would share them")
    plan = Plan(
        model=options.model,
        dtype=options.dtype,
        peers=options.against,
        cores=cores[: options.threads],
        rounds=1 if options.quick else options.rounds,
        quick=options.quick,
    )
    measured = run(plan, console)
    return make_report(plan, measured, this_machine(**measured.versions))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against",
        type=peers_of,
        default=tuple(RECIPES),
        metavar="NAME,…",
        help=f"peers to compare with, of {', '.join(RECIPES)}; all by default; installed when they are not there",
    )
    add_model_options(parser, rounds=_ROUNDS, quick="one round, and only what has a target")
    parser.add_argument("--threads", type=at_least_one, default=min(2, len(usable_cores())), help="threads, and cores")


def peers_of(words: str) -> tuple[str, ...]:
    """Names of peers, each once, in the order given."""
    names = tuple(dict.fromkeys(name.strip() for name in words.split(",") if name.strip()))
    unknown = [name for name in names if name not in RECIPES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"there is no peer {', '.join(map(repr, unknown or [words]))}; use {', '.join(RECIPES)}"
        )
    return names


if __name__ == "__main__":
    sys.exit(main())
