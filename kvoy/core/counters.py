"""Totals since a brain's start: what /metrics shows. Every path that is not the usual one ends in one of these.

A field added here appears in /metrics by its name, with its help; a field renamed is a series renamed.
"""

from dataclasses import Field, dataclass, field, fields
from typing import Any

SHOWN_ELSEWHERE = "shown elsewhere"


def total(help: str, unit: str = "1") -> Any:  # noqa: A002  - the usual word for it
    """A field that counts from 0: what /metrics says of it, and its unit (UCUM, as telemetry has it)."""
    return field(default=0, metadata={"help": help, "unit": unit})


def hidden() -> Any:
    """A field that /metrics does not show, for the service shows it by transport, which no brain knows."""
    return field(default=0, metadata={"unit": SHOWN_ELSEWHERE})


def shown(counters: type["PrefillCounters"] | type["DecodeCounters"]) -> list[Field[Any]]:
    """The fields that /metrics shows."""
    return [each for each in fields(counters) if each.metadata["unit"] != SHOWN_ELSEWHERE]


@dataclass(frozen=True, slots=True)
class PrefillCounters:
    """Of a prefill pod. Each work submitted ends in exactly one of ``done``, ``failed_*``."""

    submitted: int = total("Works that routers gave to this pod.", "{request}")
    done: int = total("Works that ended with all KV at the decode pod.", "{request}")
    failed_too_large: int = total("Works that can never fit into this pod.", "{request}")
    failed_busy: int = total("Works turned away because too many wait here.", "{request}")
    failed_deadline: int = total("Works whose deadline passed.", "{request}")
    failed_draining: int = total("Works turned away because this pod leaves.", "{request}")
    failed_refused_by_decode: int = total("Works whose handoff the decode pod refused.", "{request}")
    failed_decode_lost: int = total("Works whose decode pod could not be reached for too long.", "{request}")
    failed_invalid: int = total("Works that make no sense here, such as those of another model.", "{request}")
    failed_cancelled: int = total("Works that their router took back.", "{request}")
    steps: int = total("Steps of the engine.", "{step}")
    prefilled_tokens: int = total("Prompt tokens computed.", "{token}")
    generated_tokens: int = total("Tokens sampled here: the first of each request.", "{token}")
    cache_asked_tokens: int = total("Prompt tokens that the prefix cache could have held.", "{token}")
    cache_hit_tokens: int = total("Of these, tokens whose KV it did hold.", "{token}")
    reloaded_tokens: int = total("Prompt tokens whose KV came from the kvstore.", "{token}")
    fetched_blocks: int = total("Blocks that decode pods gave back, and that were not computed again.", "{block}")
    fetches_short: int = total("Fetches from decode pods that brought less than was asked for.", "{fetch}")
    fetches_corrupt: int = total("Of these, fetches that ended with what was not what had been sent.", "{fetch}")
    fetches_given_up: int = total("Requests whose decode pod took too long to give blocks back.", "{request}")
    frames_shipped: int = hidden()
    """Each frame once, however often it was sent, as ``bytes_shipped``."""
    frames_resent: int = total(
        "Frames sent again, for damage or because a stream broke before they were acknowledged.", "{frame}"
    )
    bytes_shipped: int = hidden()
    handoffs_opened: int = total("Handoffs begun.", "{handoff}")
    handoffs_lost: int = total(
        "Streams that broke, or on which the decode pod owed an answer for too long.", "{stream}"
    )
    handoffs_resumed: int = total("Streams that went on where one before them broke.", "{stream}")
    resumed_blocks: int = total("Blocks that were not sent again when a stream went on where one broke.", "{block}")
    credit_waits: int = total("Times that a handoff had a frame to send, and a slot, but no credit.", "{wait}")
    credit_wait_seconds: float = total("Time that handoffs waited for a credit; counted when a wait ends.", "s")
    store_put_blocks: int = total("Blocks given to the kvstore.", "{block}")
    store_skipped_blocks: int = total("Blocks not given to the kvstore because slots were short.", "{block}")
    late_answers: int = total(
        "Words of a peer, a kvstore or a transport about something that had ended; ignored.", "{message}"
    )


