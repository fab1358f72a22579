"""Glue between grpc.aio and our handlers: what every service adapter is made of.

Handlers speak in dataclasses and raise KvoyErrors; here bytes become messages, errors become statuses, and
anything else that a handler raises is logged whole and told to the peer as one sentence. Knows no service by name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import grpc


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Registration:
    """One gRPC service, ready for GrpcServer.start."""

    name: str
    """Full name, as in kvoy.v1.Inference."""
    methods: grpc.GenericRpcHandler
    end_streams: Callable[[], None] = _nothing
    """Ends the streams that would go on for ever; the server calls it when it begins to stop."""
