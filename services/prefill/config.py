"""What a prefill pod can be told."""

from dataclasses import dataclass
from typing import Literal

from kvoy.runtime.config import option
from kvoy.runtime.engine_pod import EnginePodConfig


@dataclass(frozen=True, slots=True)
class PrefillConfig(EnginePodConfig):
    """A prefill pod: computes the KV of prompts and ships it to decode pods."""

    wire: Literal["raw", "int8"] = option(
        "raw", "Number format of KV on its way: raw is that of the narrower pool, int8 takes 54 % of bf16's bytes."
    )
    handoff_streams: int = option(1, "Connections to each decode pod; handoffs take turns.", at_least=1)
