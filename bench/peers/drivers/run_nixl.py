"""NIXL's UCX backend through shared memory: the active end reads what lies in the other's registered memory.

Of the ways to run it this was the fastest here: reads rather than writes, no progress thread (the end that waits makes
the progress), and no watch on whether the other end lives, without which UCX offers no shared memory at all.
"""

import base64
import os

from bench.peers.drivers.transfer import Memory, Place, TransferSetup, serve

os.environ.setdefault("UCX_TLS", "sm,self")  # read when the library is loaded

from nixl_cu12 import nixl_agent, nixl_agent_config

_DRAM = "DRAM"


class NixlEnd:
    """Owns the agent, for the life of the process."""

    about = f"READ over UCX ({os.environ['UCX_TLS']}), polled, without watching the peer"

    def __init__(self, setup: TransferSetup, memory: Memory) -> None:
        self._frames = setup.frames
        self._address = memory.address
        self._agent = nixl_agent(f"end {setup.seed}", nixl_agent_config(backends=[], enable_prog_thread=False))
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
        self._agent.register_memory([(memory.address, setup.total_bytes, 0, "")], _DRAM)
        self._handle = None

    def place(self) -> Place:
        described = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"agent": described, "address": self._address}

    def connect(self, place: Place) -> None:
        peer = self._agent.add_remote_agent(base64.b64decode(str(place["agent"])))
        ours, theirs = self._pieces(self._address), self._pieces(int(str(place["address"])))
        self._handle = self._agent.initialize_xfer("READ", ours, theirs, peer)

    def move(self) -> None:
        state = self._agent.transfer(self._handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._handle)
        if state != "DONE":
            raise SystemExit(f"NIXL's transfer ended as {state}")

    def _pieces(self, address: int) -> object:
        return self._agent.get_xfer_descs([(address + start, size, 0) for start, size in self._frames], _DRAM)


if __name__ == "__main__":
    serve(NixlEnd)
