"""What a prefill pod can be told: nothing that other pods with an engine cannot."""

from dataclasses import dataclass

from kvoy.runtime.engine_pod import EnginePodConfig


@dataclass(frozen=True, slots=True)
class PrefillConfig(EnginePodConfig):
    """A prefill pod: computes the KV of prompts and ships it to decode pods."""
