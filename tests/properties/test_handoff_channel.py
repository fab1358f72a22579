"""A Sender and a Receiver over a channel that loses, delays, doubles, reorders, damages and breaks: exactly once and
right, or nothing.

Worse than any transport of ours, which keeps order or breaks. A stream may break at any moment, for one end before the
other; then another one goes on, while what was on the old one may still arrive. When nothing moves any more both ends
give up, as their times would make them. Blocks of the two ends need not be of one size.
"""

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvoy.core.frames import Ack, Committed, FrameHeader, HandoffKey, Nack, Opening, Refused, Welcome
from kvoy.core.handoff import FrameSize, HandoffState
from kvoy.core.handoff_receiver import Receiver, Verdict
from kvoy.core.handoff_sender import Sender
from kvoy.core.landing import Landing
from kvoy.core.step import Sampled
from tests.core.toy import FINGERPRINT, SPEC, WIDE

CALM = ("go",)
DAMAGE = ("go", "go", "damage", "spoil")
BREAKS = ("go", "go", "go", "go", "break", "break late", "spoil")
FATES = (*BREAKS, "lose", "double", "damage", "damage number", "overtake")
LAST = {HandoffState.COMMITTED, HandoffState.ENDED}


class Link:
    """Both ends and what is between them."""

    def __init__(self, draw, landing, slot_bytes, fates):
        self.draw = draw
        self.fates = fates
        self.landing = landing
        self.end = landing.blocks.stop
        opening = Opening(HandoffKey("r", 1), "lease-1", FINGERPRINT, landing.sender)
        size = FrameSize.fitting(landing.sender, slot_bytes)
        self.sender = Sender(opening, size, landing.blocks.start, self.end, max_resends=100)
        self.receiver = Receiver(self.sender.open(), 1, slot_bytes, landing)
        self.stream = 1
        self.slot_bytes = slot_bytes
        self.to_receiver, self.to_sender = [], []
        self.imports = []
        self.pool = Counter()
        self.welcome()

    def say(self, message):
        said = self.receiver.say(message)
        if self.receiver.stream == self.stream and self.sender.has_stream:
            self.to_sender.append(said)

    def welcome(self):
        """Once what came before is in the pool; or the last word, if that was all."""
        if self.receiver.state is not HandoffState.OPENING or self.imports:
            return
        if self.receiver.is_complete:
            self.say(Committed())
            return
        self.receiver.welcome()
        self.receiver.grant(2)
        self.tell()

    def tell(self):
        through = self.receiver.through_seq
        credit = self.receiver.granted - through - 1
        self.say(Ack(through, credit) if through >= self.receiver.base else Welcome(credit, self.receiver.base))

    def send(self, what):
        fate = self.draw(st.sampled_from(self.fates))
        damaged = isinstance(what, FrameHeader)
        arrives = (self.stream, what, "whole")
        match fate:
            case "lose":
                return
            case "double":
                self.to_receiver += [arrives, arrives]
            case "damage" if damaged:
                self.to_receiver.append((self.stream, what, "damaged"))
            case "damage number" if damaged:
                wrong = replace(what, seq=self.draw(st.integers(0, 9)))
                self.to_receiver.append((self.stream, wrong, "damaged"))
            case "spoil" if damaged:
                self.to_receiver.append((self.stream, what, "spoilt"))
            case "overtake":
                self.to_receiver.insert(0, arrives)
            case "break" | "break late":
                self.cut(is_late=fate == "break late")
            case _:
                self.to_receiver.append(arrives)

    def cut(self, *, is_late):
        """``is_late``: what is on its way arrives all the same, after the next opening or before it."""
        if not self.sender.has_stream:
            return
        self.to_sender = []
        if not is_late:
            self.to_receiver = []
            if self.receiver.has_stream:
                self.receiver.lose()
        self.sender.lose()

    def reopen(self):
        if self.sender.state is HandoffState.AWAY:
            self.stream += 1
            at = 0 if self.draw(st.booleans()) else len(self.to_receiver)
            self.to_receiver.insert(at, (self.stream, self.sender.open(), "whole"))

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

    def receiver_hears(self):
        if not self.to_receiver:
            return
        stream, what, how = self.to_receiver.pop(0)
        if isinstance(what, Opening):
            self.opened(stream, what)
        elif stream != self.receiver.stream or not self.receiver.has_stream:
            return
        elif how == "damaged":
            if self.receiver.damaged(what.seq):
                self.say(Nack(what.seq))
        elif isinstance(what, FrameHeader):
            self.frame(what, how)
        else:
            verdict, skipped = self.receiver.hear_commit(what)
            if verdict is Verdict.INVALID:
                self.say(Refused("commit"))
            else:
                self.nack(skipped)
        self.close()

    def opened(self, stream, opening):
        if self.receiver.state is HandoffState.COMMITTED and stream == self.stream:
            self.to_sender.append(Committed())
        elif self.receiver.state not in LAST and opening.attempt > self.receiver.opening.attempt:
            if self.receiver.has_stream:
                self.receiver.lose()
            self.receiver.reopen(opening, stream)
            self.welcome()

    def frame(self, header, how):
        match self.receiver.judge(header):
            case Verdict.TAKE:
                self.nack(self.receiver.take(header))
                self.imports.append((header, how))
            case Verdict.INVALID:
                self.say(Refused("frame"))

    def nack(self, seqs):
        for seq in seqs:
            self.say(Nack(seq))

    def import_one(self):
        if not self.imports:
            return
        header, how = self.imports.pop(self.draw(st.integers(0, len(self.imports) - 1)))
        if how == "spoilt":
            if self.receiver.untake(header):
                self.say(Nack(header.seq))
        else:
            self.write(header)
            self.receiver.imported(header)
            if self.receiver.is_open:
                self.receiver.grant(1 if self.receiver.commit is None else 0)
                self.tell()
        self.welcome()
        self.close()

    def write(self, header):
        """Which tokens of which layers of our own blocks the frame fills."""
        blocks, run = self.landing.place(header)
        own = self.landing.own.block_tokens
        at, skip, size = 0, 0, len(blocks) * own
        if run is not None:
            at, skip, size = run.first_token, run.skip_tokens, run.blocks * run.block_tokens
        for token in range(skip, size):
            if 0 <= at + token < len(blocks) * own and blocks.start * own + at + token < self.landing.prompt_tokens:
                for layer in range(header.first_layer, header.first_layer + header.layers):
                    self.pool[blocks.start * own + at + token, layer] += 1

    def close(self):
        if self.receiver.is_open and self.receiver.is_complete:
            self.say(Committed())
        elif self.receiver.is_open and self.receiver.is_hopeless:
            self.say(Refused("hopeless"))

    def run(self):
        acts = [self.sender_acts, self.sender_hears, self.receiver_hears, self.import_one, self.reopen]
        for _ in range(self.draw(st.integers(0, 60))):
            acts[self.draw(st.integers(0, 4))]()
        self.fates = ("go",) if self.fates in {DAMAGE, BREAKS} else self.fates
        for _ in range(200):
            self.sender.offer(self.end)
            for act in acts:
                act()


