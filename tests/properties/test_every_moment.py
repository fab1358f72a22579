"""One story, and one fault in it, at every single moment: two prompts handed over, one prefilled here, few slots.

Where test_pair draws what happens, this tries all of it: after each event of the story comes a cancel, a cut, a
deadline, a damaged frame, a renewal, a drain.
"""

import pytest

from kvoy.core import events as ev
from kvoy.core.decode import DecodeParams
from kvoy.core.prefill import PrefillParams
from tests.core.toy import request
from tests.core.world import World, damaged_header


def world():
    made = World(
        prefill_blocks=10,
        decode_blocks=16,
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


def length():
    made, moments = world(), 0
    while play(made, 1):
        moments += 1
    return moments


def damage_next(world):
    left = [2]

    def damage(header):
        left[0] -= 1
        return damaged_header(header) if left[0] >= 0 else None

    world.damage = damage


def cut_all(world):
    for number in list(world.streams):
        world.cut(number)


FAULTS = {
    "none": lambda _: None,
    "cancel a": lambda world: world.cancel("a"),
    "cancel b": lambda world: world.cancel("b"),
    "cancel c": lambda world: world.cancel("c"),
    "cut": cut_all,
    "deadline": lambda world: world.advance(501),
    "silence": lambda world: world.advance(15),
    "damage": damage_next,
    "renew a": lambda world: world.renew("a"),
    "renew b": lambda world: world.renew("b"),
    "drain": lambda world: (world.to_p(ev.DrainAsked()), world.to_d(ev.DrainAsked())),
    "store away": lambda world: setattr(world, "store_is_away", True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_moment_harms_nobody_else(fault):
    moments = length()
    assert moments > 60
    for moment in range(moments + 1):
        one = world()
        play(one, moment)
        FAULTS[fault](one)
        one.settle()
        one.assert_clean()
        if fault in {"none", "cut", "damage", "renew a", "renew b", "store away"}:
            ends = [client.ends[0].value for client in one.clients.values()]
            assert ends == ["length"] * 3, f"at moment {moment}"
