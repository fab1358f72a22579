"""What a router can be told."""

from dataclasses import dataclass

from kvoy.core.admission import AdmissionParams
from kvoy.core.request import RequestParams
from kvoy.runtime.config import option
from kvoy.runtime.pod import PodConfig

MAX_BODY_BYTES = 8 << 20
"""Of one HTTP request. A prompt of 128k tokens as JSON is about one MiB."""


@dataclass(frozen=True, slots=True)
class RouterConfig(PodConfig):
    """The router: what clients talk to. It sends each prompt to a prefill and a decode pod and streams the answer."""

    http_listen: str = option("127.0.0.1:0", "host:port of the OpenAI-compatible HTTP server; port 0 picks a free one.")
    model: str = option("smollm2-135m", "Preset, GGUF file, Hugging Face folder or hub id: gives tokenizer and name.")
    single: bool = option(False, "Decode pods prefill, too; prefill pods are neither needed nor used.")
    max_requests: int = option(1024, "Requests in flight at a time; more are refused with 429.")
    max_prompt_tokens: int = option(4_000_000, "Prompt tokens of all requests in flight; more are refused with 429.")
    hold_s: float = option(5.0, "How long a request waits for a pod when there is none; then it is refused with 503.")

    def __post_init__(self) -> None:
        if self.max_requests < 1 or self.max_prompt_tokens < 1:
            raise ValueError("max_requests and max_prompt_tokens must be at least 1, else nothing is ever served.")
        if self.hold_s < 0:
            raise ValueError("hold_s must be at least 0.")

    @property
    def admission(self) -> AdmissionParams:
        return AdmissionParams(self.max_requests, self.max_prompt_tokens)

    @property
    def patience(self) -> RequestParams:
        return RequestParams(hold_s=self.hold_s)
