"""Puts a prefill pod together: engine, brain, effects and gRPC face."""

from collections.abc import Callable

from kvoy.core.actions import PrefillAction
from kvoy.core.counters import PrefillCounters
from kvoy.core.events import PrefillEvent, Tick
from kvoy.core.prefill import PrefillBrain, PrefillParams
from kvoy.core.wire import NIXL, SHM, TCP, WirePolicy
from kvoy.runtime.engine_effects import Engine, EngineEffects
from kvoy.runtime.engine_pod import EngineService, counter_table, frame_bytes, watch_engine_pod
from kvoy.runtime.loop import BrainLoop
from kvoy.runtime.payload_count import PayloadCount, payload_table
from kvoy.runtime.pod import PodRuntime
from kvoy.runtime.store_link import StoreLink
from kvoy.transport.kv_held import GrpcLender
from kvoy.transport.kv_stream import GrpcHandoffConnector
from kvoy.transport.links import Link, Links
from kvoy.transport.nixl import NixlLink
from kvoy.transport.prefill import prefill_service
from kvoy.transport.shm import ShmLink
from kvoy.transport.tcp import TcpLink
from services.prefill.config import PrefillConfig
from services.prefill.effects import PrefillEffects
from services.prefill.fetching import Fetching
from services.prefill.servicer import PrefillServicer

TABLE = (
    *counter_table("prefill", PrefillCounters),
    *payload_table("prefill", "sent", "sent, by transport; what is sent again counts again."),
)


def assemble(pod: PodRuntime, config: PrefillConfig, engine: Engine) -> EngineService:
    """The service around a worker that is ready."""
    ready = engine.ready
    params = PrefillParams(chunk_tokens=config.chunk_tokens, wire=WirePolicy(config.wire))
    brain = PrefillBrain(
        params,
        ready.kv_spec,
        pool_blocks=ready.pool_blocks,
        slots=engine.slab.slots,
        slot_bytes=frame_bytes(engine),
        context_tokens=ready.model.context_tokens,
        use_store=True,
        fingerprint=ready.model.fingerprint,
    )

    def perform(action: PrefillAction) -> None:
        effects.perform(action)

    loop: BrainLoop[PrefillEvent, PrefillAction] = BrainLoop(brain, perform, Tick(), check=config.check)
    servicer = PrefillServicer(loop, ready.model)
    store = StoreLink.through(pod)
    shared = EngineEffects(engine, store, pod, loop.post)
    sent = PayloadCount(pod.metrics, "prefill", "sent")
    connector = GrpcHandoffConnector(
        pod.channels, _links(config, engine), streams=config.handoff_streams, sent=sent.add
    )
    fetching = Fetching(GrpcLender(pod.channels), shared.slot, pod.tasks, loop.post, params.fetch_s)
    effects = PrefillEffects(shared, servicer, connector, fetching, tasks=pod.tasks, post=loop.post)
    watch_engine_pod(pod, "prefill", brain, ready.kv_spec, store)
    return EngineService(engine, brain, loop, shared, [prefill_service(servicer)], servicer.fail, connector.close)


def _links(config: PrefillConfig, engine: Engine) -> Links:
    """What payloads may go by besides gRPC, the best first."""
    fd = engine.slab.fd
    kinds: dict[str, Callable[[int], Link]] = {SHM: ShmLink, TCP: TcpLink, NIXL: NixlLink}
    return Links([kinds[name](fd) for name in config.transport if name in kinds] if fd is not None else [])
