"""Totals since a brain's start: what /metrics shows. Every path that is not the usual one ends in one of these.

A field added here appears in /metrics by its name; a field renamed is a series renamed.
"""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class PrefillCounters:
    """Of a prefill pod. Each work submitted ends in exactly one of ``done``, ``failed_*``."""

    submitted: int = 0
    done: int = 0
    failed_too_large: int = 0
    failed_busy: int = 0
    failed_deadline: int = 0
    failed_draining: int = 0
    failed_refused_by_decode: int = 0
    failed_decode_lost: int = 0
    failed_invalid: int = 0
    failed_cancelled: int = 0
    steps: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens computed."""
    generated_tokens: int = 0
    """Tokens sampled here: the first of each request."""
    cache_asked_tokens: int = 0
    """Tokens of requests that were given blocks: what the pool's prefix cache could have held."""
    cache_hit_tokens: int = 0
    """Of these, tokens whose KV it did hold."""
    reloaded_tokens: int = 0
    frames_shipped: int = 0
    frames_resent: int = 0
    """For damage, or because a stream broke before they were acknowledged."""
    bytes_shipped: int = 0
    """Each frame once, however often it was sent."""
    handoffs_opened: int = 0
    handoffs_lost: int = 0
    """Streams that broke, or on which the decode pod owed an answer for too long."""
    handoffs_resumed: int = 0
    """Streams that went on where one before them broke."""
    resumed_blocks: int = 0
    """Blocks that did not have to be sent again, over all streams that went on."""
    credit_waits: int = 0
    """Times that a handoff had a frame to send, and a slot, but no credit."""
    credit_wait_seconds: float = 0.0
    store_put_blocks: int = 0
    store_skipped_blocks: int = 0
    """Blocks not put to the kvstore because slots were short."""
    late_answers: int = 0
    """Said by a peer, a store or the transport about something that had ended; ignored."""


@dataclass(frozen=True, slots=True)
class DecodeCounters:
    """Of a decode pod. Each request asked for ends in exactly one of ``finished_*``, ``rejected_*``."""

    asked: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_cancelled: int = 0
    rejected_too_large: int = 0
    rejected_busy: int = 0
    rejected_deadline: int = 0
    rejected_lease_expired: int = 0
    """Leases that ended for want of KV."""
    rejected_invalid: int = 0
    rejected_draining: int = 0
    steps: int = 0
    prefilled_tokens: int = 0
    """Tokens computed by prefill rows: 0 on a pod to which everything is handed over and that never preempts."""
    generated_tokens: int = 0
    """Tokens sampled here; the first of a request that was handed over was sampled by its prefill pod."""
    cache_asked_tokens: int = 0
    """Tokens of requests that were given blocks: what the pool's prefix cache could have held."""
    cache_hit_tokens: int = 0
    """Of these, tokens whose KV it did hold."""
    preemptions: int = 0
    renewals: int = 0
    handoffs_opened: int = 0
    handoffs_committed: int = 0
    handoffs_refused: int = 0
    handoffs_lost: int = 0
    """Streams that broke, or whose sender opened another one."""
    handoffs_resumed: int = 0
    """Streams that went on where one before them broke."""
    resumed_blocks: int = 0
    """Blocks that had come and did not have to come again, over all streams and epochs that went on."""
    exposed_seconds: float = 0.0
    """From the end of a prompt's last step on its prefill pod to the start of its first step here, summed."""
    frames_received: int = 0
    bytes_received: int = 0
    """Of the frames in the pool; what was dropped is not in it."""
    frames_nacked: int = 0
    frames_dropped_corrupt: int = 0
    """Their header could not be believed, or what came into the slot was not what was sent."""
    frames_dropped_old_epoch: int = 0
    frames_dropped_old_attempt: int = 0
    """Of a stream whose handoff goes on over another one."""
    frames_dropped_no_lease: int = 0
    frames_dropped_duplicate: int = 0
    frames_dropped_invalid: int = 0
    store_put_blocks: int = 0
    store_skipped_blocks: int = 0
    """Blocks not put to the kvstore because slots were short or the blocks gone."""
    late_answers: int = 0
    """Said about a request or handoff that had ended; ignored."""


class Tally:
    """Counts up the fields of one counters class. Owner: one brain; its parts add to it."""

    def __init__(self, counters: type[PrefillCounters] | type[DecodeCounters]) -> None:
        self.totals: dict[str, Any] = {field.name: field.default for field in fields(counters)}
        """An int or a float, as the field is."""

    def add(self, name: str, count: float = 1) -> None:
        """A name that is no field is a KeyError."""
        self.totals[name] += count
