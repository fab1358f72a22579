"""Key stories of a prefill and a decode pod as transcripts: what each brain is told (<) and what it orders (>).

`make golden` writes them anew, and the diff is to be reviewed: read it as a story. The order of a brain's actions is
part of it (exports stand before the next step, the step before words to routers).
"""

import os
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from kvoy.core.decode import DecodeParams
from kvoy.core.frames import FrameHeader, HandoffKey
from kvoy.core.prefill import PrefillParams
from kvoy.core.step import StepPlan, StepResult
from kvoy.core.types import DecodeReport, FinishReason, KvDtype, KvSpec, PrefillReport, Request
from kvoy.core.wire import WirePolicy
from tests.core.toy import WIDE, request
from tests.core.world import World

FOLDER = Path(__file__).parent / "brains"


def happy_path(world):
    """A prompt of 18 tokens in three chunks; each is shipped while the next one computes."""
    world.ask(request("r", 18, max_tokens=3))


def cancel_mid_handoff(world):
    """The router cancels while frames are on their way; both pods hold nothing afterwards."""
    world.ask(request("r", 18, max_tokens=3))
    run_until(world, "d", "FrameArrived")
    world.cancel("r")


def preemption(world):
    """Two run until the pool is full; the later one gives way and goes on where it was."""
    world.ask(request("old", 7, max_tokens=12))
    run_until(world, "d", "CommitArrived")
    world.ask(request("new", 7, first=40, max_tokens=8))


def renew(world):
    """The router believes the prefill pod lost after the first frame; a new epoch ships what is missing."""
    world.ask(request("r", 18, max_tokens=2))
    run_until(world, "d", "Imported")
    world.cancel_work("r")
    world.renew("r")


def killed(world):
    """The prefill pod is killed after the first frame; the next one gets that back from the decode pod and goes on."""
    world.ask(request("r", 18, max_tokens=2))
    run_until(world, "d", "Imported")
    world.kill_p()


def resume(world):
    """The stream breaks when the second frame is on its way; another one goes on after the first."""
    world.ask(request("r", 18, max_tokens=2))
    run_until(world, "d", "Imported")
    run_until(world, "p", "FrameSent", times=2)
    world.cut(1)


def damage(world):
    """What came into the slot is not what was sent; the frame is asked for again."""
    world.spoil = lambda header: header.seq == 1 and world.d.counters.frames_dropped_corrupt == 0
    world.ask(request("r", 18, max_tokens=2))


def other_format(world):
    """Blocks of 4 tokens in fp32 into blocks of 8 in bf16, int8 on the wire."""
    world.ask(request("r", 18, max_tokens=2))


def few_slots(world):
    """Two handoffs, one slot at each end: they take turns."""
    world.ask(request("a", 9, max_tokens=1))
    world.ask(request("b", 9, first=40, max_tokens=1))


STORIES = {
    happy_path: {},
    cancel_mid_handoff: {},
    preemption: {"decode_blocks": 5, "decode": DecodeParams(chunk_tokens=16, spare_share=0.0)},
    renew: {},
    killed: {},
    resume: {},
    damage: {},
    other_format: {"decode_spec": WIDE, "prefill": PrefillParams(chunk_tokens=8, wire=WirePolicy.INT8)},
    few_slots: {"slots": 1},
}


def pick(lanes):
    """Messages are fast and steps are slow: engines go on when nothing else can happen."""
    return min(lanes, key=lambda lane: (lane.startswith("engine"), lane))


def run_until(world, pod, name, times=1):
    """Until the pod has been told an event of this name, so often."""
    while sum(who == pod and type(what).__name__ == name for who, what in world.log) < times:
        world.do(pick(world.choices()))


def header(value):
    blocks = f"blocks {value.first_block}..{value.first_block + value.blocks - 1}"
    layers = f"layers {value.first_layer}..{value.first_layer + value.layers - 1}"
    return f"{brief(value.key)} #{value.seq} {blocks} {layers}"


def plan(value):
    rows = [(f"prefill {row.request_id}[{row.start}:{row.start + len(row.token_ids)}]", row) for row in value.prefill]
    rows += [(f"decode {row.request_id}@{row.position}", row) for row in value.decode]
    return f"step {value.step_id}: " + ", ".join(f"{what} in {list(row.block_table)}" for what, row in rows)


def result(value):
    sampled = ", ".join(f"{each.request_id} -> {each.token_id}" for each in value.sampled)
    return f"step {value.step_id}: {sampled or 'no token'}"


def prefilled(value):
    computed = f"computed {value.computed_tokens} tokens in {value.chunks} chunks"
    return f"{computed}, shipped {value.shipped_blocks} blocks"


def decoded(value):
    received = f"received {value.received_blocks} blocks, prefilled {value.prefilled_tokens} tokens"
    return f"{received}, preempted {value.preemptions}"


BRIEF = {
    HandoffKey: lambda value: f"{value.request_id}/{value.epoch}",
    FrameHeader: header,
    Request: lambda value: f"{value.request_id} ({value.prompt_tokens} tokens)",
    StepPlan: plan,
    StepResult: result,
    PrefillReport: prefilled,
    DecodeReport: decoded,
    KvSpec: lambda _: "kv",
    KvDtype: lambda value: value.label,
    FinishReason: lambda value: value.value,
    float: lambda value: f"{value:.3f}",
    bytes: lambda value: value.hex()[:6],
    tuple: lambda value: "[" + ", ".join(brief(item) for item in value) + "]",
}


def brief(value):
    """A value as a person would jot it down."""
    if type(value) in BRIEF:
        return BRIEF[type(value)](value)
    if is_dataclass(value):
        parts = (brief(getattr(value, field.name)) for field in fields(value) if getattr(value, field.name) is not None)
        return f"{type(value).__name__}({', '.join(parts)})"
    return str(value)


def transcript(story, settings):
    world = World(**settings)
    story(world)
    world.settle(pick)
    world.assert_clean()
    lines = [f"{story.__doc__}", ""]
    for pod, what in world.log:
        is_event = type(what).__module__ == "kvoy.core.events"
        lines.append(f"{'prefill' if pod == 'p' else 'decode ':7} {'<' if is_event else '  >'} {brief(what)}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_the_story_is_as_it_was_written_down(story):
    path = FOLDER / f"{story.__name__}.txt"
    told = transcript(story, STORIES[story])
    if os.environ.get("KVOY_REWRITE_GOLDEN"):
        path.write_text(told)
    assert told == path.read_text(), "if this is meant, run `make golden` and review the diff"
