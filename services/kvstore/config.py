"""What a kvstore pod can be told."""

from dataclasses import dataclass

from kvoy.runtime.config import option
from kvoy.runtime.pod import PodConfig


@dataclass(frozen=True, slots=True)
class KvstoreConfig(PodConfig):
    """A kvstore pod: keeps blocks in its memory and gives them back."""

    capacity_bytes: int = option(1 << 30, "Memory for blocks; it is taken from the system as it fills.")

    def __post_init__(self) -> None:
        if self.capacity_bytes < 1:
            raise ValueError(f"--capacity-bytes must be at least 1, not {self.capacity_bytes}.")
