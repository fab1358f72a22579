"""Puts a decode pod together: engine, brain, effects and its three gRPC faces."""

from functools import partial

from kvoy.core.actions import DecodeAction
from kvoy.core.counters import DecodeCounters
from kvoy.core.decode import DecodeBrain, DecodeParams
from kvoy.core.events import DecodeEvent, Tick
from kvoy.runtime.engine_effects import Engine, EngineEffects
from kvoy.runtime.engine_pod import EngineService, counter_table, frame_bytes, watch_engine_pod
from kvoy.runtime.loop import BrainLoop
from kvoy.runtime.payload_count import PayloadCount, payload_table
from kvoy.runtime.pod import PodRuntime
from kvoy.runtime.store_link import StoreLink
from kvoy.telemetry.metrics import EXPOSED_BUCKETS_S, Instrument, Kind
from kvoy.transport.decode import decode_service
from kvoy.transport.kv_held import held_service
from kvoy.transport.kv_stream import ingest_service
from services.decode.config import DecodeConfig
from services.decode.effects import DecodeEffects
from services.decode.fetch_calls import FetchCalls
from services.decode.ingest import Ingest
from services.decode.payload_way import payload_ways
from services.decode.sessions import Sessions

EXPOSED = "kvoy_decode_exposed_seconds"
TABLE = (
    *counter_table("decode", DecodeCounters),
    *payload_table("decode", "received", "that came as they were sent, by transport."),
    Instrument(
        EXPOSED,
        Kind.HISTOGRAM,
        "How much of a handoff showed: from the end of a prompt's last step on its prefill pod, by the clock there, "
        "to the start of its first step here.",
        "s",
        buckets=EXPOSED_BUCKETS_S,
    ),
)


def assemble(pod: PodRuntime, config: DecodeConfig, engine: Engine) -> EngineService:
    """The service around a worker that is ready."""
    ready = engine.ready
    brain = DecodeBrain(
        DecodeParams(chunk_tokens=config.chunk_tokens, lease_s=config.lease_s, max_batch=config.max_batch),
        ready.kv_spec,
        pool_blocks=ready.pool_blocks,
        slots=engine.slab.slots,
        slot_bytes=frame_bytes(engine),
        context_tokens=ready.model.context_tokens,
        use_store=True,
        fingerprint=ready.model.fingerprint,
        ingest_address=config.ingest_advertise,
    )

    def perform(action: DecodeAction) -> None:
        effects.perform(action)

    loop: BrainLoop[DecodeEvent, DecodeAction] = BrainLoop(brain, perform, Tick(), check=config.check)
    payloads = payload_ways(pod, config, engine)
    sessions = Sessions(loop, ready.model, lambda: pod.describe().address, payloads.offers)
    ingest = Ingest(loop, room=engine.slab.slots, received=PayloadCount(pod.metrics, "decode", "received").add)
    fetches = FetchCalls(loop)
    store = StoreLink.through(pod)
    shared = EngineEffects(engine, store, pod, loop.post)
    effects = DecodeEffects(
        shared,
        sessions,
        ingest,
        fetches,
        tasks=pod.tasks,
        post=loop.post,
        exposed=partial(pod.metrics.record, EXPOSED),
    )
    watch_engine_pod(pod, "decode", brain, ready.kv_spec, store)
    faces = [decode_service(sessions), ingest_service(ingest, payloads.sources), held_service(fetches)]
    return EngineService(engine, brain, loop, shared, faces, sessions.fail)
