"""What the router believes of pods: listed, told by themselves, suspected, and given by the router itself."""

import pytest

from kvoy.core.errors import InvariantError
from kvoy.core.pod_table import PodTable, PodView
from kvoy.core.types import LoadEvent, Pod, PodLoad, PodState, Role


def pod(pod_id: str = "d", generation: int = 1, state: PodState = PodState.READY, running: int = 0) -> Pod:
    load = PodLoad(requests_running=running)
    return Pod(pod_id, Role.DECODE, 1, f"{pod_id}:{generation}", generation, state, load=load)


def only(table: PodTable, now: float) -> PodView:
    (view,) = table.views(Role.DECODE, now)
    return view


def test_only_listed_ready_pods_of_the_role_are_usable() -> None:
    table = PodTable(suspect_s=3)
    table.list_all([pod("a"), pod("b", state=PodState.DRAINING)], 0)
    assert [(view.pod.pod_id, view.usable) for view in table.views(Role.DECODE, 0)] == [("a", True), ("b", False)]
    assert table.views(Role.PREFILL, 0) == ()
    table.list_all([pod("b")], 1)
    assert [view.pod.pod_id for view in table.views(Role.DECODE, 1)] == ["b"]


def test_load_has_an_age_and_comes_from_events_and_the_directory() -> None:
    table = PodTable(suspect_s=3)
    table.list_all([pod()], 0)
    table.list_all([pod()], 2)
    assert only(table, 2).age_s == 2
    table.load(LoadEvent("d", 1, PodLoad(requests_running=4)), 3)
    assert (only(table, 3.5).age_s, only(table, 3.5).requests) == (0.5, 4)
    table.list_all([pod(running=7)], 4)
    assert (only(table, 4).age_s, only(table, 4).requests) == (0, 7)


def test_load_of_strangers_and_of_another_start_is_not_believed() -> None:
    table = PodTable(suspect_s=3)
    table.list_all([pod(generation=2)], 0)
    table.load(LoadEvent("d", 1, PodLoad(requests_running=9)), 1)
    table.load(LoadEvent("x", 1, PodLoad(requests_running=9)), 1)
    assert only(table, 1).requests == 0


def test_own_requests_count_at_once_and_not_twice() -> None:
    table = PodTable(suspect_s=3)
    table.list_all([pod(running=5)], 0)
    table.place("d", 100)
    table.place("d", 50)
    assert (only(table, 0).requests, only(table, 0).own_tokens) == (7, 150)
    table.load(LoadEvent("d", 1, PodLoad(requests_running=7)), 1)
    assert only(table, 1).requests == 7
    table.remove("d", 100)
    assert (only(table, 1).requests, only(table, 1).own_tokens) == (6, 50)


def test_taking_back_more_than_was_given_is_a_bug() -> None:
    table = PodTable(suspect_s=3)
    table.list_all([pod()], 0)
    table.place("d", 10)
    table.remove("d", 10)
    with pytest.raises(InvariantError):
        table.remove("d", 10)


def test_a_suspect_pod_is_left_out_until_it_shows_itself() -> None:
    table = PodTable(suspect_s=3)
    table.list_all([pod()], 0)
    table.suspect("d", 1)
    table.suspect("nobody", 1)
    assert not only(table, 2).usable
    assert table.next_return(2) == 4
    table.load(LoadEvent("d", 1, PodLoad()), 2)
    assert only(table, 2).usable
    assert table.next_return(2) is None


def test_a_suspect_pod_is_believed_again_after_a_while_or_when_it_has_started_again() -> None:
    table = PodTable(suspect_s=3)
    table.list_all([pod()], 0)
    table.suspect("d", 1)
    assert only(table, 4).usable
    table.suspect("d", 5)
    table.list_all([pod(generation=2)], 5.5)
    assert only(table, 5.5).usable
    assert table.pod("d").address == "d:2"


def test_a_pod_that_left_is_remembered_while_it_works_for_us() -> None:
    table = PodTable(suspect_s=3)
    table.list_all([pod()], 0)
    table.place("d", 10)
    table.list_all([], 1)
    assert table.views(Role.DECODE, 1) == ()
    assert table.addresses == {"d:1"}
    table.remove("d", 10)
    assert table.addresses == frozenset()
