"""One story, and one fault in it, at every single moment: two prompts handed over, one prefilled here, few slots.

Where test_pair draws what happens, this tries all of it: after each event of the story comes a cancel, a cut, a
deadline, a damaged frame or payload, a renewal, a drain, a killed prefill pod. In one telling the decode pod's blocks
are twice as large and of bf16; in the other they are like the prefill pod's, which can have them back.
"""

import pytest

from kvoy.core import events as ev
from kvoy.core.decode import DecodeParams
from kvoy.core.prefill import PrefillParams
from tests.core.toy import SPEC, WIDE, request
from tests.core.world import World, damaged_header


def world(decode_spec):
    made = World(
        prefill_blocks=10,
        decode_spec=decode_spec,
        decode_blocks=64 // decode_spec.block_tokens,
        slots=2,
        use_store=True,
        prefill=PrefillParams(chunk_tokens=8, silence_s=20.0),
        decode=DecodeParams(chunk_tokens=8, max_batch=2, lease_s=10.0),
    )
    made.ask(request("a", 14, max_tokens=6, deadline=made.now + 500))
    made.ask(request("b", 21, first=3, max_tokens=5))
    made.ask(request("c", 9, max_tokens=7), local=True)
    return made


def play(world, moments):
    """So many events, lanes taking turns."""
    for moment in range(moments):
        names = world.choices()
        if not names:
            return False
        world.do(names[moment % len(names)])
    return True


def length(decode_spec):
    made, moments = world(decode_spec), 0
    while play(made, 1):
        moments += 1
    return moments


def damage_next(world):
    left = [2]

    def damage(header):
        left[0] -= 1
        return damaged_header(header) if left[0] >= 0 else None

    world.damage = damage


def spoil_next(world):
    left = [2]

    def spoil(_):
        left[0] -= 1
        return left[0] >= 0

    world.spoil = spoil


def cut_all(world, *, half=False):
    for number in list(world.streams):
        world.cut(number, half=half)


def cut_often(world):
    for seconds in (0.05, 0.3, 1.0):
        cut_all(world, half=True)
        world.advance(seconds)
        play(world, 7)


def kill_twice(world):
    world.kill_p()
    play(world, 12)
    world.kill_p()


def kill_and_spoil(world):
    left = [1]

    def spoil(_):
        left[0] -= 1
        return left[0] >= 0

    world.spoil_lent = spoil
    world.kill_p()


def kill_and_hear_nothing(world):
    world.lends = lambda _: False
    world.kill_p()


def kill_and_cut_fetches(world):
    world.kill_p()
    for _ in range(8):
        play(world, 3)
        for number in [*world.calls]:
            world.cut_call(number)


CANCELS = "kill and cancel"
FAULTS = {
    "none": lambda _: None,
    "cancel a": lambda world: world.cancel("a"),
    "cancel b": lambda world: world.cancel("b"),
    "cancel c": lambda world: world.cancel("c"),
    "cut": cut_all,
    "half cut": lambda world: cut_all(world, half=True),
    "cut often": cut_often,
    "spoil": spoil_next,
    "cut and spoil": lambda world: (cut_all(world), spoil_next(world)),
    "spoil, cut and renew": lambda world: (spoil_next(world), cut_all(world), world.renew("a"), world.renew("b")),
    "deadline": lambda world: world.advance(501),
    "silence": lambda world: world.advance(15),
    "damage": damage_next,
    "renew a": lambda world: world.renew("a"),
    "renew b": lambda world: world.renew("b"),
    "kill": lambda world: world.kill_p(),
    "kill twice": kill_twice,
    "kill, and spoil what is given back": kill_and_spoil,
    "kill, and nothing is given back": kill_and_hear_nothing,
    "kill, and cut what is given back": kill_and_cut_fetches,
    "kill and renew": lambda world: (world.kill_p(), play(world, 9), world.renew("a"), world.renew("b")),
    CANCELS: lambda world: (world.kill_p(), play(world, 9), world.cancel("a"), world.cancel("b")),
    "drain": lambda world: (world.to_p(ev.DrainAsked()), world.to_d(ev.DrainAsked())),
    "store away": lambda world: setattr(world, "store_is_away", True),
}


@pytest.mark.parametrize("decode_spec", [WIDE, SPEC], ids=["other blocks", "like blocks"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_moment_harms_nobody_else(fault, decode_spec):
    moments = length(decode_spec)
    assert moments > 55
    for moment in range(moments + 1):
        one = world(decode_spec)
        play(one, moment)
        FAULTS[fault](one)
        one.settle()
        one.assert_clean()
        if fault.startswith(("none", "cut", "half", "damage", "spoil", "renew", "store", "kill")) and fault != CANCELS:
            ends = [client.ends[0].value for client in one.clients.values()]
            assert ends == ["length"] * 3, f"at moment {moment}"
