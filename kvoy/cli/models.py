"""``kvoy models``: have a model on this machine, and see which there are."""

import signal
from types import FrameType
from typing import Annotated

import typer

from kvoy.cli.words import say, show
from kvoy.engine import presets
from kvoy.engine.cache import default_cache_dir
from kvoy.engine.models import resolve

DEFAULT_MODEL = "smollm2-135m"

app = typer.Typer(help="Fetch models and list them.", no_args_is_help=True)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="Preset, GGUF file, Hugging Face folder or hub id.")] = DEFAULT_MODEL,
) -> int:
    """Have a model on this machine, ready to serve; prints where it is."""
    signal.signal(signal.SIGTERM, _stop)
    show(f"{resolve(name, progress=say).path}\n")
    return 0


@app.command("list")
def list_() -> int:
    """List the models that have a short name, and where those are that this machine has."""
    cache = default_cache_dir()
    for preset in presets.PRESETS.values():
        path = presets.cached(preset, cache)
        size = f"{preset.size_bytes // 1_000_000} MB"
        show(
            f"{preset.name:<16} {size:>8}  {preset.licence:<20} {path or 'not here; kvoy models pull ' + preset.name}\n"
        )
    return 0


def _stop(_number: int, _frame: FrameType | None) -> None:
    """Asked to stop, a download takes its unfinished files away, as it does at Ctrl-C."""
    raise KeyboardInterrupt
