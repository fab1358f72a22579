"""control.proto: pods and their counts, over Control and over the event bus."""

from collections.abc import Iterable

from kvoy.core.types import BlockEvent, LoadEvent, Pod, PodLoad, PodState, Role
from kvoy.transport.codec import fields, shared
from kvoy.v1 import control_pb2 as pb

ROLES = fields.EnumTable(
    {
        Role.ROUTER: pb.ROLE_ROUTER,
        Role.PREFILL: pb.ROLE_PREFILL,
        Role.DECODE: pb.ROLE_DECODE,
        Role.KVSTORE: pb.ROLE_KVSTORE,
    }
)
POD_STATES = fields.EnumTable(
    {
        PodState.STARTING: pb.POD_STATE_STARTING,
        PodState.READY: pb.POD_STATE_READY,
        PodState.DRAINING: pb.POD_STATE_DRAINING,
        PodState.UNREACHABLE: pb.POD_STATE_UNREACHABLE,
    }
)


def pod_to_proto(value: Pod) -> pb.Pod:
    return pb.Pod(
        pod_id=value.pod_id,
        role=pb.Role.ValueType(ROLES.number(value.role)),
        pid=value.pid,
        address=value.address,
        state=pb.PodState.ValueType(POD_STATES.number(value.state)),
        model=None if value.model is None else shared.model_to_proto(value.model),
        kv_spec=None if value.kv_spec is None else shared.kv_spec_to_proto(value.kv_spec),
        load=fields.plain_to_proto(value.load, pb.PodLoad),
        generation=value.generation,
    )


def pod_from_proto(message: pb.Pod) -> Pod:
    return Pod(
        pod_id=fields.identifier(message.pod_id, "pod.pod_id"),
        role=ROLES.value(message.role, "pod.role"),
        pid=fields.at_least(message.pid, 0, "pod.pid"),
        address=message.address,
        generation=message.generation,
        state=POD_STATES.value(message.state, "pod.state"),
        model=shared.model_from_proto(message.model) if message.HasField("model") else None,
        kv_spec=shared.kv_spec_from_proto(message.kv_spec) if message.HasField("kv_spec") else None,
        load=fields.plain_from_proto(PodLoad, message.load),
    )


def pods_to_proto(pods: Iterable[Pod]) -> pb.ListPodsResponse:
    return pb.ListPodsResponse(pods=[pod_to_proto(pod) for pod in pods])


def pods_from_proto(message: pb.ListPodsResponse) -> list[Pod]:
    return [pod_from_proto(pod) for pod in message.pods]


def block_event_to_proto(value: BlockEvent) -> pb.BlockEvent:
    return fields.plain_to_proto(value, pb.BlockEvent, stored=value.stored, removed=value.removed)


def block_event_from_proto(message: pb.BlockEvent) -> BlockEvent:
    return BlockEvent(
        pod_id=fields.identifier(message.pod_id, "pod_id"),
        generation=message.generation,
        seq=message.seq,
        stored=fields.block_ids(message.stored, "stored"),
        removed=fields.block_ids(message.removed, "removed"),
    )


def load_event_to_proto(value: LoadEvent) -> pb.LoadEvent:
    return fields.plain_to_proto(value, pb.LoadEvent, load=fields.plain_to_proto(value.load, pb.PodLoad))


def load_event_from_proto(message: pb.LoadEvent) -> LoadEvent:
    return LoadEvent(
        pod_id=fields.identifier(message.pod_id, "pod_id"),
        generation=message.generation,
        load=fields.plain_from_proto(PodLoad, message.load),
    )
