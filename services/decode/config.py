"""What a decode pod can be told."""

from dataclasses import dataclass

from kvoy.runtime.config import option
from kvoy.runtime.engine_pod import EnginePodConfig


@dataclass(frozen=True, slots=True)
class DecodeConfig(EnginePodConfig):
    """A decode pod: takes the KV of prompts from prefill pods and generates tokens."""

    lease_s: float = option(30.0, "A reserved request whose KV does not come for so long is given up.", at_least=0.1)
    max_batch: int = option(64, "Requests that one engine step may carry.", at_least=1)
    ingest_advertise: str = option("", "host:port under which prefill pods reach this one; empty is like --advertise.")
    payload_listen: str = option(
        "",
        "host:port that the transports tcp and nixl share; empty is a free port where the gRPC server listens.",
    )
    payload_advertise: str = option(
        "", "host:port under which prefill pods reach these; empty is the host that they know, and the port in use."
    )
