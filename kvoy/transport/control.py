"""kvoy.v1.Control on the server's side: what every pod must offer, and its gRPC face.

Changes with proto/kvoy/v1/control.proto and codec/control.py.
"""

from typing import Protocol

from kvoy.core.types import Pod
from kvoy.transport.rpc import Registration


class ControlHandler(Protocol):
    """What every pod tells about itself. Raises KvoyErrors."""

    async def get_pod(self) -> Pod:
        """This pod, now."""
        ...

    async def list_pods(self) -> list[Pod]:
        """Every pod that the directory lists, each asked for its present state."""
        ...


def control_service(handler: ControlHandler) -> Registration:
    """The gRPC face of ``handler``."""
    raise NotImplementedError
