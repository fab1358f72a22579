"""The command ``kvoy``: one file a group of commands, put together here.

Commands read what a person typed, call kvoy.runtime, kvoy.client or kvoy.engine, and show what came back; they decide
nothing about serving. A mistake is one sentence on standard error: exit status 2 if the words typed are wrong, else 1.
"""

import os
import sys

import typer
from typer.exceptions import TyperException

from kvoy.cli import demo, doctor, generate, models, pods, up
from kvoy.cli.words import AlreadySaid, complain
from kvoy.core.errors import KvoyError
from kvoy.runtime.config import check_environ

app = typer.Typer(
    help="Serves large language models with prefill and decode on separate pods. Begin with: kvoy up",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(up.up)
app.command()(generate.generate)
app.command()(generate.chat)
app.command()(pods.pods)
app.add_typer(models.app, name="models")
app.command()(doctor.doctor)
app.command()(demo.demo)


def main() -> None:
    """The console script."""
    words = sys.argv[1:] or ["--help"]
    try:
        check_environ([], os.environ)
        status = app(words, prog_name="kvoy", standalone_mode=False)
    except typer.Exit as left:
        status = left.exit_code
    except TyperException as mistake:
        said = mistake.format_message().replace("Value error, ", "").rstrip(".")
        complain(f"{said} See" if said.endswith("?") else f"{said}; see", f"kvoy {_command(words)}--help.")
        status = mistake.exit_code
    except AlreadySaid:
        status = 1
    except KvoyError as error:
        complain(str(error))
        status = 1
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python must not complain about it once more while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:
        complain(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        status = 1
    sys.exit(status or 0)


def _command(words: list[str]) -> str:
    names = {command.callback.__name__ for command in app.registered_commands if command.callback} | {"models"}
    return f"{words[0]} " if words[0] in names else ""
