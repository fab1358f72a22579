"""Routing is a function of a snapshot: who is left out, what weighs more, and that equals take turns."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoy.core.pod_table import PodView
from kvoy.core.request_events import NoPodReason
from kvoy.core.routing import Need, NoRoute, Route, RoutingParams, choose_decode, choose_prefill
from kvoy.core.types import KvDtype, KvSpec, ModelInfo, Pod, PodLoad, PodState, Role

SPEC = KvSpec(30, 3, 64, 16, KvDtype.BF16)
MODEL = ModelInfo("m", "f1", 8192, 49152)
PARAMS = RoutingParams(decode_request_tokens=64, prefill_request_tokens=32)
NEED = Need("f1", prompt_tokens=160)


def view(
    pod_id: str,
    role: Role = Role.DECODE,
    *,
    running: int = 0,
    used: int = 0,
    total: int = 1000,
    usable: bool = True,
    model: ModelInfo | None = MODEL,
    spec: KvSpec | None = SPEC,
    own: int = 0,
    own_tokens: int = 0,
    tokens_waiting: int = 0,
) -> PodView:
    load = PodLoad(
        blocks_total=total, blocks_used_by_requests=used, requests_running=running, tokens_waiting=tokens_waiting
    )
    pod = Pod(pod_id, role, 1, f"{pod_id}:1", 1, PodState.READY, model, spec, load)
    return PodView(pod, 0.2, usable, own, own_tokens, 0)


def decode(views: list[PodView], need: Need = NEED, **matches: int) -> str | NoPodReason:
    route = choose_decode(views, need, matches, PARAMS)
    return route.pod_id if isinstance(route, Route) else route.reason


def prefill(views: list[PodView], need: Need = NEED, **matches: int) -> str | NoPodReason:
    route = choose_prefill(views, need, matches, SPEC, PARAMS)
    return route.pod_id if isinstance(route, Route) else route.reason


def test_the_longest_prefix_wins_among_equally_busy_pods() -> None:
    assert decode([view("a"), view("b"), view("c")], b=4, c=2) == "b"


def test_load_outweighs_a_short_prefix() -> None:
    assert decode([view("a", running=3), view("b")], a=2) == "b"
    assert decode([view("a", running=1), view("b")], a=5) == "a"


def test_a_pod_with_room_goes_before_one_without() -> None:
    assert decode([view("a", used=995), view("b", running=20)], a=10) == "b"


def test_own_placements_count_before_the_pod_reports_them() -> None:
    assert decode([view("a", own=2), view("b")]) == "b"


def test_pods_of_another_model_or_revision_are_left_out() -> None:
    other = ModelInfo("m", "f2", 8192, 49152)
    assert decode([view("a", model=other), view("b", running=30)]) == "b"
    route = choose_decode([view("a", model=other)], NEED, {}, PARAMS)
    assert isinstance(route, NoRoute)
    assert "another one or another revision" in route.message


def test_pods_that_are_not_usable_or_have_been_tried_are_left_out() -> None:
    assert decode([view("a", usable=False), view("b", running=9)]) == "b"
    assert decode([view("a"), view("b", running=9)], Need("f1", 160, exclude=("a",))) == "b"
    assert decode([view("a")], Need("f1", 160, exclude=("a",))) is NoPodReason.EXCLUDED
    assert decode([view("a", usable=False)]) is NoPodReason.ABSENT
    assert decode([]) is NoPodReason.ABSENT


def test_a_prompt_that_no_pool_can_hold_is_told_with_both_numbers() -> None:
    route = choose_decode([view("a", total=9), view("b", total=5)], NEED, {}, PARAMS)
    assert route == NoRoute(
        NoPodReason.TOO_LARGE, "The prompt has 160 tokens, but no decode pod has room for more than 144."
    )
    assert decode([view("a", total=9), view("b", total=10, running=50)]) == "b"


def test_a_pod_that_has_not_told_its_size_may_fit() -> None:
    assert decode([view("a", total=0)]) == "a"


def test_equals_take_turns_whatever_their_order() -> None:
    views = [view("a"), view("b"), view("c", running=1)]
    taken = [decode(views, Need("f1", 160, turn=turn)) for turn in range(4)]
    assert taken == ["a", "b", "a", "b"]
    assert [decode(views[::-1], Need("f1", 160, turn=turn)) for turn in range(4)] == taken


def test_prefill_goes_where_it_is_done_first() -> None:
    busy = view("a", Role.PREFILL, own=1, own_tokens=500)
    assert prefill([busy, view("b", Role.PREFILL)], a=9) == "b"
    assert prefill([view("a", Role.PREFILL, tokens_waiting=40), view("b", Role.PREFILL)], a=9) == "a"


def test_tokens_of_our_own_in_a_report_are_not_counted_twice() -> None:
    ours = view("a", Role.PREFILL, own_tokens=100, tokens_waiting=100)
    others = view("b", Role.PREFILL, tokens_waiting=150)
    assert prefill([ours, others]) == "a"


@pytest.mark.parametrize("wrong", [{"layers": 31}, {"kv_heads": 4}, {"head_dim": 32}, {"block_tokens": 24}])
def test_prefill_must_make_kv_that_the_decode_pod_can_take(wrong: dict[str, int]) -> None:
    other = replace(SPEC, **wrong)
    route = choose_prefill([view("a", Role.PREFILL, spec=other)], NEED, {}, SPEC, PARAMS)
    assert isinstance(route, NoRoute)
    assert route.message.startswith("No prefill pod makes KV that the decode pod can take (bf16 in blocks of 16 tokens")
    assert prefill([view("a", Role.PREFILL, spec=other), view("b", Role.PREFILL, own_tokens=10**6)]) == "b"


def test_of_equal_pods_one_whose_kv_needs_no_turning_goes_first() -> None:
    wide = replace(SPEC, block_tokens=32, dtype=KvDtype.FP32)
    assert prefill([view("a", Role.PREFILL, spec=wide), view("b", Role.PREFILL)]) == "b"
    assert prefill([view("a", Role.PREFILL, spec=wide), view("b", Role.PREFILL, own_tokens=1)]) == "a"


views_of_many = st.lists(
    st.builds(
        view,
        pod_id=st.sampled_from("abcdef"),
        running=st.integers(0, 5),
        used=st.integers(0, 1000),
        usable=st.booleans(),
        total=st.integers(0, 1000),
    ),
    unique_by=lambda each: each.pod.pod_id,
)


@given(
    views=views_of_many,
    matches=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 10)),
    turn=st.integers(0, 9),
    exclude=st.lists(st.sampled_from("abcdef"), max_size=3),
    seed=st.randoms(use_true_random=False),
)
def test_the_choice_does_not_depend_on_order_and_never_breaks_the_rules(views, matches, turn, exclude, seed) -> None:  # type: ignore[no-untyped-def]
    need = Need("f1", 160, tuple(exclude), turn)
    route = choose_decode(views, need, matches, PARAMS)
    shuffled = list(views)
    seed.shuffle(shuffled)
    assert choose_decode(shuffled, need, matches, PARAMS) == route
    if isinstance(route, Route):
        chosen = next(each for each in views if each.pod.pod_id == route.pod_id)
        assert chosen.usable
        assert route.pod_id not in exclude
