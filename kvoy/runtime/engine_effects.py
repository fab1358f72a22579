"""Carries out what the brains of prefill and decode pods both ask for: engine orders, kvstore calls, announcements.

Owns the translation between the brain's words and the engine's. Decides nothing. The engine is anything that has the
ports below; runtime/engine_client.py is the real one.
"""

from collections.abc import AsyncIterator, Callable
from typing import Protocol, assert_never

from kvoy.core import actions, events
from kvoy.core.errors import EngineError
from kvoy.engine import messages
from kvoy.runtime.pod import PodRuntime
from kvoy.runtime.store_link import StoreLink

_LOOK_UP_S = 0.5
_FETCH_S = 2.0
"""Lookups and fetches stand between a request and its first token, and computing the blocks is never far off."""
_PUT_S = 5.0


class Slots(Protocol):
    """The staging slab as services see it."""

    @property
    def slots(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...

    @property
    def fd(self) -> int | None:
        """What other processes map it from; None: they cannot."""
        ...

    def slot(self, index: int) -> memoryview:
        """The bytes of one slot, writable."""
        ...


class Engine(Protocol):
    """A worker that obeys orders in the order given and answers each but Stop once."""

    @property
    def ready(self) -> messages.Ready: ...

    @property
    def slab(self) -> Slots: ...

    def send(self, order: messages.Order) -> None: ...

    def lend(self, fd: int, nbytes: int) -> int | None:
        """Has the worker map the memory behind ``fd``, which stays the caller's: the number that imports call it by.
        None: it does not, and bytes go through the slab."""
        ...

    def reads(self, number: int) -> bool:
        """It is mapped: imports may name it."""
        ...

    def take_back(self, number: int) -> None:
        """No later order names this memory. Does nothing once the worker is gone."""
        ...

    def answers(self) -> AsyncIterator[messages.Answer]: ...

    async def stop(self) -> None: ...


class EngineEffects:
    """Carries out what both brains may ask for. ``post`` takes the answers."""

    def __init__(
        self, engine: Engine, store: StoreLink, pod: PodRuntime, post: Callable[[events.SharedEvent], None]
    ) -> None:
        self._engine = engine
        self._store = store
        self._tasks = pod.tasks
        self._presence = pod.presence
        self._post = post
        self._fingerprint = engine.ready.model.fingerprint
        self._spec = engine.ready.kv_spec
        self._instead: dict[int, Callable[[bool], None]] = {}
        """What follows imports in place of Imported, by transfer id."""

    def slot(self, index: int, length: int) -> memoryview:
        """The first ``length`` bytes of a slot."""
        return self._engine.slab.slot(index)[:length]

    def slot_offset(self, index: int) -> int:
        """Where a slot begins in the slab."""
        return index * self._engine.slab.slot_bytes

    def import_blocks(self, order: messages.ImportBlocks, then: Callable[[bool], None] | None = None) -> None:
        """A filled slot, or what lies at the order's place, into the pool; answered by Imported, or ``then`` is called
        instead, and told whether it was right."""
        if then is not None:
            self._instead[order.transfer_id] = then
        self._engine.send(order)

    def perform(self, action: actions.SharedAction) -> None:
        """Returns at once."""
        match action:
            case actions.RunStep(plan):
                self._engine.send(messages.RunStep(plan))
            case actions.ExportBlocks(transfer_id, slot, blocks, first_layer, layers, valid_tokens, wire):
                order = messages.ExportBlocks(transfer_id, slot, blocks, first_layer, layers, valid_tokens, wire)
                self._engine.send(order)
            case actions.ImportSlot(transfer_id, slot, blocks):
                self.import_blocks(messages.ImportBlocks(transfer_id, slot, blocks, 0, self._spec.layers))
            case actions.LookUpStore():
                self._tasks.create_task(self._look_up(action))
            case actions.FetchFromStore():
                self._tasks.create_task(self._fetch(action))
            case actions.PutToStore():
                self._tasks.create_task(self._put(action))
            case actions.Announce(stored, removed):
                self._presence.announce(stored, removed)
            case _:
                assert_never(action)

    async def pump(self) -> None:
        """Turn the engine's answers into events, until cancelled or until the worker dies (EngineError)."""
        async for answer in self._engine.answers():
            match answer:
                case messages.StepDone(result):
                    self._post(events.StepDone(result))
                case messages.Exported(transfer_id):
                    self._post(events.Exported(transfer_id))
                case messages.Imported():
                    self._imported(answer)
                case messages.Ready() | messages.Mapped() | messages.Failed():
                    raise EngineError(f"The engine worker said {type(answer).__name__} while it was running.")
                case _:
                    assert_never(answer)
        raise EngineError("The engine worker went silent.")

    def _imported(self, answer: messages.Imported) -> None:
        instead = self._instead.pop(answer.transfer_id, None)
        if instead is None:
            self._post(events.Imported(answer.transfer_id))
        else:
            instead(answer.is_right)

    async def _look_up(self, ask: actions.LookUpStore) -> None:
        present = await self._store.call(
            lambda store: store.lookup(self._fingerprint, self._spec, ask.block_ids), _LOOK_UP_S
        )
        self._post(events.StoreLookedUp(ask.request_id, present))

    async def _fetch(self, ask: actions.FetchFromStore) -> None:
        into = self.slot(ask.slot, len(ask.block_ids) * self._spec.block_bytes)
        blocks = await self._store.call(
            lambda store: store.get(self._fingerprint, self._spec, ask.block_ids, into), _FETCH_S
        )
        self._post(events.StoreFetched(ask.transfer_id, blocks))

    async def _put(self, ask: actions.PutToStore) -> None:
        blocks = self.slot(ask.slot, len(ask.block_ids) * self._spec.block_bytes)
        await self._store.call(
            lambda store: store.put(self._fingerprint, self._spec, ask.block_ids, ask.parent_id, blocks), _PUT_S
        )
        self._post(events.StorePut(ask.transfer_id))
