"""The rules of a handoff: what each end may hear, how blocks become frames, who may send what."""

from dataclasses import replace
from itertools import product

import pytest

from kvoy.core.errors import ConfigError, InvariantError
from kvoy.core.frames import Ack, Commit, Committed, FrameHeader, HandoffKey, Nack, Opening, Refused, Welcome
from kvoy.core.handoff import TRANSITIONS, FrameSize, HandoffState, Lost
from kvoy.core.handoff_receiver import Receiver, Verdict
from kvoy.core.handoff_sender import Sender
from kvoy.core.landing import Landing
from kvoy.core.step import Sampled
from kvoy.core.types import KvDtype, TokenLogprob
from tests.core.toy import FINGERPRINT, SPEC

KEY = HandoffKey("r", 1)
OPENING = Opening(KEY, "lease-1", FINGERPRINT, SPEC)
FIRST = Sampled("r", 7, TokenLogprob(7, -0.5))
WHOLE = FrameSize(2, SPEC.layers)
LAYERS = FrameSize(1, 1)


def sender(*, state=HandoffState.STREAMING, size=WHOLE, first=0, end=4, credit=8, max_resends=2):
    made = Sender(OPENING, size, first, end, max_resends=max_resends)
    if state is not HandoffState.AWAY:
        made.open()
    if state not in {HandoffState.AWAY, HandoffState.OPENING}:
        made.hear(Welcome(credit, 0))
        made.offer(end)
    if state in {HandoffState.COMMITTING, HandoffState.COMMITTED}:
        cut(made)
        made.commit(FIRST, 1.0)
    if state is HandoffState.COMMITTED:
        made.hear(Committed())
    if state is HandoffState.ENDED:
        made.hear(Refused("no"))
    return made


def cut(sender):
    """All frames that may be sent now, sent."""
    frames = []
    while sender.has_frame:
        frames.append(sender.next_frame())
        sender.sent(frames[-1].seq)
    return frames


def receiver(*, first=0, end=4, slot_blocks=2, granted=8):
    landing = Landing(SPEC, SPEC, first * SPEC.block_tokens, end * SPEC.block_tokens)
    made = Receiver(OPENING, 1, slot_blocks * SPEC.block_bytes, landing)
    made.welcome()
    made.grant(granted)
    return made


def frame(seq, first_block=0, blocks=2, first_layer=0, layers=SPEC.layers):
    return FrameHeader(KEY, seq, first_block, blocks, first_layer, layers, 0, SPEC.kv_heads, SPEC.dtype)


# the tables


MESSAGES = [Welcome(1, 0), Ack(0, 1), Nack(0), Committed(), Refused("no")]


@pytest.mark.parametrize(("state", "message"), [*product(HandoffState, MESSAGES)], ids=str)
def test_a_sender_follows_its_table_and_calls_the_rest_a_breach(state, message):
    one = sender(state=state)
    if state is HandoffState.STREAMING:
        one.next_frame()
    heard = one.hear(message)
    if (state, type(message)) in TRANSITIONS and (state, type(message)) != (HandoffState.OPENING, Committed):
        assert not heard.breach
        assert one.state is TRANSITIONS[state, type(message)]
    else:
        assert heard.breach
        assert one.state is HandoffState.ENDED


def test_every_state_is_reached_and_only_the_last_ones_are_final():
    assert {HandoffState.AWAY, *TRANSITIONS.values()} == set(HandoffState)
    left = {state for state, _ in TRANSITIONS}
    assert set(HandoffState) - left == {HandoffState.COMMITTED, HandoffState.ENDED}


def test_only_an_end_with_a_stream_can_lose_it():
    with_stream = {state for state, what in TRANSITIONS if what is Refused}
    assert {state for state, what in TRANSITIONS if what is Lost} == with_stream
    with pytest.raises(InvariantError, match="Lost while away"):
        sender(state=HandoffState.AWAY).lose()


# how blocks become frames


def test_frames_are_as_large_as_a_slot():
    assert FrameSize.fitting(SPEC, SPEC.block_bytes) == FrameSize(1, SPEC.layers)
    assert FrameSize.fitting(SPEC, 3 * SPEC.block_bytes - 1) == FrameSize(2, SPEC.layers)
    assert FrameSize.fitting(SPEC, SPEC.block_bytes - 1) == FrameSize(1, SPEC.layers - 1)
    with pytest.raises(ConfigError, match="set slot_bytes to"):
        FrameSize.fitting(SPEC, SPEC.layer_bytes - 1)


