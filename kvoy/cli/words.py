"""What all commands share: how to speak to a person, and which cluster is meant."""

import os
import sys

from kvoy.core.errors import ConfigError
from kvoy.runtime.cluster_files import running, state_dir


def say(text: str) -> None:
    """A line for the person; standard output is for what was asked for."""
    sys.stderr.write(f"kvoy: {text}\n")
    sys.stderr.flush()


class AlreadySaid(Exception):
    """Ends a command that failed and has told the person why."""


def complain(*parts: str) -> None:
    """A mistake, as one line that ends like a sentence."""
    words = " ".join(" ".join(parts).split())
    say(words if words.endswith((".", "!", "?")) else words + ".")


def show(text: str) -> None:
    """A piece of what was asked for."""
    sys.stdout.write(text)
    sys.stdout.flush()


def router_address(grpc: str) -> str:
    """host:port of the router: as given, else of the newest cluster that runs on this machine. ConfigError if none."""
    if grpc:
        return grpc
    clusters = running(state_dir(os.environ))
    if not clusters:
        raise ConfigError("No cluster runs on this machine: start one with `kvoy up`, or say --grpc HOST:PORT.")
    return clusters[0].grpc
