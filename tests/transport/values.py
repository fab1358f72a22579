"""Hypothesis strategies for every value that crosses a wire, and small fixed examples of each."""

from dataclasses import replace

from hypothesis import strategies as st

from kvoy.core.actions import WorkStarted
from kvoy.core.frames import (
    Ack,
    Commit,
    Committed,
    FetchCall,
    FrameHeader,
    HandoffKey,
    Nack,
    Opening,
    Refused,
    Welcome,
)
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
)
from kvoy.core.serve import Cancel, Keep, Rejection, Renew, Reserve, StepOutputs
from kvoy.core.types import (
    GREEDY,
    BlockEvent,
    DecodeReport,
    FinishReason,
    KvDtype,
    KvSpec,
    LoadEvent,
    ModelInfo,
    Pod,
    PodLoad,
    PodState,
    PrefillReport,
    PrefillWork,
    Priority,
    RejectReason,
    Request,
    RequestOutput,
    Reservation,
    Role,
    SamplingParams,
    StoreStat,
    TokenLogprob,
)

NOW = 1_700_000_000.0
SPEC = KvSpec(layers=2, kv_heads=1, head_dim=8, block_tokens=4, dtype=KvDtype.BF16)
KEY = HandoffKey("request-1", 1)
OPENING = Opening(KEY, "lease-1", "ab12", SPEC)
MODEL = ModelInfo("smollm2-135m", "ab12", 2048, 49152)
POD = Pod("decode-1", Role.DECODE, 42, "127.0.0.1:5000", 7, PodState.READY, MODEL, SPEC, PodLoad(blocks_total=9))
REQUEST = Request("request-1", (1, 2, 3), GREEDY, "ab12")
RESERVATION = Reservation("request-1", 1, "lease-1", "127.0.0.1:5001", 0, SPEC)
WORK = PrefillWork(REQUEST, RESERVATION)


def header(seq: int = 0, blocks: int = 1) -> FrameHeader:
    return FrameHeader(KEY, seq, seq * blocks, blocks, 0, SPEC.layers, 0, SPEC.kv_heads, SPEC.dtype)


u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
positive = st.integers(1, 2**32 - 1)
token_id = st.integers(0, 2**31 - 1)
token_ids = st.lists(token_id, max_size=20).map(tuple)
some_token_ids = st.lists(token_id, min_size=1, max_size=20).map(tuple)
text = st.text(max_size=40)
name = st.text(min_size=1, max_size=40)
moment = st.floats(0, 1e12)
logprob = st.floats(width=32, allow_nan=False)
ids = st.binary(min_size=1, max_size=64)

kv_specs = st.builds(KvSpec, positive, positive, positive, positive, st.sampled_from(KvDtype))
models = st.builds(ModelInfo, text, text, u32, u32)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 1e6),
    top_k=u32,
    top_p=st.floats(0, 1, exclude_min=True),
    seed=u64,
    max_tokens=positive,
    stop_token_ids=token_ids,
    top_logprobs=st.none() | st.integers(0, 20),
)
token_logprobs = st.builds(
    TokenLogprob, token_id, logprob, st.lists(st.tuples(token_id, logprob), max_size=4).map(tuple)
)
logprob_lists = st.lists(token_logprobs, max_size=3).map(tuple)
prefill_reports = st.builds(PrefillReport, *[moment] * 4, *[u32] * 5, u64, u32, u32, u32)
decode_reports = st.builds(DecodeReport, *[moment] * 4, u32, u32, u32, u64, u32)
requests = st.builds(
    Request,
    request_id=name,
    token_ids=some_token_ids,
    sampling=samplings,
    fingerprint=text,
    priority=st.sampled_from(Priority),
    cache_salt=text,
    deadline=st.none(),
)
reservations = st.builds(Reservation, name, u64, name, name, u32, kv_specs, u64, lendable_blocks=u32)
works = st.builds(
    lambda request, reservation: PrefillWork(
        request,
        replace(reservation, request_id=request.request_id),
    ),
    requests,
    reservations,
)
prefill_events = st.builds(WorkStarted, st.just(KEY), u32) | prefill_reports

finishes = st.none() | st.sampled_from(FinishReason)
outputs = st.builds(RequestOutput, name, token_ids, logprob_lists, finishes, st.none() | decode_reports)
router_messages = st.builds(Reserve, requests, st.booleans()) | st.builds(Cancel, name) | st.builds(Renew, name)
router_messages |= st.builds(Keep, st.lists(name, max_size=4).map(tuple))
decode_messages = (
    reservations
    | st.builds(Rejection, name, st.sampled_from(RejectReason), text)
    | st.builds(StepOutputs, st.lists(outputs, max_size=3).map(tuple))
)

keys = st.builds(HandoffKey, name, u64)
openings = st.builds(Opening, keys, name, text, kv_specs, is_raw=st.booleans())
fetches = st.builds(FetchCall, keys, name, text, kv_specs, u32, positive)
headers = st.builds(FrameHeader, keys, u64, u32, positive, u32, positive, u32, positive, st.sampled_from(KvDtype))
commits = st.builds(Commit, keys, u64, token_id, st.none() | token_logprobs, moment)
receiver_messages = (
    st.builds(Welcome, u32, u64)
    | st.builds(Ack, u64, u32)
    | st.builds(Nack, u64)
    | st.just(Committed())
    | st.builds(Refused, text)
)

some_text = st.text(min_size=1, max_size=40)
chats = st.builds(ChatPrompt, st.lists(st.builds(ChatMessage, some_text, text), min_size=1, max_size=3).map(tuple))
texts = st.builds(TextPrompt, some_text)
generate_calls = st.builds(
    GenerateCall,
    prompt=texts | chats | st.builds(TokenPrompt, some_token_ids),
    model=text,
    temperature=st.none() | st.floats(0, 1e6),
    top_k=st.none() | st.integers(0, 2**31 - 1),
    top_p=st.none() | st.floats(0, 1, exclude_min=True),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    stop=st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
    stop_token_ids=token_ids,
    logprobs=st.none() | st.integers(0, 20),
    ignore_eos=st.booleans(),
    request_id=text,
    priority=st.sampled_from(Priority),
    cache_salt=text,
)
timings = st.builds(RequestTiming, moment, moment, moment, st.none() | prefill_reports, st.none() | decode_reports)
chunks = st.builds(
    GenerateChunk,
    text,
    text,
    token_ids,
    logprob_lists,
    finishes,
    st.none() | st.builds(Usage, u32, u32, u32),
    st.none() | timings,
)
tokenize_calls = st.builds(TokenizeCall, texts | chats | st.just(TextPrompt("")), text)

loads = st.builds(PodLoad, *[u32] * 7, u64, u32, u64, u64)
pods = st.builds(
    Pod,
    pod_id=name,
    role=st.sampled_from(Role),
    pid=st.integers(0, 2**63 - 1),
    address=text,
    generation=u64,
    state=st.sampled_from(PodState),
    model=st.none() | models,
    kv_spec=st.none() | kv_specs,
    load=loads,
)
id_lists = st.lists(ids, max_size=4).map(tuple)
block_events = st.builds(BlockEvent, name, u64, u64, id_lists, id_lists)
load_events = st.builds(LoadEvent, name, u64, loads)
store_stats = st.builds(StoreStat, *[u64] * 6)
