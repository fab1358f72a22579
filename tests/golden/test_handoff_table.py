"""docs/handoff.md draws kvoy.core.handoff.TRANSITIONS as it is; `make golden` draws it anew."""

import os
from pathlib import Path

from kvoy.core.frames import Ack, Commit, Committed, FrameHeader, Nack, Opening, Refused, Welcome
from kvoy.core.handoff import TRANSITIONS, HandoffState, Lost

DOCUMENT = Path(__file__).parents[2] / "docs" / "handoff.md"
SAID_BY = {
    Opening: "sender",
    FrameHeader: "sender",
    Commit: "sender",
    Welcome: "receiver",
    Ack: "receiver",
    Nack: "receiver",
    Committed: "receiver",
    Refused: "receiver",
    Lost: "nobody",
}
MEANINGS = {
    HandoffState.AWAY: "There is no stream: none has been opened yet, or it broke and another one may follow.",
    HandoffState.OPENING: "The sender has opened a stream and waits. On one that goes on where another broke, the "
    "receiver first finishes what it is at, so that its welcome says exactly what it has.",
    HandoffState.STREAMING: "Frames go over as blocks are filled and credits allow.",
    HandoffState.COMMITTING: "Every frame has been sent; what is damaged or missing is sent again.",
    HandoffState.COMMITTED: "The receiver holds everything, and the request decodes.",
    HandoffState.ENDED: "The receiver does not want it, or one end broke the rules.",
}
HEAD = """# A handoff

The KV of one request goes from a prefill pod (the sender) to a decode pod (the receiver) over one stream at a time.
Both ends follow one table (`kvoy/core/handoff.py`); what it does not allow is a breach, which ends the handoff and
never the pod. This page is written by `make golden`.

- **Frames** count from 0 in each epoch and hold whole blocks of the sender, or some layers of one. The receiver takes
  each once. A frame whose header cannot be believed, or whose payload is not what was sent, is asked for again (Nack).
- **Credits** are places in the receiver's staging slab. A frame is exported only with a credit in hand, so both sides
  hold a bounded number of frames; a promise is never taken back while its stream is open, and ends with it.
- **Acks** name the highest frame up to which all are in the pool. What is acknowledged is never sent again.
  One word may be for several frames: it waits while the sender has half of its credits left and another frame is on its
  way into the pool.
- **A stream that breaks** is followed by another one with the next attempt number, after a pause of 20 ms that grows to
  0.5 s. Its Welcome names the first frame that the receiver lacks; the sender goes on there, and says a commit that it
  had said again. Late frames of the stream before are dropped and counted. The sender gives up when no stream was
  welcome for `resume_s`; the receiver keeps what came for as long as the request has its lease.
- **A new epoch** makes all of this void but the whole blocks that came: they need not come again, whoever sends. A
  sender that lacks them gets them back from the receiver, if they are as an engine computed them, and computes the rest
  only ([decision 16](decisions/0016-a-decode-pod-gives-back-what-it-holds.md)).
- **Formats**: frames carry the sender's blocks in the dtype of the wire, which the sender chooses from what the
  receiver accepts. The receiver writes the tokens that it lacks into its own blocks, of whatever size.
"""


def diagram() -> list[str]:
    edges: dict[tuple[HandoffState, HandoffState], list[str]] = {}
    for (state, what), after in TRANSITIONS.items():
        edges.setdefault((state, after), []).append(what.__name__)
    names = [f"    {before.value} --> {after.value}: {', '.join(words)}" for (before, after), words in edges.items()]
    ends = [f"    {state.value} --> [*]" for state in (HandoffState.COMMITTED, HandoffState.ENDED)]
    return ["```mermaid", "stateDiagram-v2", f"    [*] --> {HandoffState.AWAY.value}", *names, *ends, "```"]


def drawn() -> str:
    states = [state for state in HandoffState if any(state is before for before, _ in TRANSITIONS)]
    lines = [HEAD, *diagram(), "", "| | said by | " + " | ".join(state.value for state in states) + " |"]
    lines.append("|---|---|" + "---|" * len(states))
    for what, who in SAID_BY.items():
        cells = [after.value if (after := TRANSITIONS.get((state, what))) else "" for state in states]
        lines.append(f"| {what.__name__} | {who} | " + " | ".join(cells) + " |")
    lines += ["", "| state | what it means |", "|---|---|"]
    lines += [f"| {state.value} | {MEANINGS[state]} |" for state in HandoffState]
    lines += ["", "| word | what it means |", "|---|---|"]
    lines += [f"| {what.__name__} | {' '.join((what.__doc__ or '').split())} |" for what in SAID_BY]
    return "\n".join([*lines, ""])


def test_every_word_of_the_table_is_explained():
    assert {what for _, what in TRANSITIONS} == set(SAID_BY)
    assert set(MEANINGS) == set(HandoffState)


def test_the_page_shows_the_table():
    if os.environ.get("KVOY_REWRITE_GOLDEN"):
        DOCUMENT.write_text(drawn())
    assert DOCUMENT.read_text() == drawn()
