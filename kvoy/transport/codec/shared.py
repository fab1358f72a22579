"""types.proto: what several services say alike."""

from collections.abc import Iterable

from kvoy.core.errors import InvalidRequest
from kvoy.core.generate import MAX_LOGPROBS
from kvoy.core.types import (
    DecodeReport,
    FinishReason,
    KvDtype,
    KvSpec,
    ModelInfo,
    PrefillReport,
    Priority,
    SamplingParams,
    TokenLogprob,
    TransportOffer,
)
from kvoy.transport.codec import fields
from kvoy.v1 import types_pb2 as pb

KV_DTYPES = fields.EnumTable(
    {
        KvDtype.FP32: pb.KV_DTYPE_FP32,
        KvDtype.BF16: pb.KV_DTYPE_BF16,
        KvDtype.FP16: pb.KV_DTYPE_FP16,
        KvDtype.INT8: pb.KV_DTYPE_INT8,
        KvDtype.INT8_CHANNEL: pb.KV_DTYPE_INT8_CHANNEL,
    }
)
PRIORITIES = fields.EnumTable(
    {
        Priority.CRITICAL: pb.PRIORITY_CRITICAL,
        Priority.STANDARD: pb.PRIORITY_STANDARD,
        Priority.BATCH: pb.PRIORITY_BATCH,
    }
)
FINISH_REASONS = fields.EnumTable(
    {
        FinishReason.STOP: pb.FINISH_REASON_STOP,
        FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
        FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    }
)

SOON_S = 0.001
"""What is left of a deadline that has passed: on the wire 0 means no limit."""


def priority_to_proto(value: Priority) -> pb.Priority.ValueType:
    return pb.Priority.ValueType(PRIORITIES.number(value))


def priority_from_proto(number: int) -> Priority:
    """Unspecified is standard."""
    return PRIORITIES.optional(number, "priority") or Priority.STANDARD


def dtype_to_proto(value: KvDtype) -> pb.KvDtype.ValueType:
    return pb.KvDtype.ValueType(KV_DTYPES.number(value))


def finish_to_proto(value: FinishReason | None) -> pb.FinishReason.ValueType:
    return pb.FinishReason.ValueType(0 if value is None else FINISH_REASONS.number(value))


def kv_spec_to_proto(value: KvSpec) -> pb.KvSpec:
    return fields.plain_to_proto(value, pb.KvSpec, dtype=dtype_to_proto(value.dtype))


def kv_spec_from_proto(message: pb.KvSpec) -> KvSpec:
    return KvSpec(
        layers=fields.at_least(message.layers, 1, "kv_spec.layers"),
        kv_heads=fields.at_least(message.kv_heads, 1, "kv_spec.kv_heads"),
        head_dim=fields.at_least(message.head_dim, 1, "kv_spec.head_dim"),
        block_tokens=fields.at_least(message.block_tokens, 1, "kv_spec.block_tokens"),
        dtype=KV_DTYPES.value(message.dtype, "kv_spec.dtype"),
    )


def accepts_to_proto(values: Iterable[KvDtype]) -> list[pb.KvDtype.ValueType]:
    return [dtype_to_proto(value) for value in values]


def accepts_from_proto(numbers: Iterable[int]) -> tuple[KvDtype, ...]:
    """Those that are known here: a later release may accept more."""
    return tuple(value for value in KvDtype if KV_DTYPES.number(value) in set(numbers))


def offers_to_proto(values: Iterable[TransportOffer]) -> list[pb.TransportOffer]:
    return [fields.plain_to_proto(value, pb.TransportOffer) for value in values]


def offers_from_proto(messages: Iterable[pb.TransportOffer]) -> tuple[TransportOffer, ...]:
    return tuple(fields.plain_from_proto(TransportOffer, message) for message in messages)


def model_to_proto(value: ModelInfo) -> pb.ModelInfo:
    return fields.plain_to_proto(value, pb.ModelInfo)


def model_from_proto(message: pb.ModelInfo) -> ModelInfo:
    return fields.plain_from_proto(ModelInfo, message)


def sampling_to_proto(value: SamplingParams) -> pb.SamplingParams:
    return fields.plain_to_proto(
        value, pb.SamplingParams, stop_token_ids=value.stop_token_ids, top_logprobs=value.top_logprobs
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    if not 0 < message.top_p <= 1:
        raise InvalidRequest(
            f"sampling.top_p is {message.top_p}; it must be more than 0 and at most 1.", "sampling.top_p"
        )
    top_logprobs = message.top_logprobs if message.HasField("top_logprobs") else None
    if top_logprobs is not None and top_logprobs > MAX_LOGPROBS:
        raise InvalidRequest(
            f"sampling.top_logprobs is {top_logprobs}; at most {MAX_LOGPROBS} are given.", "sampling.top_logprobs"
        )
    return SamplingParams(
        temperature=fields.finite(message.temperature, "sampling.temperature"),
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        max_tokens=fields.at_least(message.max_tokens, 1, "sampling.max_tokens"),
        stop_token_ids=fields.token_ids(message.stop_token_ids, "sampling.stop_token_ids"),
        top_logprobs=top_logprobs,
    )


def logprob_to_proto(value: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in value.top]
    return pb.TokenLogprob(token_id=value.token_id, logprob=value.logprob, top=top)


def logprob_from_proto(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token_id=fields.token_id(message.token_id, "logprobs.token_id"),
        logprob=message.logprob,
        top=tuple((fields.token_id(one.token_id, "logprobs.top.token_id"), one.logprob) for one in message.top),
    )


def logprobs_from_proto(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(logprob_from_proto(message) for message in messages)


def prefill_report_to_proto(value: PrefillReport) -> pb.PrefillReport:
    return fields.plain_to_proto(value, pb.PrefillReport)


def prefill_report_from_proto(message: pb.PrefillReport) -> PrefillReport:
    return fields.plain_from_proto(PrefillReport, message)


def decode_report_to_proto(value: DecodeReport) -> pb.DecodeReport:
    return fields.plain_to_proto(value, pb.DecodeReport)


def decode_report_from_proto(message: pb.DecodeReport) -> DecodeReport:
    return fields.plain_from_proto(DecodeReport, message)


def timeout_left_s(deadline: float | None, now: float) -> float:
    """What is left until ``deadline``, as it travels: 0 is no limit."""
    return 0.0 if deadline is None else max(SOON_S, deadline - now)


def deadline_at(timeout_s: float, now: float) -> float | None:
    """The deadline that a ``timeout_s`` from the wire means here."""
    if timeout_s == 0:
        return None
    return now + fields.finite(timeout_s, "timeout_s")
