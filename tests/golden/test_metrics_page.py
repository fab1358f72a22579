"""docs/metrics.md lists the series of every pod as their tables have them; `make golden` writes it anew."""

import os
from pathlib import Path

import pytest

from kvoy.telemetry.metrics import Instrument, Kind
from services.decode import service as decode
from services.kvstore import servicer as kvstore
from services.prefill import service as prefill
from services.router.metrics import ROUTER_TABLE
from tests.faults.series import DECODE, PREFILL

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
TABLES = {"prefill": prefill.TABLE, "decode": decode.TABLE, "router": ROUTER_TABLE, "kvstore": kvstore.TABLE}
HEAD = """# Metrics

Every pod shows its numbers as Prometheus text at `/metrics`: the router on its HTTP port, the others where
`--metrics-listen` says. Every series is there from the start, as 0, but for those whose labels are not known
beforehand. Counters count since the pod's start. Names that begin with `vllm:` and `gen_ai_` are those that other
software looks for. This page is written by `make golden`.

## A handoff in numbers

What both ends count of it, by the words in which one asks. Where KV is damaged or streams break, a prefill pod sends
more than the decode pod receives; `kvoy_prefill_frames_sent_total - kvoy_prefill_frames_resent_total` is what there was
to send. Streams that are lost now and then cost time only. Payloads that do not come though no stream broke, bad
checksums at all, and waits for credits that grow are worth a look at the network.
"""
NOTE = """
Exposed seconds compare the clocks of two hosts: they are as good as those agree, and never less than 0. The share of
requests whose handoff showed for more than 50 ms:

    1 - rate(kvoy_decode_exposed_seconds_bucket{le="0.05"}[5m])
      / ignoring(le) rate(kvoy_decode_exposed_seconds_count[5m])
"""


def shown(row: Instrument) -> str:
    """As it is spelled in /metrics; of a histogram, what ``_bucket``, ``_sum`` and ``_count`` are appended to."""
    return row.name + ("_total" if row.kind is Kind.COUNTER else "")


def handoffs() -> list[str]:
    words = list(dict.fromkeys([*PREFILL, *DECODE]))
    cells = [[f"`{table[word]}`" if word in table else "" for table in (PREFILL, DECODE)] for word in words]
    rows = [f"| {word} | {' | '.join(pair)} |" for word, pair in zip(words, cells, strict=True)]
    return ["", "| | prefill pod | decode pod |", "|---|---|---|", *rows]


def listed(role: str) -> list[str]:
    rows = [f"| `{shown(row)}` | {row.kind.value} | {', '.join(row.labels)} | {row.help} |" for row in TABLES[role]]
    return ["", f"## {role.capitalize()} pod", "", "| series | kind | labels | |", "|---|---|---|---|", *rows]


def written() -> str:
    lines = [*handoffs(), NOTE.rstrip()]
    for role in TABLES:
        lines += listed(role)
    return HEAD.rstrip() + "\n" + "\n".join([*lines, ""])


def test_the_page_shows_the_tables():
    if os.environ.get("KVOY_REWRITE_GOLDEN"):
        DOCUMENT.write_text(written())
    assert DOCUMENT.read_text() == written()


@pytest.mark.parametrize(("role", "table"), [("prefill", PREFILL), ("decode", DECODE)])
def test_the_words_for_handoffs_name_series(role, table):
    assert set(table.values()) <= {shown(row) for row in TABLES[role]}


@pytest.mark.parametrize("role", TABLES)
def test_each_series_is_explained(role):
    for row in TABLES[role]:
        assert row.help.endswith("."), row.name
        assert row.help.strip(".").lower() != row.name.partition("_")[2].replace("_", " "), row.name
