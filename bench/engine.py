"""``python -m bench.engine``: how fast kvoy's engine is beside others, on the same weights, ids, threads and cores.

Reads the command line and puts the parts together: peers/ installs and starts, engine_run measures, engine_report
judges.
"""

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console

from bench.engine_report import make_report
from bench.engine_run import Plan, run
from bench.machine import this_machine, usable_cores
from bench.peers.commands import RECIPES
from bench.report import RESULTS, output
from kvoy.core.errors import ConfigError, KvoyError

_ROUNDS = 5
_ABOUT = "How fast kvoy's engine is beside others, on the same weights, ids, threads and cores."


def main(words: list[str] | None = None) -> int:
    """The exit status: 0; 1 when a target is missed (with --check) or nothing could be measured; 130 for Ctrl-C."""
    options = _parser().parse_args(words)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _bench(options, console)
    except KvoyError as error:
        console.print(f"bench.engine: {error}")
        return 1
    except KeyboardInterrupt:
        console.print("bench.engine: stopped; nothing is left running")
        return 130


def _bench(options: argparse.Namespace, console: Console) -> int:
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
    report = make_report(plan, measured, this_machine(**measured.versions))
    report.show(output())
    report.write(options.json)
    console.print(f"written to {options.json}")
    return 1 if options.check and report.missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=_ABOUT)
    parser.add_argument(
        "--against",
        type=peers_of,
        default=tuple(RECIPES),
        metavar="NAME,…",
        help=f"peers to compare with, of {', '.join(RECIPES)}; all by default; installed when they are not there",
    )
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--model", default="smollm2-135m", help="a Llama-like model, as kvoy takes it")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of weights, activations and KV")
    parser.add_argument("--threads", type=at_least_one, default=min(2, len(usable_cores())), help="threads, and cores")
    parser.add_argument("--rounds", type=at_least_one, default=_ROUNDS, help="times everything is measured in turn")
    parser.add_argument("--quick", action="store_true", help="one round, and only what has a target")
    parser.add_argument("--json", type=Path, default=RESULTS / "engine.json", help="where the figures go")
    return parser


def peers_of(words: str) -> tuple[str, ...]:
    """Names of peers, each once, in the order given."""
    names = tuple(dict.fromkeys(name.strip() for name in words.split(",") if name.strip()))
    unknown = [name for name in names if name not in RECIPES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"there is no peer {', '.join(map(repr, unknown or [words]))}; use {', '.join(RECIPES)}"
        )
    return names


def at_least_one(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, not {word!r}")
    return int(word)


if __name__ == "__main__":
    sys.exit(main())
