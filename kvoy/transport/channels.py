"""Connections to other pods: one channel for each address, kept and shared, and the options both ends run with."""

from collections.abc import Collection

import grpc.aio


class Channels:
    """The channels of one process to its peers. Not for use after close."""

    def __init__(self) -> None:
        raise NotImplementedError

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to host:port, made on first use; connects by itself and comes back fast."""
        raise NotImplementedError

    async def keep_only(self, addresses: Collection[str]) -> None:
        """Close the channels to pods that are no longer listed; calls on them break."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close all; calls on them break."""
        raise NotImplementedError
