"""What Prometheus reads: exact names, nothing missing, totals that only grow."""

import re

import httpx
import pytest

from kvoy.core.types import PodLoad
from kvoy.telemetry.instruments import POD_TABLE, watch_pod
from kvoy.telemetry.metrics import TTFT_BUCKETS_S, Instrument, Kind, Metrics
from kvoy.telemetry.metrics_server import MetricsServer

TABLE = (
    Instrument("kvoy_requests", Kind.COUNTER, "Requests.", "{request}", ("finish",), (("stop",), ("length",))),
    Instrument("kvoy_depth", Kind.GAUGE, "Depth."),
    Instrument("kvoy_seen_tokens", Kind.COUNTER, "Tokens.", "{token}"),
    Instrument("gen_ai_server_time_to_first_token_seconds", Kind.HISTOGRAM, "TTFT.", "s", buckets=TTFT_BUCKETS_S),
)


def samples(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.fixture
def metrics():
    made = Metrics((*TABLE, *POD_TABLE), {"service.name": "test"})
    yield made
    made.close()


def test_every_series_is_there_from_the_start_as_zero(metrics):
    found = samples(metrics)
    assert set(found.values()) == {0.0}
    for name in (
        'kvoy_requests_total{finish="stop"}',
        'kvoy_requests_total{finish="length"}',
        "kvoy_depth",
        "kvoy_seen_tokens_total",
        "gen_ai_server_time_to_first_token_seconds_count",
        "gen_ai_server_time_to_first_token_seconds_sum",
        'gen_ai_server_time_to_first_token_seconds_bucket{le="0.001"}',
        'gen_ai_server_time_to_first_token_seconds_bucket{le="+Inf"}',
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "kvoy_prefilled_tokens_total",
    ):
        assert name in found


def test_each_name_is_the_one_in_the_table(metrics):
    typed = re.findall(r"^# TYPE (\S+) ", metrics.render().decode(), re.MULTILINE)
    expected = [row.name + ("_total" if row.kind is Kind.COUNTER else "") for row in (*TABLE, *POD_TABLE)]
    assert typed == expected


def test_counts_gauges_and_histograms(metrics):
    metrics.count("kvoy_requests", finish="stop")
    metrics.count("kvoy_requests", 2, finish="stop")
    metrics.count("kvoy_requests", finish="cancelled")
    metrics.set("kvoy_depth", 4)
    metrics.record("gen_ai_server_time_to_first_token_seconds", 0.3)
    metrics.record("gen_ai_server_time_to_first_token_seconds", 99)
    found = samples(metrics)
    assert found['kvoy_requests_total{finish="stop"}'] == 3
    assert found['kvoy_requests_total{finish="length"}'] == 0
    assert found['kvoy_requests_total{finish="cancelled"}'] == 1
    assert found["kvoy_depth"] == 4
    histogram = "gen_ai_server_time_to_first_token_seconds"
    assert found[histogram + '_bucket{le="0.25"}'] == 0
    assert found[histogram + '_bucket{le="0.5"}'] == 1
    assert found[histogram + '_bucket{le="10.0"}'] == 1
    assert found[histogram + '_bucket{le="+Inf"}'] == found[histogram + "_count"] == 2
    assert found[histogram + "_sum"] == pytest.approx(99.3)


def test_a_total_is_read_where_it_is_kept(metrics):
    total = 5
    metrics.watch("kvoy_seen_tokens", lambda: total)
    assert samples(metrics)["kvoy_seen_tokens_total"] == 5
    total = 9
    assert samples(metrics)["kvoy_seen_tokens_total"] == 9


def test_a_pods_load_has_our_names_and_those_of_vllm(metrics):
    load = PodLoad(
        blocks_total=8, blocks_used_by_requests=2, requests_waiting=3, requests_running=1, prefilled_tokens=40
    )
    watch_pod(metrics, lambda: load, block_tokens=16)
    found = samples(metrics)
    assert found["kvoy_pool_blocks"] == 8
    assert found["kvoy_prefilled_tokens_total"] == 40
    assert found["vllm:num_requests_waiting"] == 3
    assert found["vllm:num_requests_running"] == 1
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found['vllm:cache_config_info{block_size="16",num_gpu_blocks="8"}'] == 1


def test_two_in_one_process_do_not_meet(metrics):
    other = Metrics(TABLE, {"service.name": "other"})
    other.set("kvoy_depth", 1)
    assert samples(metrics)["kvoy_depth"] == 0
    other.close()


def test_mistakes_of_the_programmer_are_refused():
    with pytest.raises(ValueError, match="same name"):
        Metrics((TABLE[0], TABLE[0]), {})
    with pytest.raises(ValueError, match="buckets"):
        Instrument("h", Kind.HISTOGRAM, "No buckets.")
    with pytest.raises(ValueError, match="each series"):
        Instrument("c", Kind.COUNTER, "C.", labels=("a", "b"), series=(("1",),))
    made = Metrics(TABLE, {})
    with pytest.raises(ValueError, match="labels"):
        made.count("kvoy_requests", reason="stop")
    with pytest.raises(ValueError, match="histogram"):
        made.watch("gen_ai_server_time_to_first_token_seconds", lambda: 0)
    made.close()


async def test_a_pod_serves_its_metrics_over_http(metrics):
    server = await MetricsServer.start(metrics, "127.0.0.1:0")
    async with httpx.AsyncClient(base_url=f"http://{server.address}") as client:
        page = await client.get("/metrics")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert page.content == metrics.render()
        assert (await client.get("/other")).status_code == 404
    await server.close()
