"""The pods as one router uses them: what is known of them, the connections to them, and whom a request goes to next.

Owns the pod table, the prefix index and the clients. Choosing is kvoy.core.routing's; here it gets its snapshot.
Flights that wait for a pod are told when the set of usable pods changes.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from kvoy.core.hashing import block_ids
from kvoy.core.pod_table import PodTable, PodView
from kvoy.core.prefix_index import PrefixIndex
from kvoy.core.request_events import DecodePicked, NoPod, NoPodReason, PrefillPicked
from kvoy.core.routing import Matches, Need, NoRoute, Route, RoutingParams, choose_decode, choose_prefill
from kvoy.core.types import BlockEvent, KvSpec, LoadEvent, ModelInfo, Pod, Request, Role
from kvoy.transport.channels import Channels
from kvoy.transport.clients import PrefillClient
from kvoy.transport.decode_client import DecodeClient

INDEX_ENTRIES = 1_000_000
"""Blocks of all pods that the prefix index remembers: some 300 MB at the very most."""
SUSPECT_S = 6.0
"""Longer than the directory keeps a dead pod (runtime.presence.TTL_S), so that one is not tried twice."""

FORGET_S = 60.0
"""How long the blocks of a pod that is no longer listed are remembered: an outage of the directory is shorter."""
NO_PREFILL = "There is no prefill pod that can be used. Start one, or start the router with --single."

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(frozen=True, slots=True)
class Links:
    """The connections to pods, shared by all requests."""

    decode: DecodeClient
    prefill: PrefillClient

    @classmethod
    def over(cls, channels: Channels) -> "Links":
        return cls(DecodeClient(channels), PrefillClient(channels))


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether there is a usable set of pods; ``reasons`` are sentences, and none if there is."""

    reasons: tuple[str, ...]
    pods: dict[str, int] = field(default_factory=dict)
    """Usable pods by role."""


