"""What a router knows of the pods: who is listed, what they last said of their load, what it has given them itself.

Owns these facts and how long they are believed. Must not know how a pod is chosen (kvoy.core.routing) or where facts
come from. A pod whose connection broke is *suspect*: it is left out until it shows itself alive again, because the
directory goes on listing a dead pod until its entry expires.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvoy.core.errors import InvariantError
from kvoy.core.types import LoadEvent, Pod, PodState, Role


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod as routing sees it. ``pod.load`` is ``age_s`` old and may count some of this router's own requests."""

    pod: Pod
    age_s: float
    usable: bool
    own_requests: int
    """Requests of this router that the pod works for now."""
    own_tokens: int
    """Prompt tokens of these."""
    own_requests_then: int
    """``own_requests`` when ``pod.load`` came."""

    @property
    def requests(self) -> int:
        """Everybody's requests at the pod, as far as can be known."""
        reported = self.pod.load.requests_running + self.pod.load.requests_waiting
        return self.own_requests + max(0, reported - self.own_requests_then)


@dataclass(slots=True)
class _Entry:
    pod: Pod
    loaded_at: float
    own_requests: int = 0
    own_tokens: int = 0
    own_requests_then: int = 0
    suspect_since: float | None = None
    listed: bool = True


class PodTable:
    """All pods that are listed, or that still work for this router. ``suspect_s``: how long a suspect pod that stays
    listed is left out when nothing is heard of it."""

    def __init__(self, suspect_s: float) -> None:
        self._suspect_s = suspect_s
        self._entries: dict[str, _Entry] = {}

    def list_all(self, pods: Sequence[Pod], now: float) -> None:
        """The directory's list, whole."""
        listed = {pod.pod_id: pod for pod in pods}
        for pod_id, pod in listed.items():
            self._listed(pod_id, pod, now)
        for pod_id in [pod_id for pod_id in self._entries if pod_id not in listed]:
            self._entries[pod_id].listed = False
            self._drop_if_done(pod_id)

    def load(self, event: LoadEvent, now: float) -> None:
        """A pod tells its load; one that is not listed, or another start of it, is not believed."""
        entry = self._entries.get(event.pod_id)
        if entry is None or entry.pod.generation != event.generation:
            return
        entry.pod = replace(entry.pod, load=event.load)
        entry.loaded_at, entry.own_requests_then, entry.suspect_since = now, entry.own_requests, None

    def suspect(self, pod_id: str, now: float) -> None:
        """A connection to the pod broke, or it says that it is about to leave."""
        if entry := self._entries.get(pod_id):
            entry.suspect_since = now

    def place(self, pod_id: str, tokens: int) -> None:
        """This router gives the pod a request; ``remove`` takes it back with the same ``tokens``."""
        entry = self._entries[pod_id]
        entry.own_requests += 1
        entry.own_tokens += tokens

    def remove(self, pod_id: str, tokens: int) -> None:
        entry = self._entries[pod_id]
        entry.own_requests -= 1
        entry.own_tokens -= tokens
        if entry.own_requests < 0 or entry.own_tokens < 0:
            raise InvariantError(f"more was taken back from pod {pod_id} than was given to it")
        self._drop_if_done(pod_id)

    def pod(self, pod_id: str) -> Pod:
        """A pod that is listed, or has been while this router's requests are at it."""
        return self._entries[pod_id].pod

    def is_listed(self, pod_id: str) -> bool:
        return pod_id in self._entries and self._entries[pod_id].listed

    def views(self, role: Role, now: float) -> tuple[PodView, ...]:
        """The listed pods of a role, by pod_id."""
        found = [(pod_id, entry) for pod_id, entry in sorted(self._entries.items()) if entry.listed]
        return tuple(self._view(entry, now) for _, entry in found if entry.pod.role is role)

    @property
    def addresses(self) -> frozenset[str]:
        """Of all pods that are listed or still work for this router."""
        return frozenset(entry.pod.address for entry in self._entries.values())

    def next_return(self, now: float) -> float | None:
        """When the next suspect pod is believed again without having been heard of."""
        since = [entry.suspect_since for entry in self._entries.values() if entry.suspect_since is not None]
        return min((start + self._suspect_s for start in since if start + self._suspect_s > now), default=None)

    def _listed(self, pod_id: str, pod: Pod, now: float) -> None:
        entry = self._entries.get(pod_id)
        if entry is None:
            self._entries[pod_id] = _Entry(pod, now)
            return
        entry.listed = True
        if pod.generation != entry.pod.generation:
            entry.suspect_since = None
        if (pod.generation, pod.load) != (entry.pod.generation, entry.pod.load):
            entry.loaded_at, entry.own_requests_then = now, entry.own_requests
        entry.pod = pod

    def _view(self, entry: _Entry, now: float) -> PodView:
        suspect = entry.suspect_since is not None and now - entry.suspect_since < self._suspect_s
        return PodView(
            pod=entry.pod,
            age_s=max(0.0, now - entry.loaded_at),
            usable=entry.pod.state is PodState.READY and not suspect,
            own_requests=entry.own_requests,
            own_tokens=entry.own_tokens,
            own_requests_then=entry.own_requests_then,
        )

    def _drop_if_done(self, pod_id: str) -> None:
        entry = self._entries[pod_id]
        if not entry.listed and entry.own_requests == 0:
            del self._entries[pod_id]
