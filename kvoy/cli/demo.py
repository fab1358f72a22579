"""``kvoy demo``: a whole cluster answers one question, and shows that its KV really went from pod to pod.

What is claimed is checked, and the exit status is 0 only if all of it holds.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvoy.cli.demo_text import EXPECTED, QUESTION, TEXT
from kvoy.cli.local_cluster import run_cluster
from kvoy.cli.models import DEFAULT_MODEL
from kvoy.cli.pods import list_pods
from kvoy.cli.words import complain, say, show
from kvoy.client import Answer, AsyncClient, answer_of, user
from kvoy.core.types import DecodeReport, Pod, PrefillReport, Role
from kvoy.runtime.cluster import ClusterPlan, Endpoints
from kvoy.runtime.leftovers import launched

MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo saw: the answer, the reports of both pods, and the pods when it was over."""

    answer: Answer
    prefill: PrefillReport
    decode: DecodeReport
    pods: list[Pod]

    @property
    def block_bytes(self) -> int:
        return next(pod.kv_spec.block_bytes for pod in self.pods if pod.role is Role.DECODE and pod.kv_spec)

    @property
    def decode_prefilled_tokens(self) -> int:
        return sum(pod.load.prefilled_tokens for pod in self.pods if pod.role is Role.DECODE)


def demo() -> int:
    """Start a router, a prefill, a decode and a kvstore pod, ask them something, show what they did."""
    plan = ClusterPlan(
        model=DEFAULT_MODEL,
        dtype="fp32",
        kv_dtype="auto",
        prefill=1,
        decode=1,
        kvstore=True,
        http="127.0.0.1:0",
        grpc="127.0.0.1:0",
        data_dir=Path(),
    )
    status = run_cluster(plan, None, _ask)
    left = (
        [process for process in launched() if process.launcher_pid == os.getpid()]
        if Path("/proc/self").exists()
        else []
    )
    if left:
        complain(f"The cluster left processes behind: {', '.join(process.command for process in left)}.")
        return 1
    say("the cluster has stopped and left nothing behind.")
    return status


async def _ask(endpoints: Endpoints) -> int:
    say(
        f"serving at http={endpoints['http']} grpc={endpoints['grpc']}; asking about {len(TEXT.split())} words of text."
    )
    show(f"\n{QUESTION}\n\n")
    async with AsyncClient(endpoints["grpc"]) as client:
        chunks = []
        async for chunk in client.stream(user(f"{TEXT}\n\n{QUESTION}"), max_tokens=MAX_TOKENS, temperature=0.0):
            show(chunk.text)
            chunks.append(chunk)
    show("\n\n")
    answer = answer_of(chunks)
    if answer.timing is None or answer.timing.prefill is None or answer.timing.decode is None:
        complain("The answer came without the reports of its pods.")
        return 1
    pods = await list_pods(endpoints["grpc"])
    outcome = Outcome(answer, answer.timing.prefill, answer.timing.decode, pods)
    Console().print(_table(outcome))
    return _judge(outcome)


def _table(outcome: Outcome) -> Table:
    table = Table(show_header=False, title="One request, two pods", title_justify="left", min_width=48)
    table.add_column()
    table.add_column(justify="right")
    for what, value in _rows(outcome):
        table.add_row(what, value)
    return table


def _rows(outcome: Outcome) -> Iterator[tuple[str, str]]:
    prefill, decode, timing, usage = outcome.prefill, outcome.decode, outcome.answer.timing, outcome.answer.usage
    assert timing is not None
    assert usage is not None
    prefill_s = prefill.last_step_ended_at - prefill.first_step_started_at
    decode_s = timing.finished_at - timing.first_token_at
    yield "prompt tokens", f"{usage.prompt_tokens:,}"
    yield "prefill steps (chunks)", f"{prefill.chunks}"
    yield "KV blocks shipped to decode", f"{prefill.shipped_blocks}"
    yield "KV bytes shipped", f"{prefill.shipped_bytes:,}"
    yield "prefill time", f"{1000 * prefill_s:.0f} ms"
    yield "exposed handoff time", f"{1000 * (decode.first_step_started_at - prefill.last_step_ended_at):.1f} ms"
    yield "time to first token", f"{1000 * (timing.first_token_at - timing.received_at):.0f} ms"
    yield "answer tokens", f"{usage.completion_tokens}"
    yield "tokens/s after the first", f"{(usage.completion_tokens - 1) / decode_s:.1f}" if decode_s > 0 else "-"


def _judge(outcome: Outcome) -> int:
    prefill, decode = outcome.prefill, outcome.decode
    checks = {
        "the answer says what was asked for": EXPECTED in outcome.answer.text,
        "the prompt took several prefill steps": prefill.chunks > 1,
        "shipping began before the last step ended": 0 < prefill.first_frame_sent_at < prefill.last_step_ended_at,
        "bytes shipped are blocks x block size": prefill.shipped_bytes == prefill.shipped_blocks * outcome.block_bytes,
        "decode received what prefill shipped": decode.received_bytes == prefill.shipped_bytes > 0,
        "decode prefilled nothing": decode.prefilled_tokens == outcome.decode_prefilled_tokens == 0,
    }
    for check, holds in checks.items():
        show(f"{'ok  ' if holds else 'FAIL'}  {check}\n")
    return 0 if all(checks.values()) else 1
