"""A Sender and a Receiver over a channel that loses, doubles, reorders and damages: exactly once and right, or nothing.

Worse than any transport of ours, which keeps order or breaks. When nothing moves any more both ends give up, as
their times would make them.
"""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvoy.core.frames import Ack, Committed, FrameHeader, HandoffKey, Nack, Opening, Refused, Welcome
from kvoy.core.handoff import FrameSize, HandoffState
from kvoy.core.handoff_receiver import Receiver, Verdict
from kvoy.core.handoff_sender import Sender
from kvoy.core.step import Sampled
from tests.core.toy import FINGERPRINT, SPEC

OPENING = Opening(HandoffKey("r", 1), "lease-1", FINGERPRINT, SPEC)
FATES = ("go", "go", "go", "go", "lose", "double", "damage", "damage number", "overtake")


class Link:
    """Both ends and what is between them."""

    def __init__(self, draw, first, end, slot_bytes, fates):
        size = FrameSize.fitting(SPEC, slot_bytes)
        self.draw = draw
        self.fates = fates
        self.sender = Sender(OPENING, size, first, end, max_resends=3)
        self.receiver = Receiver(OPENING, 1, slot_bytes, first, end)
        self.receiver.grant(2)
        self.to_receiver, self.to_sender = [], []
        self.imports = []
        self.pool = Counter()
        self.end = end
        self.say(Welcome(2, 0))

    def say(self, message):
        self.to_sender.append(message)

    def send(self, what):
        fate = self.draw(st.sampled_from(self.fates))
        damaged = isinstance(what, FrameHeader)
        match fate:
            case "lose":
                return
            case "double":
                self.to_receiver += [(what, True), (what, True)]
            case "damage" if damaged:
                self.to_receiver.append((what, False))
            case "damage number" if damaged:
                self.to_receiver.append((replace(what, seq=self.draw(st.integers(0, 9))), False))
            case "overtake":
                self.to_receiver.insert(0, (what, True))
            case _:
                self.to_receiver.append((what, True))

    def sender_acts(self):
        self.sender.offer(self.draw(st.integers(0, self.end)))
        if self.sender.has_frame:
            header = self.sender.next_frame()
            self.sender.sent(header.seq)
            self.send(header)
        elif self.sender.can_commit:
            self.send(self.sender.commit(Sampled("r", 7), 1.0))

    def sender_hears(self):
        if self.to_sender:
            heard = self.sender.hear(self.to_sender.pop(0))
            if heard.resend is not None:
                self.send(heard.resend)
            if heard.breach:
                self.receiver.lose()

    def receiver_hears(self):
        if not self.to_receiver:
            return
        what, intact = self.to_receiver.pop(0)
        if not intact:
            if self.receiver.damaged(what.seq):
                self.say(Nack(what.seq))
        elif isinstance(what, FrameHeader):
            self.frame(what)
        else:
            verdict, skipped = self.receiver.hear_commit(what)
            self.nack(skipped)
            if verdict is Verdict.INVALID and self.receiver.is_open:
                self.say(self.receiver.say(Refused("commit")))
        self.close()

    def frame(self, header):
        match self.receiver.judge(header):
            case Verdict.TAKE:
                self.nack(self.receiver.take(header))
                self.imports.append(header)
            case Verdict.INVALID if self.receiver.is_open:
                self.say(self.receiver.say(Refused("frame")))

    def nack(self, seqs):
        for seq in seqs:
            self.say(Nack(seq))

    def import_one(self):
        if self.imports:
            header = self.imports.pop(self.draw(st.integers(0, len(self.imports) - 1)))
            for block in range(header.first_block, header.first_block + header.blocks):
                for layer in range(header.first_layer, header.first_layer + header.layers):
                    self.pool[block, layer] += 1
            self.receiver.imported(header)
            if self.receiver.is_open:
                self.receiver.grant(1 if self.receiver.commit is None else 0)
                through = self.receiver.through_seq
                credit = self.receiver.granted - through - 1
                self.say(Welcome(self.receiver.granted, 0) if through < 0 else Ack(through, credit))
            self.close()

    def close(self):
        if self.receiver.is_open and self.receiver.is_complete:
            self.say(self.receiver.say(Committed()))
        elif self.receiver.is_open and self.receiver.is_hopeless:
            self.say(self.receiver.say(Refused("hopeless")))

    def run(self):
        acts = [self.sender_acts, self.sender_hears, self.receiver_hears, self.import_one]
        for _ in range(self.draw(st.integers(0, 60))):
            acts[self.draw(st.integers(0, 3))]()
        self.sender.offer(self.end)
        for _ in range(200):
            self.sender.offer(self.end)
            for act in acts:
                act()


@given(
    data=st.data(),
    first=st.integers(0, 3),
    blocks=st.integers(0, 5),
    slot_bytes=st.sampled_from((SPEC.layer_bytes, SPEC.block_bytes, 2 * SPEC.block_bytes)),
    fates=st.sampled_from((("go",), ("go", "go", "damage", "damage number"), FATES)),
)
@settings(max_examples=300, deadline=None)
def test_exactly_once_and_right_or_both_ends_hold_nothing(data, first, blocks, slot_bytes, fates):
    end = first + blocks
    link = Link(data.draw, first, end, slot_bytes, fates)
    link.run()
    whole = Counter({(block, layer): 1 for block in range(first, end) for layer in range(SPEC.layers)})
    assert all(times == 1 for times in link.pool.values()), "a layer of a block was written twice"
    if link.receiver.state is HandoffState.COMMITTED:
        assert link.pool == whole
    if link.sender.state is HandoffState.COMMITTED:
        assert link.receiver.state is HandoffState.COMMITTED
    if fates == ("go",):
        assert link.sender.state is HandoffState.COMMITTED
        assert link.receiver.whole_blocks == end
    if link.receiver.state is not HandoffState.COMMITTED:
        link.receiver.lose()
        assert link.receiver.judge(FrameHeader(OPENING.key, 0, first, 1, 0, 1, 0, 1, SPEC.dtype)) is not Verdict.TAKE
