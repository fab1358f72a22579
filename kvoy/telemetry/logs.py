"""Logs of one process: one line a record, on standard error, readable by people and by ``key=value`` parsers.

Modules say ``log = logging.getLogger(__name__)`` and ``log.info("lease given", extra=about(request=…, blocks=…))``.
Only a program's main calls ``configure``; nothing here is called by libraries.
"""

import json
import logging
import sys
import time
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")
_FIELDS = "kvoy_fields"


def about(**fields: object) -> dict[str, object]:
    """The ``extra=`` of a log call: what the line is about, as ``key=value``."""
    return {_FIELDS: fields}


def configure(level: str, source: str, stream: TextIO | None = None) -> None:
    """Sends every record of at least ``level`` to ``stream`` (default: standard error), marked with ``source``
    (the pod's id). Replaces what was configured before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_LineFormatter(source))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("asyncio", "httpcore", "httpx", "nats", "urllib3"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


class _LineFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z info  decode-1a2b kvoy.runtime.loop lease given request=r1 blocks=4``."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = dict(getattr(record, _FIELDS, {}))
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        head = f"{moment}.{int(record.msecs):03d}Z {record.levelname.lower():<7} {self._source} {record.name}"
        said = " ".join(record.getMessage().split())
        return " ".join([head, said, *(f"{key}={_quoted(value)}" for key, value in fields.items())])


def _quoted(value: object) -> str:
    text = str(value)
    plain = text and text.isprintable() and not any(sign in text for sign in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)
