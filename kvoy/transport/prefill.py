"""kvoy.v1.Prefill on the server's side: what a prefill pod must offer, and its gRPC face.

Knows nothing of scheduling. Changes with proto/kvoy/v1/prefill.proto and codec/prefill.py.
"""

import time
from collections.abc import AsyncIterator
from typing import Protocol

from kvoy.core.actions import WorkStarted
from kvoy.core.types import PrefillReport, PrefillWork
from kvoy.transport.codec import prefill as codec
from kvoy.transport.codec.fields import parse
from kvoy.transport.rpc import Registration, ServerStream
from kvoy.transport.streams import closing
from kvoy.v1 import prefill_pb2 as pb

NAME = "kvoy.v1.Prefill"

PrefillEvent = WorkStarted | PrefillReport


class PrefillHandler(Protocol):
    """The work of one prefill pod."""

    def run(self, work: PrefillWork) -> AsyncIterator[PrefillEvent]:
        """Yields WorkStarted, then PrefillReport, and ends; failure is a KvoyError (status.error_for_reason makes
        one from WorkFailed). Closed (aclose, or CancelledError where it waits) when the router takes the work back."""
        ...


def prefill_service(handler: PrefillHandler) -> Registration:
    """The gRPC face of ``handler``. Deadlines become absolute on this process's wall clock."""

    async def run(wire: bytes, _timeout_s: float | None) -> AsyncIterator[bytes]:
        work = codec.work_from_proto(parse(pb.RunRequest, wire), time.time())
        events = handler.run(work)
        async with closing(events):
            async for event in events:
                yield codec.prefill_event_to_proto(event).SerializeToString()

    return Registration(NAME, {"Run": ServerStream(run)})