@dataclass(frozen=True, slots=True)
class DecodeCounters:
    """Of a decode pod. Each request asked for ends in exactly one of ``finished_*``, ``rejected_*``."""

    asked: int = total("Requests that routers asked this pod to take.", "{request}")
    finished_stop: int = total("Requests that ended with a stop token.", "{request}")
    finished_length: int = total("Requests that ended because they had all the tokens they may have.", "{request}")
    finished_cancelled: int = total("Requests that their router took back.", "{request}")
    rejected_too_large: int = total("Requests that can never fit into this pod.", "{request}")
    rejected_busy: int = total("Requests turned away because too many wait here.", "{request}")
    rejected_deadline: int = total("Requests whose deadline passed.", "{request}")
    rejected_lease_expired: int = total("Requests whose KV did not come for longer than a lease.", "{request}")
    rejected_invalid: int = total("Requests that make no sense here, such as those of another model.", "{request}")
    rejected_draining: int = total("Requests turned away because this pod leaves.", "{request}")
    steps: int = total("Steps of the engine.", "{step}")
    prefilled_tokens: int = total("Prompt tokens computed here.", "{token}")
    """0 on a pod to which everything is handed over and that never preempts."""
    generated_tokens: int = total("Tokens sampled here.", "{token}")
    """The first of a request that was handed over was sampled by its prefill pod."""
    cache_asked_tokens: int = total("Tokens that the prefix cache could have held.", "{token}")
    cache_hit_tokens: int = total("Of these, tokens whose KV it did hold.", "{token}")
    preemptions: int = total("Times that a running request gave up its blocks to an older one.", "{request}")
    renewals: int = total("Reservations made anew for a request whose prefill pod was lost.", "{request}")
    handoffs_opened: int = total("Handoffs begun.", "{handoff}")
    handoffs_committed: int = total("Handoffs that ended with all KV here.", "{handoff}")
    handoffs_refused: int = total("Handoffs, or streams of them, that were refused.", "{handoff}")
    handoffs_lost: int = total("Streams that broke, or whose sender opened another one.", "{stream}")
    handoffs_resumed: int = total("Streams that went on where one before them broke.", "{stream}")
    resumed_blocks: int = total(
        "Blocks that had come and did not have to come again when a stream, or another prefill pod, went on.", "{block}"
    )
    frames_received: int = hidden()
    """In the pool, as ``bytes_received``; what was dropped is not in it."""
    bytes_received: int = hidden()
    frames_nacked: int = total("Times that a frame was asked for again.", "{frame}")
    frames_dropped_corrupt: int = total(
        "Frames with a bad checksum, of the header or of what came into the slot; each is asked for again.", "{frame}"
    )
    frames_dropped_lost: int = total(
        "Frames whose payload did not come, because their stream broke or the sender's memory was out of reach.",
        "{frame}",
    )
    frames_dropped_old_epoch: int = total("Frames of an earlier attempt at their request.", "{frame}")
    frames_dropped_old_attempt: int = total("Frames of a stream whose handoff goes on over another one.", "{frame}")
    frames_dropped_no_lease: int = total("Frames for a request that is not here, or no longer.", "{frame}")
    frames_dropped_duplicate: int = total("Frames that were here already.", "{frame}")
    frames_dropped_invalid: int = total("Frames that break the rules; their handoff was refused.", "{frame}")
    lent_blocks: int = total("Blocks given back to prefill pods that lacked them.", "{block}")
    fetches_refused: int = total("Fetches by prefill pods without the lease, or of what is not here.", "{fetch}")
    fetches_cut: int = total(
        "Fetches that ended before all was lent: with the lease, by the prefill pod, or for taking too long.", "{fetch}"
    )
    store_put_blocks: int = total("Blocks given to the kvstore.", "{block}")
    store_skipped_blocks: int = total(
        "Blocks not given to the kvstore because slots were short or the blocks gone.", "{block}"
    )
    late_answers: int = total("Words about a request or handoff that had ended; ignored.", "{message}")


class Tally:
    """Counts up the fields of one counters class. Owner: one brain; its parts add to it."""

    def __init__(self, counters: type[PrefillCounters] | type[DecodeCounters]) -> None:
        self.totals: dict[str, Any] = {field.name: field.default for field in fields(counters)}
        """An int or a float, as the field is."""

    def add(self, name: str, count: float = 1) -> None:
        """A name that is no field is a KeyError."""
        self.totals[name] += count
