"""Mooncake's transfer engine over TCP: the active end writes from its registered memory into the other's, a batch of
pieces at once. Nothing is checked on the way, which is what the engine does by itself.
"""

from mooncake.engine import TransferEngine

from bench.peers.drivers.transfer import Memory, Place, TransferSetup, serve


class MooncakeEnd:
    """Owns the engine, for the life of the process."""

    about = "batch_transfer_sync_write over tcp, handshake between peers, defaults else"

    def __init__(self, setup: TransferSetup, memory: Memory) -> None:
        self._frames = setup.frames
        self._address = memory.address
        self._engine = TransferEngine()
        _require(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "start")
        _require(self._engine.register_memory(memory.address, setup.total_bytes), "register memory")
        self._peer = ""
        self._peer_address = 0

    def place(self) -> Place:
        return {"name": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": self._address}

    def connect(self, place: Place) -> None:
        self._peer, self._peer_address = str(place["name"]), int(str(place["address"]))

    def move(self) -> None:
        starts = [start for start, _ in self._frames]
        status = self._engine.batch_transfer_sync_write(
            self._peer,
            [self._address + start for start in starts],
            [self._peer_address + start for start in starts],
            [size for _, size in self._frames],
        )
        _require(status, "write")


def _require(status: int, what: str) -> None:
    if status:
        raise SystemExit(f"Mooncake cannot {what}: status {status}")


if __name__ == "__main__":
    serve(MooncakeEnd)