class Fleet:
    """All pods that serve ``model``, to this router. ``single``: decode pods prefill, prefill pods are not used."""

    def __init__(
        self,
        model: ModelInfo,
        links: Links,
        spawn: Spawn,
        *,
        single: bool,
        params: RoutingParams = RoutingParams(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.links = links
        self.spawn = spawn
        self.single = single
        self.table = PodTable(SUSPECT_S)
        self.index = PrefixIndex(INDEX_ENTRIES)
        self.clock = clock
        self._model = model
        self._params = params
        self._turns = {Role.DECODE: 0, Role.PREFILL: 0}
        self._absent_since: dict[str, float] = {}
        self._watchers: dict[object, Callable[[], None]] = {}
        self._usable: tuple[tuple[str, int], ...] = ()

    # --- choosing

    def pick_decode(self, request: Request, exclude: tuple[str, ...]) -> DecodePicked | NoPod:
        """None without a prefill pod either: a decode pod would hold blocks in vain."""
        if not self.single and not any(view.usable for view in self._views(Role.PREFILL)):
            return NoPod(Role.DECODE, NoPodReason.ABSENT, NO_PREFILL)
        views = self._views(Role.DECODE)
        route = choose_decode(
            views, self._need(Role.DECODE, request, exclude), self._matches(views, request), self._params
        )
        return DecodePicked(route.pod_id) if isinstance(route, Route) else _no_pod(Role.DECODE, route)

    def pick_prefill(self, request: Request, exclude: tuple[str, ...], kv_spec: KvSpec) -> PrefillPicked | NoPod:
        """``kv_spec`` is what the decode pod takes."""
        views = self._views(Role.PREFILL)
        matches = self._matches(views, request)
        route = choose_prefill(views, self._need(Role.PREFILL, request, exclude), matches, kv_spec, self._params)
        return PrefillPicked(route.pod_id) if isinstance(route, Route) else _no_pod(Role.PREFILL, route)

    def _views(self, role: Role) -> tuple[PodView, ...]:
        return self.table.views(role, self.clock())

    def _need(self, role: Role, request: Request, exclude: tuple[str, ...]) -> Need:
        self._turns[role] += 1
        return Need(request.fingerprint, request.prompt_tokens, exclude, self._turns[role])

    def _matches(self, views: tuple[PodView, ...], request: Request) -> Matches:
        """Nothing is hashed where there is nothing to choose."""
        spec = next((view.pod.kv_spec for view in views if view.usable and view.pod.kv_spec), None)
        if spec is None or len(views) < 2 or not len(self.index):
            return {}
        ids = block_ids(request.token_ids, spec.block_tokens, request.fingerprint, request.cache_salt)
        return self.index.match(ids)

    # --- what is heard of pods

    def listed(self, pods: list[Pod]) -> None:
        """The directory's list, whole."""
        now = self.clock()
        self.table.list_all(pods, now)
        for pod_id in self.index.pod_ids:
            if self.table.is_listed(pod_id):
                self._absent_since.pop(pod_id, None)
            elif now - self._absent_since.setdefault(pod_id, now) > FORGET_S:
                del self._absent_since[pod_id]
                self.index.forget(pod_id)
        self.look()

    def loaded(self, event: LoadEvent) -> None:
        """A pod told its load."""
        self.table.load(event, self.clock())
        self.look()

    def blocks_changed(self, event: BlockEvent) -> None:
        """A pod's cache gained or lost blocks."""
        self.index.apply(event)

    def suspect(self, pod_id: str) -> None:
        """A connection to the pod broke, or the pod is about to leave: not to be chosen for a while."""
        self.table.suspect(pod_id, self.clock())
        self.look()

    def look(self) -> None:
        """Tells whoever watches if the set of usable pods is another one than before."""
        views = (*self._views(Role.DECODE), *self._views(Role.PREFILL))
        usable = tuple((view.pod.pod_id, view.pod.generation) for view in views if view.usable)
        if usable != self._usable:
            self._usable = usable
            for tell in list(self._watchers.values()):
                tell()

    def watch(self, key: object, changed: Callable[[], None]) -> None:
        """``changed`` is called whenever the set of usable pods changes, until ``unwatch``."""
        self._watchers[key] = changed

    def unwatch(self, key: object) -> None:
        self._watchers.pop(key, None)

    # --- what is told of pods

    @property
    def context_tokens(self) -> int:
        """What prompt and answer together must fit into, at every pod that serves the model."""
        views = (*self._views(Role.DECODE), *(() if self.single else self._views(Role.PREFILL)))
        models = [view.pod.model for view in views if view.pod.model]
        told = [model.context_tokens for model in models if model.fingerprint == self._model.fingerprint]
        return min([self._model.context_tokens, *told])

    def readiness(self) -> Readiness:
        """Whether a short prompt could be served now."""
        probe = Need(self._model.fingerprint, prompt_tokens=1)
        decode = choose_decode(self._views(Role.DECODE), probe, {}, self._params)
        reasons = [decode.message] if isinstance(decode, NoRoute) else []
        if not self.single:
            reasons += self._why_no_prefill(decode)
        return Readiness(tuple(reasons), {role.value: self.usable_pods(role) for role in (Role.DECODE, Role.PREFILL)})

    def usable_pods(self, role: Role) -> int:
        return sum(view.usable for view in self._views(role))

    def _why_no_prefill(self, decode: Route | NoRoute) -> list[str]:
        views = self._views(Role.PREFILL)
        spec = self.table.pod(decode.pod_id).kv_spec if isinstance(decode, Route) else None
        spec = spec or next((view.pod.kv_spec for view in views if view.pod.kv_spec), None)
        probe = Need(self._model.fingerprint, prompt_tokens=1)
        if spec is None:
            return [NO_PREFILL]
        route = choose_prefill(views, probe, {}, spec, self._params)
        return [route.message] if isinstance(route, NoRoute) else []


def _no_pod(role: Role, route: NoRoute) -> NoPod:
    return NoPod(role, route.reason, route.message)
