"""Runs the parts, each within its time, prints the table, writes the JSON. Exit code 1: a result is wrong or a check
failed; with ``--check`` also when a target is missed."""

import argparse
import faulthandler
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.device_check import correctness, floors, model, speed, transfer
from bench.device_check.bench import Bench, Sizes
from bench.device_check.report import Report, Row
from kvoy.core.errors import ConfigError
from kvoy.engine.device import choose

_PARTS: dict[str, tuple[Callable[[Bench, Report], None], float]] = {
    "floors": (floors.check, 10.0),
    "correctness": (correctness.check, 75.0),
    "transfer": (transfer.check, 30.0),
    "speed": (speed.check, 50.0),
    "model": (model.check, 60.0),
}
"""In this order; the seconds are what each may take before it leaves checks out."""

_LONGEST_S = 300.0
"""Whatever hangs is ended then, with its traceback."""


def main() -> int:
    options = _options()
    faulthandler.dump_traceback_later(_LONGEST_S, exit=True)
    try:
        device = choose("cpu" if options.cpu_dry_run else "cuda", torch.bfloat16)
    except ConfigError as error:
        sys.stderr.write(f"device check: {error}. It measures a GPU; --cpu-dry-run only tries the script itself\n")
        return 2
    report = Report(_about(device.place), options.json)
    bench = Bench(device, Sizes(is_tiny=options.cpu_dry_run))
    for name in options.parts:
        run, seconds = _PARTS[name]
        report.deadline = time.monotonic() + seconds
        with torch.inference_mode():
            report.check(name, partial(_part, run, bench, report))
        report.write()
        if device.place.type == "cuda":
            torch.cuda.empty_cache()
    report.print_table()
    report.write()
    return 1 if report.wrong or (options.check and report.missed) else 0


def _part(run: Callable[[Bench, Report], None], bench: Bench, report: Report) -> tuple[Row, ...]:
    """No rows of its own: what breaks between a part's checks must not end the run."""
    run(bench, report)
    return ()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.device_check", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there, too")
    parser.add_argument("--check", action="store_true", help="fail also when a target is missed")
    parser.add_argument("--parts", nargs="+", choices=list(_PARTS), default=list(_PARTS), help="run these only")
    parser.add_argument("--cpu-dry-run", action="store_true", help="tiny sizes on the CPU: the code, not the figures")
    return parser.parse_args()


def _about(place: torch.device) -> dict[str, str]:
    if place.type == "cpu":
        machine, triton_version = platform.processor() or platform.machine(), "unused"
    else:
        import triton  # noqa: PLC0415 (only where there is a GPU)

        machine, triton_version = torch.cuda.get_device_name(place), triton.__version__
    return {
        "device": machine,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "triton": triton_version,
    }


if __name__ == "__main__":
    sys.exit(main())
