"""kvoy.v1.Control on the server's side: what every pod must offer, and its gRPC face.

Changes with proto/kvoy/v1/control.proto and codec/control.py.
"""

from typing import Protocol

from kvoy.core.types import Pod
from kvoy.transport.codec import control as codec
from kvoy.transport.codec.fields import parse
from kvoy.transport.rpc import Registration, Unary
from kvoy.v1 import control_pb2 as pb

NAME = "kvoy.v1.Control"


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

    async def get_pod(wire: bytes) -> bytes:
        parse(pb.GetPodRequest, wire)
        return pb.GetPodResponse(pod=codec.pod_to_proto(await handler.get_pod())).SerializeToString()

    async def list_pods(wire: bytes) -> bytes:
        parse(pb.ListPodsRequest, wire)
        return codec.pods_to_proto(await handler.list_pods()).SerializeToString()

    return Registration(NAME, {"GetPod": Unary(get_pod), "ListPods": Unary(list_pods)})