@given(
    data=st.data(),
    first=st.integers(0, 3),
    tokens=st.integers(0, 21),
    sender=st.sampled_from((SPEC, SPEC, WIDE)),
    own=st.sampled_from((SPEC, SPEC, WIDE)),
    slot_bytes=st.sampled_from((SPEC.layer_bytes, SPEC.block_bytes, 2 * SPEC.block_bytes)),
    fates=st.sampled_from((CALM, DAMAGE, BREAKS, FATES)),
)
@settings(max_examples=400, deadline=None)
def test_exactly_once_and_right_or_both_ends_hold_nothing(*, data, first, tokens, sender, own, slot_bytes, fates):
    held_tokens = first * own.block_tokens
    landing = Landing(sender, own, held_tokens, held_tokens + tokens)
    link = Link(data.draw, landing, slot_bytes, fates)
    link.run()
    layers = range(SPEC.layers)
    whole = Counter({(at, layer): 1 for at in range(held_tokens, landing.prompt_tokens) for layer in layers})
    assert all(times == 1 for times in link.pool.values()), "a layer of a token was written twice"
    assert link.pool <= whole, "what is held or nobody's was written"
    if link.receiver.state is HandoffState.COMMITTED:
        assert link.pool == whole
        assert link.receiver.whole_tokens == landing.prompt_tokens
    if link.sender.state is HandoffState.COMMITTED:
        assert link.receiver.state is HandoffState.COMMITTED
    if fates != FATES:
        assert link.sender.state is HandoffState.COMMITTED, "damage and broken streams are no obstacle"
    if link.receiver.state is not HandoffState.COMMITTED:
        if link.receiver.has_stream:
            link.receiver.lose()
        header = FrameHeader(link.sender.key, 0, landing.blocks.start, 1, 0, 1, 0, 1, sender.dtype)
        assert link.receiver.judge(header) is not Verdict.TAKE
