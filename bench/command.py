"""What the command lines of benches have in common: the same options, the same end.

A bench says what it measures, adds its own options, and makes a Report; what becomes of that, and of a bench that is
stopped or cannot be run, is the same for all.
"""

import argparse
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.report import RESULTS, Report, output
from kvoy.core.errors import KvoyError


@dataclass(frozen=True, slots=True)
class Command:
    """``python -m bench.NAME``. ``measure`` tells its progress on the console, which is standard error."""

    name: str
    about: str
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Console], Report]

    def run(self, words: Sequence[str] | None) -> int:
        """The exit status: 0; 1 when a target is missed (with --check) or nothing could be measured; 130 for Ctrl-C."""
        options = self._parser().parse_args(words)
        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            report = self.measure(options, console)
        except KvoyError as error:
            console.print(f"bench.{self.name}: {error}")
            return 1
        except KeyboardInterrupt:
            console.print(f"bench.{self.name}: stopped; nothing is left running")
            return 130
        report.show(output())
        report.write(options.json)
        console.print(f"written to {options.json}")
        return 1 if options.check and report.missed else 0

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=f"python -m bench.{self.name}", description=self.about)
        self.add_options(parser)
        parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
        parser.add_argument("--json", type=Path, default=RESULTS / f"{self.name}.json", help="where the figures go")
        return parser


def add_model_options(parser: argparse.ArgumentParser, *, rounds: int, quick: str) -> None:
    """Of benches that measure a model in rounds; ``quick`` says what --quick leaves."""
    parser.add_argument("--model", default="smollm2-135m", help="a Llama-like model, as kvoy takes it")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of weights, activations and KV")
    parser.add_argument("--rounds", type=at_least_one, default=rounds, help="times everything is measured in turn")
    parser.add_argument("--quick", action="store_true", help=quick)


def at_least_one(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, not {word!r}")
    return int(word)
