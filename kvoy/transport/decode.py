"""kvoy.v1.Decode on the server's side: what a decode pod must offer, and its gRPC face.

A session is one router's Serve stream; it carries all that router's requests. Knows nothing of scheduling.
Changes with proto/kvoy/v1/decode.proto and codec/decode.py.
"""

from typing import Protocol

from kvoy.core.serve import DecodeMessage, RouterMessage
from kvoy.transport.rpc import Registration


class DecodeSession(Protocol):
    """One router's stream, from its first message until DecodeHandler.closed."""

    @property
    def source(self) -> str:
        """Names the session within this process; never used again for another one."""
        ...

    def send(self, message: DecodeMessage) -> None:
        """Never waits. A router that does not read for too long is cut off (closed follows); after the end of the
        session it does nothing. Outputs of several steps may cross in one message when the router is slow."""
        ...


class DecodeHandler(Protocol):
    """While a call waits, nothing more of that session is read: that is the back-pressure."""

    async def received(self, session: DecodeSession, message: RouterMessage) -> None: ...

    async def closed(self, session: DecodeSession, reason: str) -> None:
        """Exactly once for each session that said anything: all its requests are to be cancelled."""
        ...


def decode_service(handler: DecodeHandler) -> Registration:
    """The gRPC face of ``handler``. Deadlines become absolute on this process's wall clock."""
    raise NotImplementedError
