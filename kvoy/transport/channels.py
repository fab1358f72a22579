"""Connections to other pods: one channel for each address, kept and shared, and the options both ends run with.

Nothing here knows a service.
"""

from collections.abc import Collection

import grpc.aio

MIB = 1024 * 1024
MAX_MESSAGE_BYTES = 16 * MIB
"""Of one message, either way. Frames are held to less (frame_wire.MAX_FRAME_BYTES)."""

_BOTH_ENDS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that is cut off without a word (no FIN, no RST) is noticed after time + timeout.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Frames of 16 KiB (the default) cost a 4 MiB message 256 headers and as many wake-ups.
    ("grpc.http2.max_frame_size", 4 * MIB),
    # How far a stream may run ahead of its reader before flow control stops it: one frame of KV and a bit.
    ("grpc.http2.lookahead_bytes", 4 * MIB),
    # A message is copied together from what each read from the socket gave: reads of 8 KiB (the default) make that
    # hundreds of pieces a frame, each an object of Python's.
    ("grpc.experimental.tcp_read_chunk_size", MIB),
    ("grpc.experimental.tcp_min_read_chunk_size", MIB // 4),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 * MIB),
]
CHANNEL_OPTIONS = [
    *_BOTH_ENDS,
    # Pods come back within a second or two of a restart; the defaults would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two Channels of one process do not share a connection: one's traffic must not queue behind the other's.
    ("grpc.use_local_subchannel_pool", 1),
    # Addresses are pods', never to be reached through a proxy that the environment names.
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would share its callers at random; better that the second one fails to start.
    ("grpc.so_reuseport", 0),
]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to host:port that its caller must close."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class Channels:
    """The channels of one process to its peers. Not for use after close."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def to(self, address: str) -> grpc.aio.Channel:
        """The channel to host:port, made on first use; connects by itself and comes back fast."""
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

    async def keep_only(self, addresses: Collection[str]) -> None:
        """Close the channels to pods that are no longer listed; calls on them break."""
        for address in [known for known in self._channels if known not in addresses]:
            await self._channels.pop(address).close()

    async def close(self) -> None:
        """Close all; calls on them break."""
        await self.keep_only(())
