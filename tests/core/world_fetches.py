"""The fetches of a prefill pod from what the decode pod holds: which are under way, and what is on its way back.

Each is answered exactly once, unless the pod that asked is killed. Whether the decode pod hears of a fetch, and whether
what it gives back comes as it was sent, is the caller's to choose.
"""

from dataclasses import dataclass

from kvoy.core import events as ev
from kvoy.core.frames import FetchCall
from tests.core.toy import Rounded


@dataclass(eq=False)
class Call:
    """One fetch of blocks that the decode pod holds."""

    transfer_id: int
    call: FetchCall
    slot: int
    blocks: int = 0
    """So many are in the slot."""
    is_open: bool = True
    is_told: bool = False
    """The prefill pod has its answer."""


class Fetches:
    def __init__(self, lanes, p, d):
        self.calls = {}
        self.lends = lambda _: True
        """Whether the decode pod ever hears of this fetch."""
        self.spoil_lent = lambda _: False
        """Whether what is given back under this header is not what was sent."""
        self._lanes, self._p, self._d = lanes, p, d

    # what happens to connections

    def cut(self, number):
        call = self.calls[number]
        if call.is_open:
            self._break(number)
            self._lanes.later(f"fetched {number}", self._answer, call)

    def end_all(self):
        """The prefill pod is killed."""
        for number, call in self.calls.items():
            if call.is_open:
                self._break(number)
            call.is_told = True
        self._lanes.drop_starting("fetched ")

    def assert_clean(self):
        assert all(call.is_told and not call.is_open for call in self.calls.values())

    # what the prefill pod orders

    def ask(self, transfer_id, call, slot):
        number = len(self.calls) + 1
        self.calls[number] = Call(transfer_id, call, slot)
        self._p.fill_slot(slot, [], call.kv_spec.dtype)
        if self.lends(call):
            self._lanes.later(f"ask {number}", self._d.tell, ev.FetchAsked(call, number))

    def cancel(self, transfer_id):
        self.cut(max(number for number, call in self.calls.items() if call.transfer_id == transfer_id))

    # what the decode pod orders

    def lend(self, header, number, slot, payload_bytes):
        assert payload_bytes == header.payload_bytes(self._d.engine.spec)
        if self.calls[number].is_open:
            self._lanes.later(f"lend {number}", self._lent, number, header, self._d.read_slot(slot))

    def end(self, number, reason):
        if self.calls[number].is_open:
            if reason:
                self._lanes.drop(f"lend {number}")
            self._lanes.later(f"lend {number}", self._end_lent, number)

    # what is on its way back

    def _lent(self, number, header, content):
        call = self.calls[number]
        spec = self._p.engine.spec
        assert header.key == call.call.key
        assert header.first_block == call.call.first_block + call.blocks
        assert (header.first_layer, header.layers, header.heads) == (0, spec.layers, spec.kv_heads)
        assert not Rounded.anywhere(content), "what is given back is what was computed"
        if self.spoil_lent(header):
            self._break(number)
            self._answer(call, is_damaged=True)
            return
        call.blocks += header.blocks
        self._p.engine.slots[call.slot] += content
        self._lanes.later(f"ask {number}", self._d.tell, ev.FrameTaken(number))

    def _end_lent(self, number):
        self._close(number)
        self._answer(self.calls[number])

    def _break(self, number):
        self._close(number)
        self._lanes.later("lost d", self._d.tell, ev.FetchEnded(number))

    def _close(self, number):
        self.calls[number].is_open = False
        self._lanes.drop(f"ask {number}", f"lend {number}")

    def _answer(self, call, *, is_damaged=False):
        call.is_told = True
        self._p.tell(ev.HeldFetched(call.transfer_id, call.blocks, is_damaged))
