"""kvoy.v1.Prefill on the server's side: what a prefill pod must offer, and its gRPC face.

Knows nothing of scheduling. Changes with proto/kvoy/v1/prefill.proto and codec/prefill.py.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from kvoy.core.actions import WorkStarted
from kvoy.core.types import PrefillReport, PrefillWork
from kvoy.transport.rpc import Registration

PrefillEvent = WorkStarted | PrefillReport


class PrefillHandler(Protocol):
    """The work of one prefill pod."""

    def run(self, work: PrefillWork) -> AsyncIterator[PrefillEvent]:
        """Yields WorkStarted, then PrefillReport, and ends; failure is a KvoyError (status.error_for_reason makes
        one from WorkFailed). Closed (aclose, or CancelledError where it waits) when the router takes the work back."""
        ...


def prefill_service(handler: PrefillHandler) -> Registration:
    """The gRPC face of ``handler``."""
    raise NotImplementedError