def test_blocks_go_in_order_as_they_are_ready():
    one = Sender(OPENING, WHOLE, 1, 6, max_resends=2)
    one.open()
    one.hear(Welcome(8, 0))
    assert not one.has_frame
    one.offer(2)
    assert [(f.seq, f.first_block, f.blocks) for f in cut(one)] == [(0, 1, 1)]
    one.offer(1)
    assert not one.has_frame
    one.offer(6)
    assert [(f.seq, f.first_block, f.blocks) for f in cut(one)] == [(1, 2, 2), (2, 4, 2)]
    assert one.can_commit


def test_a_block_larger_than_a_slot_goes_layer_by_layer():
    one = sender(size=LAYERS, end=2)
    assert [(f.first_block, f.blocks, f.first_layer, f.layers) for f in cut(one)] == [
        (0, 1, 0, 1),
        (0, 1, 1, 1),
        (1, 1, 0, 1),
        (1, 1, 1, 1),
    ]


def test_what_decode_holds_is_not_sent():
    one = sender(first=4, end=4)
    assert not one.has_frame
    assert one.commit(FIRST, 2.5) == Commit(KEY, 0, 7, FIRST.logprob, 2.5)


# credits, acks, nacks


def test_a_sender_stays_within_its_credits():
    one = sender(end=8, credit=2)
    assert len(cut(one)) == 2
    assert one.hear(Ack(0, 2)).acked == (0,)
    assert len(cut(one)) == 1
    assert one.hear(Ack(0, 1)).acked == ()
    assert not one.has_frame
    assert one.hear(Ack(2, 5)).acked == (1, 2)
    assert len(cut(one)) == 1


def test_a_welcome_without_credit_may_be_followed_by_one_with_some():
    one = sender(credit=0)
    assert not one.has_frame
    assert not one.awaits_receiver
    one.hear(Welcome(1, 0))
    assert one.has_frame


def test_a_damaged_frame_is_sent_again_but_not_for_ever():
    one = sender(max_resends=2)
    first, _ = cut(one)
    for _ in range(2):
        assert one.hear(Nack(0)).resend == first
    assert "damaged 3 times" in one.hear(Nack(0)).breach


def test_a_nack_of_nothing_in_flight_is_ignored():
    one = sender()
    cut(one)
    one.hear(Ack(0, 8))
    assert one.hear(Nack(0)).resend is None
    assert one.hear(Nack(77)).resend is None
    assert one.state is HandoffState.STREAMING


@pytest.mark.parametrize("message", [Ack(2, 1), Welcome(3, 5)])
def test_a_receiver_that_cannot_be_right_ends_the_handoff(message):
    one = sender()
    cut(one)
    assert one.hear(message).breach
    assert one.state is HandoffState.ENDED


def test_commit_waits_for_the_transport_to_take_the_last_frame():
    one = sender(end=2)
    header = one.next_frame()
    assert not one.can_commit
    with pytest.raises(InvariantError, match="before its last frame"):
        one.commit(FIRST, 1.0)
    one.sent(header.seq)
    assert one.commit(FIRST, 1.0).frames == 1


def test_committed_acknowledges_everything():
    one = sender(state=HandoffState.COMMITTING)
    assert one.hear(Committed()).acked == (0, 1)


def test_a_frame_without_credit_is_a_bug_of_ours():
    with pytest.raises(InvariantError, match="may not send"):
        sender(credit=0).next_frame()


# what a receiver takes


def take(one, *headers):
    for header in headers:
        assert one.judge(header) is Verdict.TAKE
        one.take(header)
        one.imported(header)


def test_each_layer_of_each_block_is_taken_once():
    one = receiver()
    take(one, frame(0), frame(1, 2))
    assert one.judge(frame(0)) is Verdict.DUPLICATE
    assert one.judge(frame(2)) is Verdict.INVALID
    assert (one.missing_layers, one.whole_blocks, one.through_seq) == (0, 4, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_block": 3},
        {"first_block": 0, "blocks": 3},
        {"blocks": 0},
        {"layers": 0},
        {"first_layer": 1},
        {"first_layer": -1},
        {"layers": SPEC.layers + 1},
        {"heads": SPEC.kv_heads + 1},
        {"first_head": 1},
        {"dtype": KvDtype.BF16},
        {"seq": 8},
        {"seq": -1},
        {"key": HandoffKey("r", 2)},
        {"key": HandoffKey("other", 1)},
    ],
    ids=str,
)
def test_a_frame_that_does_not_fit_is_invalid(wrong):
    assert receiver(end=4).judge(frame(0, 2)) is Verdict.TAKE
    assert receiver(end=4).judge(replace(frame(0, 2), **wrong)) is Verdict.INVALID


