"""inference.proto: what clients ask of the router and get back.

GenerateCall.timeout_s is not in the message: over gRPC it is the call's own deadline.
"""

from kvoy.core.errors import InvalidRequest
from kvoy.core.generate import (
    ChatMessage,
    ChatPrompt,
    GenerateCall,
    GenerateChunk,
    RequestTiming,
    TextPrompt,
    TokenizeCall,
    TokenPrompt,
    Usage,
    check,
    check_tokenize,
)
from kvoy.core.types import ModelInfo
from kvoy.transport.codec import fields, shared
from kvoy.v1 import inference_pb2 as pb


def generate_call_to_proto(value: GenerateCall) -> pb.GenerateRequest:
    message = pb.GenerateRequest(
        model=value.model,
        temperature=value.temperature,
        top_k=value.top_k,
        top_p=value.top_p,
        seed=value.seed,
        max_tokens=value.max_tokens,
        stop=value.stop,
        stop_token_ids=value.stop_token_ids,
        logprobs=value.logprobs,
        ignore_eos=value.ignore_eos,
        request_id=value.request_id,
        priority=shared.priority_to_proto(value.priority),
        cache_salt=value.cache_salt,
    )
    match value.prompt:
        case TextPrompt(text):
            message.text = text
        case TokenPrompt(token_ids):
            message.token_ids.CopyFrom(pb.TokenIds(ids=token_ids))
        case ChatPrompt():
            message.chat.CopyFrom(_chat_to_proto(value.prompt))
    return message


def generate_call_from_proto(message: pb.GenerateRequest, timeout_s: float | None = None) -> GenerateCall:
    """Checked with kvoy.core.generate.check."""
    call = GenerateCall(
        prompt=_prompt_from_proto(message),
        model=fields.short(message.model, "model"),
        temperature=message.temperature if message.HasField("temperature") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        seed=message.seed if message.HasField("seed") else None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        stop=tuple(message.stop),
        stop_token_ids=fields.token_ids(message.stop_token_ids, "stop_token_ids"),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        ignore_eos=message.ignore_eos,
        request_id=fields.short(message.request_id, "request_id"),
        priority=shared.priority_from_proto(message.priority),
        cache_salt=fields.short(message.cache_salt, "cache_salt"),
        timeout_s=timeout_s,
    )
    check(call)
    return call


def _prompt_from_proto(message: pb.GenerateRequest) -> TextPrompt | TokenPrompt | ChatPrompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokenPrompt(fields.token_ids(message.token_ids.ids, "prompt"))
        case "chat":
            return _chat_from_proto(message.chat)
        case _:
            raise InvalidRequest("The prompt is missing; give text, token_ids or chat.", "prompt")


def _chat_to_proto(value: ChatPrompt) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=one.role, content=one.content) for one in value.messages])


def _chat_from_proto(message: pb.Chat) -> ChatPrompt:
    return ChatPrompt(tuple(ChatMessage(role=one.role, content=one.content) for one in message.messages))


def generate_chunk_to_proto(value: GenerateChunk) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=value.request_id,
        text=value.text,
        token_ids=value.token_ids,
        logprobs=[shared.logprob_to_proto(one) for one in value.logprobs],
        finish_reason=shared.finish_to_proto(value.finish),
        usage=None if value.usage is None else fields.plain_to_proto(value.usage, pb.Usage),
        timing=None if value.timing is None else _timing_to_proto(value.timing),
    )


def generate_chunk_from_proto(message: pb.GenerateResponse) -> GenerateChunk:
    return GenerateChunk(
        request_id=message.request_id,
        text=message.text,
        token_ids=fields.token_ids(message.token_ids, "token_ids"),
        logprobs=shared.logprobs_from_proto(message.logprobs),
        finish=shared.FINISH_REASONS.optional(message.finish_reason, "finish_reason"),
        usage=fields.plain_from_proto(Usage, message.usage) if message.HasField("usage") else None,
        timing=_timing_from_proto(message.timing) if message.HasField("timing") else None,
    )


def _timing_to_proto(value: RequestTiming) -> pb.RequestTiming:
    return fields.plain_to_proto(
        value,
        pb.RequestTiming,
        prefill=None if value.prefill is None else shared.prefill_report_to_proto(value.prefill),
        decode=None if value.decode is None else shared.decode_report_to_proto(value.decode),
    )


def _timing_from_proto(message: pb.RequestTiming) -> RequestTiming:
    return RequestTiming(
        received_at=fields.finite(message.received_at, "timing.received_at"),
        first_token_at=fields.finite(message.first_token_at, "timing.first_token_at"),
        finished_at=fields.finite(message.finished_at, "timing.finished_at"),
        prefill=shared.prefill_report_from_proto(message.prefill) if message.HasField("prefill") else None,
        decode=shared.decode_report_from_proto(message.decode) if message.HasField("decode") else None,
    )


def tokenize_call_to_proto(value: TokenizeCall) -> pb.TokenizeRequest:
    if isinstance(value.prompt, TextPrompt):
        return pb.TokenizeRequest(model=value.model, text=value.prompt.text)
    return pb.TokenizeRequest(model=value.model, chat=_chat_to_proto(value.prompt))


def tokenize_call_from_proto(message: pb.TokenizeRequest) -> TokenizeCall:
    """Checked with kvoy.core.generate.check_tokenize."""
    prompt: TextPrompt | ChatPrompt
    match message.WhichOneof("prompt"):
        case "text":
            prompt = TextPrompt(message.text)
        case "chat":
            prompt = _chat_from_proto(message.chat)
        case _:
            raise InvalidRequest("The prompt is missing; give text or chat.", "prompt")
    call = TokenizeCall(prompt=prompt, model=fields.short(message.model, "model"))
    check_tokenize(call)
    return call


def tokens_to_proto(token_ids: tuple[int, ...]) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(token_ids=token_ids, count=len(token_ids))


def tokens_from_proto(message: pb.TokenizeResponse) -> tuple[int, ...]:
    return fields.token_ids(message.token_ids, "token_ids")


def models_to_proto(models: list[ModelInfo]) -> pb.ListModelsResponse:
    return pb.ListModelsResponse(models=[shared.model_to_proto(model) for model in models])


def models_from_proto(message: pb.ListModelsResponse) -> list[ModelInfo]:
    return [shared.model_from_proto(model) for model in message.models]
