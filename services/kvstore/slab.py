"""The memory of the host tier: one anonymous mapping, of which the system gives a page when it is first written.

Knows nothing of blocks: the brain (kvoy.core.store) says which bytes are whose.
"""

import mmap

from kvoy.core.errors import ConfigError
from kvoy.core.store import Place


class HostSlab:
    """``capacity_bytes`` of memory, given back when the last view of it is gone."""

    def __init__(self, capacity_bytes: int) -> None:
        try:
            memory = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"The system does not give {capacity_bytes} bytes for blocks: {error}.") from error
        self._view = memoryview(memory)

    def write(self, place: Place, payload: memoryview) -> None:
        """Copies ``payload``, which is as long as the place."""
        self._view[place.offset : place.offset + place.length] = payload

    def read(self, place: Place) -> memoryview:
        """The bytes themselves: good as long as the block is pinned."""
        return self._view[place.offset : place.offset + place.length].toreadonly()
