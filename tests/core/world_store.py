"""A toy kvstore: the blocks it keeps, and whether it is away.

Blocks of another number format have keys of their own (see ToyEngine). What is kept is exactly what was computed, and
one key has one content. While the store is away nothing is found and nothing is kept; orders are answered all the same.
"""

from kvoy.core import events as ev
from tests.core.toy import Rounded


class Store:
    def __init__(self, lanes):
        self.blocks = {}
        self.is_away = False
        self._lanes = lanes

    def look_up(self, pod, request_id, ids):
        present = len(self._found(pod, ids))
        self._lanes.later(f"look {request_id}", pod.tell, ev.StoreLookedUp(request_id, present))

    def fetch(self, pod, transfer_id, ids, slot):
        self._lanes.later(f"store {pod.name}{transfer_id}", self._fetch, pod, transfer_id, ids, slot)

    def put(self, pod, transfer_id, ids, slot):
        self._lanes.later(f"store {pod.name}{transfer_id}", self._put, pod, transfer_id, ids, slot)

    def forget_orders_of_p(self):
        """The prefill pod, which alone looks blocks up, is killed."""
        self._lanes.drop_starting("look ", "store p")

    def _found(self, pod, ids):
        """The contents of the first blocks, up to one that is missing."""
        found = []
        for block_id in ids:
            if pod.engine.key(block_id) not in self.blocks or self.is_away:
                break
            found.append(self.blocks[pod.engine.key(block_id)])
        return found

    def _fetch(self, pod, transfer_id, ids, slot):
        found = self._found(pod, ids)
        pod.fill_slot(slot, found, pod.engine.spec.dtype)
        pod.tell(ev.StoreFetched(transfer_id, len(found)))

    def _put(self, pod, transfer_id, ids, slot):
        assert pod.engine.slot_dtypes[slot] is pod.engine.spec.dtype
        blocks = pod.read_slot(slot)
        assert not Rounded.anywhere(blocks), "what is kept is what was computed"
        if not self.is_away:
            for block_id, content in zip(ids, blocks, strict=False):
                kept = self.blocks.setdefault(pod.engine.key(block_id), content)
                assert kept == content, "two contents under one id"
        pod.tell(ev.StorePut(transfer_id))
