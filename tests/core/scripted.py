"""One brain and a test that plays everybody else: tell it an event, look at its actions."""

from kvoy.core.actions import (
    ExportBlocks,
    ImportFrame,
    OpenHandoff,
    RunStep,
    SayOutputs,
    SayReserved,
    SayToSender,
    SendCommit,
    SendFrame,
    WorkDone,
)
from kvoy.core.decode import DecodeBrain, DecodeParams
from kvoy.core.events import (
    CommitArrived,
    Exported,
    FrameArrived,
    FrameSent,
    HandoffLost,
    HandoffOpened,
    Imported,
    ReceiverSaid,
    ReserveAsked,
    StepDone,
    Tick,
    WorkSubmitted,
)
from kvoy.core.frames import Ack, Commit, Committed, FrameHeader, HandoffKey, Opening, Welcome
from kvoy.core.prefill import PrefillBrain, PrefillParams
from kvoy.core.step import Sampled, StepResult
from kvoy.core.types import PrefillWork
from tests.core.toy import CONTEXT_TOKENS, FINGERPRINT, SPEC, request, reservation

KEY = HandoffKey("r", 1)


class Pod:
    """Keeps the answers that are due: steps, exports, imports, sends."""

    def __init__(self, brain):
        self.brain = brain
        self.now = 1000.0
        self.out = []
        self.step = None

    def tell(self, *events):
        """The actions that follow from these events."""
        self.out = [action for event in events for action in self._handle(event)]
        return self.out

    def _handle(self, event):
        actions = self.brain.handle(event, self.now)
        self.brain.check()
        for action in actions:
            if isinstance(action, RunStep):
                assert self.step is None, "a step is under way"
                self.step = action.plan
        return actions

    def all(self, kind):
        return [action for action in self.out if isinstance(action, kind)]

    def one(self, kind):
        (action,) = self.all(kind)
        return action

    def end_step(self, *tokens):
        """The step under way is done and sampled these tokens (7, 8, 9, ... by default)."""
        plan, self.step = self.step, None
        rows = [row for row in (*plan.prefill, *plan.decode) if row.sampling is not None]
        tokens = tokens or range(7, 7 + len(rows))
        sampled = tuple(Sampled(row.request_id, token) for row, token in zip(rows, tokens, strict=True))
        return self.tell(StepDone(StepResult(plan.step_id, sampled, self.now, self.now + 0.5)))

    @property
    def held(self):
        load = self.brain.load
        return load.blocks_used_by_requests, load.slots_used, load.requests_running, load.requests_waiting, load.leases


class PrefillPod(Pod):
    def __init__(self, *, blocks=16, slots=4, slot_blocks=2, spec=SPEC, use_store=False, slot_bytes=None, **params):
        params = PrefillParams(**{"chunk_tokens": 8, **params})
        slot_bytes = slot_bytes or slot_blocks * spec.block_bytes
        self.welcomes = {}
        super().__init__(PrefillBrain(params, spec, blocks, slots, slot_bytes, CONTEXT_TOKENS, use_store, FINGERPRINT))

    def submit(self, request_id="r", prompt=10, *, epoch=1, held_blocks=0, welcome=None, reserved=None, **more):
        """Submit a work; ``welcome`` credits come as soon as its handoff is opened."""
        work = PrefillWork(request(request_id, prompt, **more), reserved or reservation(request_id, epoch, held_blocks))
        if welcome is not None:
            self.welcomes[HandoffKey(request_id, epoch)] = welcome
        return self.tell(WorkSubmitted(work))

    def tell(self, *events):
        out = super().tell(*events)
        for action in out[:]:
            if isinstance(action, OpenHandoff) and action.opening.key in self.welcomes:
                welcome = Welcome(self.welcomes.pop(action.opening.key), 0)
                out = [*out, *super().tell(ReceiverSaid(action.opening.key, welcome))]
        self.out = out
        return out

    def lose(self, attempt=0, request_id="r", epoch=1):
        """The stream breaks."""
        return self.tell(HandoffLost(HandoffKey(request_id, epoch), "reset", attempt))

    def wait(self):
        """Until the next deadline."""
        self.now = self.brain.next_deadline()
        return self.tell(Tick())

    def say(self, message, request_id="r", epoch=1):
        """The decode pod says something."""
        return self.tell(ReceiverSaid(HandoffKey(request_id, epoch), message))

    def export(self):
        """Exports ordered by the last event are done."""
        return self.tell(*(Exported(action.transfer_id) for action in self.all(ExportBlocks)))

    def send(self):
        """Frames ordered by the last event are taken by the transport."""
        return self.tell(*(FrameSent(action.header.key, action.header.seq) for action in self.all(SendFrame)))

    @property
    def opening(self):
        return self.one(OpenHandoff).opening


