"""A router as a pod: what is made at the start, run meanwhile, and given back at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvoy.core.types import KvSpec, ModelInfo, PodLoad
from kvoy.runtime.pod import PodRuntime
from kvoy.transport.inference import inference_service
from kvoy.transport.rpc import Registration
from services.router.config import RouterConfig
from services.router.fleet import Fleet, Links
from services.router.http_app import HttpFace
from services.router.http_server import HttpServer
from services.router.router import Router, RouterParams
from services.router.served import Served
from services.router.servicer import InferenceServicer
from services.router.watch import PodWatch


@dataclass(frozen=True, slots=True)
class RouterService:
    """The Service (runtime/pod.py) of a router."""

    router: Router
    watch: PodWatch
    links: Links
    http: HttpServer

    @classmethod
    async def start(cls, pod: PodRuntime, config: RouterConfig, served: Served) -> "RouterService":
        """Serves HTTP when it returns; gRPC follows."""
        links = Links.over(pod.channels)
        fleet = Fleet(served.info, links, pod.tasks.create_task, single=config.single)
        router = Router(served, fleet, pod.metrics, RouterParams(config.admission, config.patience))
        watch = PodWatch(fleet, pod.around.directory, pod.around.bus, pod.channels, pod.metrics)
        await watch.poll()
        http = await HttpServer.start(HttpFace(router, watch).app(), config.http_listen)
        return cls(router, watch, links, http)

    @property
    def registrations(self) -> Sequence[Registration]:
        return [inference_service(InferenceServicer(self.router))]

    @property
    def model(self) -> ModelInfo | None:
        return self.router.model

    @property
    def kv_spec(self) -> KvSpec | None:
        return None

    @property
    def load(self) -> PodLoad:
        return self.router.load

    @property
    def endpoints(self) -> Mapping[str, str]:
        return {"http": self.http.address}

    async def run(self) -> None:
        await self.watch.run()

    async def drain(self) -> None:
        await self.router.drain()

    def fail(self, message: str) -> None:
        """Nothing waits here that would not hear of it otherwise: flights end with their tasks."""
        del message

    async def close(self) -> None:
        await self.http.stop()
        await self.links.decode.close()
