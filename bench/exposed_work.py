"""What ``bench.exposed`` asks of its clusters, what is promised of each answer, and how its times become a share.

Knows numbers and names; no processes. Times are those that the pods themselves take, on one host and so by one clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.engine_work import SERVED_CHUNK_TOKENS
from bench.report import Target
from kvoy.core.errors import PeerError
from kvoy.core.generate import RequestTiming
from kvoy.core.types import DecodeReport, PrefillReport

MODEL = "smollm2-135m"
SHORT, MIDDLE, LONG = 512, 2048, 7000
CONTEXT_TOKENS = 8192
"""The model's; a chunk of so many holds any prompt, and nothing of it can be sent before it is computed."""
SLOW_BYTES_S = 20e6
HELD = Target(5.0, at_least=False)
HELD_SLOWLY = Target(20.0, at_least=False)
"""Percent of the prefill time."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One local cluster: a prefill and a decode pod, a thread each, and the link between them."""

    name: str
    dtype: str
    transport: str = "tcp"
    wire: str = "raw"
    chunk_tokens: int = SERVED_CHUNK_TOKENS
    link_bytes_s: float | None = None
    """None: the host's own loopback."""

    @property
    def after(self) -> "Setting":
        """The same, but that the whole prompt is one chunk."""
        return replace(self, name=f"{self.name}, sent after prefill", chunk_tokens=CONTEXT_TOKENS)

    def steps(self, prompt_tokens: int) -> int:
        """Of a prefill."""
        return -(-prompt_tokens // self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class Promise:
    """How much of a handoff shows, in percent of the prefill time."""

    setting: Setting
    prompt_tokens: int
    target: Target | None = None
    against: Setting | None = None

    @property
    def name(self) -> str:
        return f"{self.setting.name}: {self.prompt_tokens:,} tokens"


def _promises() -> Iterable[Promise]:
    """The default transport at all lengths; gRPC differs from it by milliseconds, which show at short prompts most."""
    for dtype in ("fp32", "bf16"):
        tcp = Setting(f"{dtype}, tcp", dtype)
        yield from (Promise(tcp, tokens, HELD) for tokens in (SHORT, MIDDLE, LONG))
    for dtype in ("fp32", "bf16"):
        grpc = Setting(f"{dtype}, grpc", dtype, "grpc")
        yield from (Promise(grpc, tokens, HELD) for tokens in (SHORT, MIDDLE))
    slow = Setting("int8 at 20 MB/s", "fp32", wire="int8", link_bytes_s=SLOW_BYTES_S)
    yield from (Promise(slow, tokens, HELD_SLOWLY, slow.after) for tokens in (SHORT, MIDDLE))
    yield Promise(slow, LONG, HELD_SLOWLY)
    by_grpc = replace(slow, name=f"{slow.name}, grpc", transport="grpc")
    yield from (Promise(by_grpc, tokens, HELD_SLOWLY) for tokens in (SHORT, MIDDLE))
    raw = replace(slow, name="fp32 at 20 MB/s", wire="raw")
    yield from (Promise(raw, tokens, against=raw.after) for tokens in (SHORT, MIDDLE))


PROMISES = tuple(_promises())
QUICK = tuple(
    replace(promise, against=None) for promise in PROMISES if promise.target and promise.prompt_tokens == SHORT
)
"""The short prompts of all that is promised: there the same milliseconds are the largest share."""


def work_of(promises: Sequence[Promise]) -> dict[Setting, tuple[int, ...]]:
    """Every setting that is needed, and the lengths of its prompts."""
    wanted: dict[Setting, dict[int, None]] = {}
    for promise in promises:
        for setting in filter(None, (promise.setting, promise.against)):
            wanted.setdefault(setting, {})[promise.prompt_tokens] = None
    return {setting: tuple(lengths) for setting, lengths in wanted.items()}


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt. ``foreign_share`` of the machine was taken by others meanwhile."""

    setting: Setting
    prompt_tokens: int
    round: int
    prefill_s: float
    """From the beginning of its first step to the end of its last one."""
    exposed_s: float
    """From there to the beginning of the step that decodes its first token."""
    last_step_s: float
    shipped_bytes: int
    foreign_share: float

    @property
    def share(self) -> float:
        """What shows of the handoff, in percent of the prefill time."""
        return 100 * self.exposed_s / self.prefill_s


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What a slow link carried and took while a setting was measured."""

    setting: Setting
    bytes_s: float
    passed_bytes: int
    cpu_s: float

    @property
    def core_share(self) -> float:
        """Of one core, 0 to 1, in the time in which it had something to carry."""
        return self.cpu_s * self.bytes_s / self.passed_bytes


def sample_of(
    setting: Setting, prompt_tokens: int, number: int, timing: RequestTiming | None, foreign_share: float
) -> Sample:
    """PeerError unless the prompt was prefilled as the setting says, whole, and then decoded elsewhere."""
    prefill, decode = (timing.prefill, timing.decode) if timing else (None, None)
    if prefill is None or decode is None:
        raise PeerError(f"{setting.name}: an answer came without the reports of its pods")
    _check(setting, prompt_tokens, prefill, decode)
    return Sample(
        setting,
        prompt_tokens,
        number,
        prefill_s=prefill.last_step_ended_at - prefill.first_step_started_at,
        exposed_s=decode.first_step_started_at - prefill.last_step_ended_at,
        last_step_s=prefill.last_step_ended_at - prefill.last_step_started_at,
        shipped_bytes=prefill.shipped_bytes,
        foreign_share=foreign_share,
    )


def _check(setting: Setting, prompt_tokens: int, prefill: PrefillReport, decode: DecodeReport) -> None:
    steps = setting.steps(prompt_tokens)
    if (prefill.computed_tokens, prefill.chunks, decode.prefilled_tokens) != (prompt_tokens, steps, 0):
        raise PeerError(
            f"{setting.name}: of {prompt_tokens} tokens the prefill pod computed {prefill.computed_tokens} in "
            f"{prefill.chunks} steps, not in {steps}, and the decode pod {decode.prefilled_tokens}"
        )
    if prefill.resent_frames or not decode.received_bytes == prefill.shipped_bytes > 0:
        raise PeerError(f"{setting.name}: frames were lost, or sent again; this is no measurement")
    if not decode.first_step_started_at:
        raise PeerError(f"{setting.name}: the answer ended before a step decoded it")