class DecodePod(Pod):
    def __init__(
        self, *, blocks=16, slots=4, slot_blocks=2, context=CONTEXT_TOKENS, use_store=False, spec=SPEC, **params
    ):
        params = DecodeParams(**{"chunk_tokens": 8, "spare_share": 0.0, **params})
        slot_bytes = slot_blocks * SPEC.block_bytes
        brain = DecodeBrain(params, spec, blocks, slots, slot_bytes, context, use_store, FINGERPRINT, "decode:1")
        super().__init__(brain)
        self.leases = {}

    def reserve(self, request_id="r", prompt=10, *, local=False, source="router", **more):
        self.tell(ReserveAsked(request(request_id, prompt, **more), local, source))
        self.note_leases()
        return self.out

    def note_leases(self):
        for action in self.all(SayReserved):
            self.leases[action.reservation.request_id] = action.reservation

    def open(self, request_id="r", stream=1, **wrong):
        """The prefill pod opens the handoff of the newest reservation."""
        lease = self.leases[request_id]
        key = HandoffKey(request_id, wrong.get("epoch", lease.epoch))
        opening = Opening(
            key,
            wrong.get("lease", lease.lease),
            wrong.get("fingerprint", FINGERPRINT),
            wrong.get("spec", SPEC),
            wrong.get("attempt", 0),
            is_raw=wrong.get("is_raw", True),
        )
        return self.tell(HandoffOpened(opening, stream))

    def frame(
        self, seq, first_block, blocks=2, *, request_id="r", epoch=None, stream=1, intact=True, layers=None, spec=SPEC
    ):
        epoch = epoch or self.leases[request_id].epoch
        first_layer, count = layers or (0, spec.layers)
        key = HandoffKey(request_id, epoch)
        header = FrameHeader(key, seq, first_block, blocks, first_layer, count, 0, spec.kv_heads, spec.dtype)
        return self.tell(FrameArrived(header, intact, stream))

    def lose(self, stream=1, request_id="r", epoch=1):
        """The stream breaks."""
        return self.tell(HandoffLost(HandoffKey(request_id, epoch), "reset", stream))

    def imported(self):
        """Imports ordered by the last event are done."""
        return self.tell(*(Imported(action.transfer_id) for action in self.all(ImportFrame)))

    def commit(self, frames, token=7, *, request_id="r", epoch=None, stream=1):
        epoch = epoch or self.leases[request_id].epoch
        return self.tell(CommitArrived(Commit(HandoffKey(request_id, epoch), frames, token, None, self.now), stream))

    def take_all_but_import(self):
        """A request of two blocks of which everything has come, but the engine has not imported it: that order."""
        self.reserve(prompt=8)
        self.open()
        self.frame(0, 0)
        load = self.one(ImportFrame)
        self.commit(1)
        return load

    def hand_over(self, request_id="r", token=7, stream=1):
        """The whole handoff, two blocks a frame."""
        lease = self.leases[request_id]
        blocks = SPEC.blocks_for(self.brain._requests[request_id].request.prompt_tokens)
        self.open(request_id, stream)
        seq = 0
        for first in range(lease.held_blocks, blocks, 2):
            self.frame(seq, first, min(2, blocks - first), request_id=request_id, stream=stream)
            self.imported()
            seq += 1
        return self.commit(seq, token, request_id=request_id, stream=stream)

    @property
    def outputs(self):
        """(request, tokens, finish) of each output of the last events."""
        return [
            (output.request_id, output.token_ids, output.finish and output.finish.value)
            for action in self.all(SayOutputs)
            for output in action.outputs
        ]


def finish(pod, request_id="r", epoch=1):
    """Everything that is left of a work, without faults."""
    while pod.step is not None or pod.all(ExportBlocks) or pod.all(SendFrame):
        if pod.all(ExportBlocks):
            pod.export()
        elif pod.all(SendFrame):
            last = pod.all(SendFrame)[-1].header.seq
            pod.send()
            if not pod.all(SendCommit):
                pod.say(Ack(last, 4), request_id, epoch)
        else:
            pod.end_step()
    pod.say(Committed(), request_id, epoch)
    return pod.one(WorkDone)


def said(pod):
    return [action.message for action in pod.all(SayToSender)]
