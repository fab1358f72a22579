"""What a router measures, and how the end of a request is counted.

Labels come from closed sets only, never from what clients send. Every series is there from the start.
"""

from kvoy.core.request_events import Failure, RequestState
from kvoy.core.types import FinishReason, Role
from kvoy.telemetry.metrics import DURATION_BUCKETS_S, TPOT_BUCKETS_S, TTFT_BUCKETS_S, Instrument, Kind, Metrics
from services.router.flight import Outcome

OUTCOMES = (
    *(reason.value for reason in (FinishReason.STOP, FinishReason.LENGTH)),
    RequestState.CANCELLED.value,
    *(failure.value for failure in Failure),
)
REFUSALS = ("invalid", "not_found", "too_many_requests", "too_many_tokens", "draining")

ROUTER_TABLE = (
    Instrument(
        "gen_ai_server_request_duration_seconds",
        Kind.HISTOGRAM,
        "Time from the arrival of a request to its last token.",
        "s",
        buckets=DURATION_BUCKETS_S,
    ),
    Instrument(
        "gen_ai_server_time_to_first_token_seconds",
        Kind.HISTOGRAM,
        "Time from the arrival of a request to its first token.",
        "s",
        buckets=TTFT_BUCKETS_S,
    ),
    Instrument(
        "gen_ai_server_time_per_output_token_seconds",
        Kind.HISTOGRAM,
        "Time for each token after the first.",
        "s",
        buckets=TPOT_BUCKETS_S,
    ),
    Instrument(
        "kvoy_router_requests",
        Kind.COUNTER,
        "Requests that ended, by how they did.",
        "{request}",
        ("outcome",),
        tuple((outcome,) for outcome in OUTCOMES),
    ),
    Instrument(
        "kvoy_router_refused_calls",
        Kind.COUNTER,
        "Calls that were refused before any pod was asked, by reason.",
        "{call}",
        ("reason",),
        tuple((reason,) for reason in REFUSALS),
    ),
    Instrument("kvoy_router_requests_in_flight", Kind.GAUGE, "Requests in flight.", "{request}"),
    Instrument(
        "kvoy_router_prompt_tokens_in_flight", Kind.GAUGE, "Prompt tokens of the requests in flight.", "{token}"
    ),
    Instrument("kvoy_router_prompt_tokens", Kind.COUNTER, "Prompt tokens of requests that ended.", "{token}"),
    Instrument("kvoy_router_cached_tokens", Kind.COUNTER, "Of these, tokens that a cache had.", "{token}"),
    Instrument("kvoy_router_output_tokens", Kind.COUNTER, "Tokens given to clients.", "{token}"),
    Instrument(
        "kvoy_router_usable_pods",
        Kind.GAUGE,
        "Pods that this router would send requests to.",
        "{pod}",
        ("role",),
        tuple((role.value,) for role in (Role.DECODE, Role.PREFILL)),
    ),
    Instrument("kvoy_router_prefix_index_entries", Kind.GAUGE, "Blocks of pods that the router knows of.", "{block}"),
    Instrument("kvoy_router_directory_up", Kind.GAUGE, "1 while the directory answers, else 0."),
    Instrument("kvoy_router_bus_up", Kind.GAUGE, "1 while the event bus is connected, else 0."),
)


def record(metrics: Metrics, outcome: Outcome) -> None:
    """Counts a request that ended."""
    end = outcome.end
    metrics.count("kvoy_router_requests", outcome=(end.finish or end.failure or end.state).value)
    metrics.count("kvoy_router_prompt_tokens", outcome.prompt_tokens)
    metrics.count("kvoy_router_cached_tokens", outcome.cached_tokens)
    metrics.count("kvoy_router_output_tokens", outcome.completion_tokens)
    if outcome.first_token_at:
        to_first = outcome.first_token_at - outcome.received_at
        metrics.record("gen_ai_server_time_to_first_token_seconds", max(0.0, to_first))
    if end.finish is None:
        return
    metrics.record("gen_ai_server_request_duration_seconds", max(0.0, outcome.finished_at - outcome.received_at))
    if outcome.completion_tokens > 1:
        after_first = outcome.finished_at - outcome.first_token_at
        per_token = max(0.0, after_first) / (outcome.completion_tokens - 1)
        metrics.record("gen_ai_server_time_per_output_token_seconds", per_token)
