"""docs/request-life.md draws kvoy.core.request_events.TRANSITIONS as it is; `make golden` draws it anew."""

import os
from pathlib import Path

from kvoy.core.request_events import ENDED, TRANSITIONS, RequestState

DOCUMENT = Path(__file__).parents[2] / "docs" / "request-life.md"
HEAD = """# The life of a request

A router keeps one small state machine for each request (`kvoy/core/request.py`). It decides which pod is asked, when
another one is tried, and that the request ends exactly once with nothing left held at any pod. The table says where
each event may lead; an event that a state does not list cannot happen there and is a bug. Events of a pod whose part
is over are void, as are all events after the end. This page is written by `make golden`.

    queued ──> reserved ──> prefilling ──> handing_off ──> decoding ──> finished
"""


def drawn() -> str:
    events = list(dict.fromkeys(event for row in TRANSITIONS.values() for event in row))
    states = [state for state in RequestState if state not in ENDED]
    lines = [HEAD, "| event | " + " | ".join(states) + " |", "|---|" + "---|" * len(states)]
    for event in events:
        cells = [", ".join(sorted(TRANSITIONS[state].get(event, ()))) for state in states]
        lines.append(f"| {event.__name__} | " + " | ".join(cells) + " |")
    meanings = [f"| {event.__name__} | {' '.join((event.__doc__ or '').split())} |" for event in events]
    return "\n".join([*lines, "", "| event | what it means |", "|---|---|", *meanings, ""])


def test_the_page_shows_the_table():
    if os.environ.get("KVOY_REWRITE_GOLDEN"):
        DOCUMENT.write_text(drawn())
    assert DOCUMENT.read_text() == drawn()
