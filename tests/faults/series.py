"""What /metrics of a prefill and a decode pod say of handoffs, under the words that people ask for it with."""

from kvoy.core.wire import TRANSPORTS

PREFILL = {
    "bytes": "kvoy_prefill_sent_bytes_total",
    "frames": "kvoy_prefill_frames_sent_total",
    "resends": "kvoy_prefill_frames_resent_total",
    "broken streams": "kvoy_prefill_handoffs_lost_total",
    "resumed streams": "kvoy_prefill_handoffs_resumed_total",
    "resumed blocks": "kvoy_prefill_resumed_blocks_total",
    "blocks given back": "kvoy_prefill_fetched_blocks_total",
    "bad checksums": "kvoy_prefill_fetches_corrupt_total",
    "credit waits": "kvoy_prefill_credit_waits_total",
    "seconds of credit waits": "kvoy_prefill_credit_wait_seconds_total",
}
DECODE = {
    "bytes": "kvoy_decode_received_bytes_total",
    "frames": "kvoy_decode_frames_received_total",
    "resends": "kvoy_decode_frames_nacked_total",
    "bad checksums": "kvoy_decode_frames_dropped_corrupt_total",
    "payloads that did not come": "kvoy_decode_frames_dropped_lost_total",
    "broken streams": "kvoy_decode_handoffs_lost_total",
    "resumed streams": "kvoy_decode_handoffs_resumed_total",
    "resumed blocks": "kvoy_decode_resumed_blocks_total",
    "blocks given back": "kvoy_decode_lent_blocks_total",
    "exposed seconds": "kvoy_decode_exposed_seconds",
}
BY_TRANSPORT = ("bytes", "frames")
"""These have a series for each transport."""


def lines_of(name: str) -> list[str]:
    """The samples of a series as they stand in /metrics before anything has happened."""
    if name == DECODE["exposed seconds"]:
        return [f"{name}_sum", f"{name}_count", f'{name}_bucket{{le="+Inf"}}', f'{name}_bucket{{le="0.001"}}']
    if name in {table[word] for table in (PREFILL, DECODE) for word in BY_TRANSPORT}:
        return [by(name, transport) for transport in TRANSPORTS]
    return [name]


def by(name: str, transport: str) -> str:
    return f'{name}{{transport="{transport}"}}'
