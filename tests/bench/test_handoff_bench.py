"""What the handoff bench promises, how its ratios are judged, the order of a run, and that each kind of pair moves."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bench import handoff, handoff_pairs, handoff_run
from bench.handoff import main, make_report
from bench.handoff_pairs import MemoryPair, PodPair, start_pair
from bench.handoff_run import Plan, run
from bench.handoff_work import (
    COPIES,
    MOONCAKE,
    NIXL_PEER,
    PEER_WAYS,
    RAW_TCP,
    TOKEN_BYTES,
    TRANSPORTS,
    Load,
    Program,
    Sample,
    Way,
    promises,
    ways_of,
)
from bench.machine import usable_cores
from bench.peers import install
from bench.peers.process import DriverSet
from bench.peers.recipes import PythonRecipe
from kvoy.core.errors import ConfigError, PeerError
from kvoy.core.wire import WirePolicy
from tests.bench.test_report import MACHINE

LOAD = Load(prompt_tokens=64, requests=2)
MORE = Load(prompt_tokens=1024, requests=2)
"""More frames than slots."""
CORES = usable_cores()
CONSOLE = Console(file=StringIO())


def bounds(transport: str) -> dict[tuple[str, str], float]:
    found = promises([transport], promised_only=True)
    return {(promise.way.name, promise.against.name): promise.target.bound for promise in found}


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_what_goes_over_tcp_is_held_to_the_same_three_bounds(transport):
    assert bounds(transport) == {
        (transport, MOONCAKE.name): 0.9,
        (transport, RAW_TCP.name): 0.4,
        (f"{transport}, int8 on the wire", MOONCAKE.name): 1.7,
    }


def test_shared_memory_is_held_to_that_of_nixl():
    assert bounds("shm") == {("shm", NIXL_PEER.name): 1.0}
    assert bounds("nixl") == {}


def test_every_way_is_started_once_and_without_nixl_none_of_it():
    every = promises([transport.name for transport in TRANSPORTS], promised_only=False)
    ways = ways_of(every)
    assert len(set(ways)) == len(ways) == len({way.name for way in ways})
    assert set(PEER_WAYS) < set(ways)
    left = ways_of(promises(["tcp", "shm"], promised_only=False))
    assert {way.transport for way in left if way not in PEER_WAYS} == {"tcp", "shm"}
    assert {way.program for way in left if way not in PEER_WAYS} == {Program.KVOY, Program.PODS}
    assert {transport.name for transport in TRANSPORTS} < set(COPIES)


@pytest.mark.parametrize(("words", "named"), [("tcp,carrier-pigeon", "'carrier-pigeon'"), ("", "''")])
def test_a_transport_that_kvoy_does_not_have_is_said(capsys, words, named):
    with pytest.raises(SystemExit):
        main(["--transports", words])
    assert f"there is no transport {named}; use tcp, grpc, shm, nixl" in capsys.readouterr().err


def test_ratios_are_of_the_round_and_int8_is_counted_in_tokens():
    found = promises(["tcp"], promised_only=True)
    plan = Plan(ways_of(found), LOAD, CORES, 2, 1)
    seconds = {MOONCAKE.name: 2.0, RAW_TCP.name: 1.0, NIXL_PEER.name: 1.0, "tcp": 2.0, "tcp, int8 on the wire": 1.25}
    samples = [
        Sample(way, number, (seconds[way.name] * slowness,), 0.2)
        for number, slowness in ((2, 3.0), (1, 1.0))
        for way in plan.ways
    ]
    report = make_report(plan, found, samples, MACHINE)
    peers, ours = report.lines[:3], report.lines[3:]
    assert [line.what for line in peers] == [way.name for way in PEER_WAYS]
    assert [(line.ratio, line.is_held) for line in ours] == [
        (pytest.approx(1.0), True),
        (pytest.approx(0.5), True),
        (pytest.approx(1.6), False),
    ]
    mean_slowness = (1 + 1 / 3) / 2
    assert ours[0].value == pytest.approx(LOAD.tokens * TOKEN_BYTES / 2e9 * mean_slowness)
    assert (ours[2].unit, ours[2].value) == ("KV tok/s", pytest.approx(LOAD.tokens / 1.25 * mean_slowness))
    said = " ".join(report.notes)
    assert "The machine was busy" in said
    assert "tcp 1 + 1, grpc 3 + 4, shm 0 + 1" in said


class FakePair:
    """Moves at once; knows when it was asked to."""

    pids: tuple[int, ...] = ()

    def __init__(self, way: Way, moved: list[Way]) -> None:
        self._way, self._moved = way, moved
        self.closed = 0

    def move(self, repeats: int) -> list[float]:
        self._moved.append(self._way)
        return [0.5] * repeats

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


def test_a_run_goes_round_among_all_ways_writes_and_judges(monkeypatch, tmp_path, capsys):
    moved: list[Way] = []
    pairs: list[FakePair] = []

    def start(way: Way, *_: object) -> FakePair:
        pairs.append(FakePair(way, moved))
        return pairs[-1]

    monkeypatch.setattr(handoff_run, "start_pair", start)
    monkeypatch.setattr(handoff_run, "wait_quiet", lambda *_: None)
    monkeypatch.setattr(handoff_run, "foreign_share", lambda *_: 0.0)
    path = tmp_path / "handoff.json"
    assert main(["--transports", "tcp,shm", "--rounds", "2", "--json", str(path), "--check"]) == 1
    ways = list(ways_of(promises(["tcp", "shm"], promised_only=False)))
    count = len(ways)
    assert moved == [*ways, *ways[1:], ways[0], *ways[2:], *ways[:2]]
    assert [pair.closed for pair in pairs] == [1] * count
    content = json.loads(path.read_text())
    assert {sample["way"] for sample in content["samples"]} == {way.name for way in ways}
    held = {(line["what"], line["against"]): line["is_held"] for line in content["lines"]}
    assert held["tcp", MOONCAKE.name]
    assert held["tcp, int8 on the wire", MOONCAKE.name] is False  # as fast as the others is not 1.7 times as fast
    assert "3 of 4 targets held" in capsys.readouterr().out


def test_what_was_disturbed_is_measured_again_and_the_least_disturbed_kept(monkeypatch):
    shares = iter([0.5, 0.3, 0.9, 0.05])
    monkeypatch.setattr(handoff_run, "start_pair", lambda way, *_: FakePair(way, []))
    monkeypatch.setattr(handoff_run, "wait_quiet", lambda *_: None)
    monkeypatch.setattr(handoff_run, "foreign_share", lambda *_: next(shares))
    samples = run(Plan((RAW_TCP,), LOAD, CORES, 2, 3), CONSOLE)
    assert [sample.foreign_share for sample in samples] == [0.3, 0.05]


def test_bytes_over_one_connection_arrive_and_what_did_not_is_noticed():
    with DriverSet() as drivers:
        pair = MemoryPair(RAW_TCP, LOAD, CORES, drivers, CONSOLE)
        with pytest.raises(PeerError, match="what arrived is not what was sent"):
            pair.check()
        assert len(pair.move(2)) == len(pair.pids) == 2
        pair.check()


@pytest.mark.parametrize(
    ("transport", "wire", "streams"),
    [
        ("tcp", WirePolicy.RAW, 1),
        ("tcp", WirePolicy.INT8, 1),
        ("grpc", WirePolicy.RAW, 2),
        ("grpc", WirePolicy.INT8, 1),
        ("shm", WirePolicy.RAW, 1),
    ],
)
def test_a_transport_alone_moves_everything_from_memory_to_memory(transport, wire, streams):
    with DriverSet() as drivers:
        pair = start_pair(Way(transport, Program.KVOY, transport, wire, streams), MORE, CORES, drivers, CONSOLE)
        assert isinstance(pair, MemoryPair)
        with pytest.raises(PeerError, match="what arrived is not what was sent"):
            pair.check()
        pair.move(2)
        pair.check()


@pytest.mark.parametrize("wire", WirePolicy)
def test_two_pods_hand_over_what_was_asked_for(wire):
    with DriverSet() as drivers:
        pair = start_pair(Way("tcp", Program.PODS, "tcp", wire), LOAD, CORES, drivers, CONSOLE)
        assert isinstance(pair, PodPair)
        try:
            assert all(seconds > 0 for seconds in pair.move(2))
            pair.check()
        finally:
            pair.close()


def test_pods_that_do_not_hand_over_are_waited_for_no_longer_than_so_long(monkeypatch):
    monkeypatch.setattr(handoff_pairs, "_MOVE_S", 0.0)
    with DriverSet() as drivers:
        pair = PodPair(Way("tcp", Program.PODS, "tcp"), LOAD, CORES, drivers)
        try:
            with pytest.raises(PeerError, match="did not hand over within 0 s"):
                pair.move(1)
        finally:
            pair.close()


def test_libraries_of_debian_are_found_where_they_were_unpacked(tmp_path):
    assert install.library_path(tmp_path) == ""
    for folder in ("usr/lib/x", "lib/y"):
        (tmp_path / "debian" / folder).mkdir(parents=True)
        (tmp_path / "debian" / folder / "libz.so.1").touch()
    assert install.library_path(tmp_path) == f"{tmp_path}/debian/lib/y:{tmp_path}/debian/usr/lib/x"


def test_where_nothing_can_be_unpacked_it_is_said(monkeypatch):
    monkeypatch.setattr(install.shutil, "which", lambda _: None)
    recipe = PythonRecipe("peer", "1", (), "peer", "1 MB", debian=("libz1",))
    with pytest.raises(ConfigError, match="needs libraries of Debian's packages libz1"):
        install._unpack_debian(recipe, Path("nowhere"), CONSOLE)


def test_nixl_is_left_out_where_its_package_is_not_there(monkeypatch):
    monkeypatch.setattr(handoff, "find_spec", lambda _: None)
    assert handoff._available() == ("tcp", "grpc", "shm")