def test_blocks_that_are_held_are_not_taken():
    assert receiver(first=1).judge(frame(0, 0)) is Verdict.INVALID
    assert receiver(first=1).judge(frame(0, 1)) is Verdict.TAKE


def test_layers_of_a_block_may_come_in_parts():
    one = receiver(end=1)
    take(one, frame(0, blocks=1, layers=1))
    assert (one.whole_blocks, one.missing_layers) == (0, 1)
    assert one.judge(frame(1, blocks=1)) is Verdict.INVALID
    take(one, frame(1, blocks=1, first_layer=1, layers=1))
    assert one.whole_blocks == 1


def test_frames_may_overtake_but_acks_are_contiguous():
    one = receiver(end=6)
    one.take(frame(0))
    assert one.take(frame(2, 4)) == (1,)
    one.imported(frame(2, 4))
    assert (one.through_seq, one.whole_blocks) == (-1, 0)
    one.imported(frame(0))
    assert (one.through_seq, one.whole_blocks) == (0, 2)
    assert one.take(frame(1, 2)) == ()
    one.imported(frame(1, 2))
    assert (one.through_seq, one.whole_blocks) == (2, 6)


def test_a_damaged_frame_is_asked_for_again_if_its_number_can_be_believed():
    one = receiver(end=6)
    assert one.damaged(0)
    assert one.damaged(0)
    assert one.damaged(1)
    assert not one.damaged(5)
    take(one, frame(0))
    assert not one.damaged(0)
    assert not one.damaged(-1)
    assert one.take(frame(2, 4)) == ()


def test_the_commit_may_come_before_the_last_frames():
    one = receiver()
    take(one, frame(0))
    assert one.hear_commit(Commit(KEY, 2, 7, None, 1.0)) == (Verdict.TAKE, (1,))
    assert not one.has_all_frames
    one.take(frame(1, 2))
    assert one.has_all_frames
    assert not one.is_complete
    one.imported(frame(1, 2))
    assert one.is_complete
    assert one.say(Committed()) == Committed()
    assert one.state is HandoffState.COMMITTED
    assert not one.is_open


def test_what_the_commit_asked_for_is_not_asked_for_twice():
    one = receiver()
    assert one.hear_commit(Commit(KEY, 2, 7, None, 1.0)) == (Verdict.TAKE, (0, 1))
    assert one.take(frame(1, 2)) == ()
    assert one.damaged(0)


def test_a_commit_comes_once():
    one = receiver()
    commit = Commit(KEY, 2, 7, None, 1.0)
    one.hear_commit(commit)
    assert one.hear_commit(commit) == (Verdict.DUPLICATE, ())
    assert one.hear_commit(replace(commit, first_token_id=8)) == (Verdict.INVALID, ())


@pytest.mark.parametrize("frames", [1, 9])
def test_a_commit_of_fewer_frames_than_came_or_more_than_may_is_invalid(frames):
    one = receiver()
    take(one, frame(0), frame(1, 2))
    assert one.hear_commit(Commit(KEY, frames, 7, None, 1.0))[0] is Verdict.INVALID


def test_all_frames_without_all_blocks_is_hopeless():
    one = receiver()
    take(one, frame(0))
    one.hear_commit(Commit(KEY, 1, 7, None, 1.0))
    assert one.is_hopeless
    assert not one.is_complete


def test_unclaimed_credits_are_what_may_still_come():
    one = receiver(granted=3)
    one.take(frame(0))
    assert one.unclaimed == 2
    one.hear_commit(Commit(KEY, 2, 7, None, 1.0))
    assert one.unclaimed == 1


def test_a_lost_stream_brings_nothing_more():
    one = receiver()
    one.lose()
    assert one.judge(frame(0)) is Verdict.INVALID
    assert not one.damaged(0)
    with pytest.raises(InvariantError, match="does not want"):
        one.take(frame(0))
    with pytest.raises(InvariantError, match="Refused while away"):
        one.say(Refused("late"))
