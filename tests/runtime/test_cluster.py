"""The plan of a local cluster: who gets which core, which address, and who finds it."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from kvoy.core.errors import ConfigError
from kvoy.core.types import Role
from kvoy.runtime import cluster, cluster_files
from kvoy.runtime.cluster import (
    Cluster,
    ClusterPlan,
    check_free,
    check_pools,
    check_reachable,
    said_when_slow,
    share_cores,
)
from kvoy.runtime.cluster_files import ClusterRecord


@pytest.mark.parametrize(
    ("cores", "prefill", "decode", "expected"),
    [
        (2, 1, 1, ([1], [1])),
        (3, 1, 1, ([2], [1])),
        (8, 1, 1, ([4], [4])),
        (7, 2, 2, ([2, 2], [2, 1])),
        (1, 2, 2, ([1, 1], [1, 1])),
        (4, 0, 1, ([], [4])),
    ],
)
def test_cores_are_shared_out_and_the_odd_one_goes_to_prefill(cores, prefill, decode, expected):
    assert share_cores(cores, prefill, decode) == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_pods_with_an_engine_are_told_to_be_deterministic(tmp_path, deterministic):
    plan = ClusterPlan("m", "fp32", "auto", 2, 1, True, "h:1", "g:1", tmp_path, deterministic=deterministic, cores=2)
    told = {name: flags for _, name, flags in Cluster(plan, print, {})._pod_list()}
    assert told.pop("kvstore-0") == {}
    assert sorted(told) == ["decode-0", "prefill-0", "prefill-1"]
    assert {flags.get("deterministic") for flags in told.values()} == {"true" if deterministic else None}


@pytest.mark.parametrize(("overrides", "shared"), [({}, "false"), ({Role.DECODE: {"threads": "2"}}, "true")])
def test_pods_are_told_that_cores_are_shared_when_somebody_chose_the_threads(tmp_path, overrides, shared):
    plan = ClusterPlan("m", "fp32", "auto", 1, 1, True, "h:1", "g:1", tmp_path, overrides=overrides, cores=4)
    told = {name: flags for _, name, flags in Cluster(plan, print, {})._pod_list()}
    assert {told[name]["cores_shared"] for name in ("decode-0", "prefill-0")} == {shared}


def test_an_address_is_free_or_the_reason_is_said():
    check_free("127.0.0.1:0", "--http")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose another with --http"):
            check_free(f"127.0.0.1:{taken.getsockname()[1]}", "--http")
    for nonsense in ("nonsense", "127.0.0.1:", "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            check_free(nonsense, "--grpc")
    with pytest.raises(ConfigError, match="cannot be used"):
        check_free("203.0.113.1:0", "--grpc")


async def test_a_url_is_reachable_or_the_reason_is_said():
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await check_reachable(f"redis://127.0.0.1:{port}/0", "--redis-url")
    server.close()
    await server.wait_closed()
    with pytest.raises(ConfigError, match="cannot be reached"):
        await check_reachable(f"redis://127.0.0.1:{port}/0", "--redis-url")
    for nonsense in ("127.0.0.1:1", "redis", "http://127.0.0.1"):
        with pytest.raises(ConfigError, match="must be a URL"):
            await check_reachable(nonsense, "--redis-url")


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "run"


def record_of(data_dir: Path, started_at: float = 1.0) -> ClusterRecord:
    pid = 1000 + int(started_at)
    return ClusterRecord(pid, "h:1", "g:2", "m", str(data_dir), temporary=True, started_at=started_at)


def test_a_record_is_found_and_taken_back(tmp_path, folder):
    record = replace(record_of(tmp_path / "data"), temporary=False)
    with cluster_files.claimed(tmp_path / "data"):
        cluster_files.write(record, folder)
        assert cluster_files.running(folder) == [record]
        assert cluster_files.read(tmp_path / "data" / "cluster.json") == record
        cluster_files.remove(record, folder)
        assert cluster_files.running(folder) == []
    assert (tmp_path / "data").exists()


def test_the_newest_comes_first(tmp_path, folder):
    older, newer = record_of(tmp_path / "old", 1.0), record_of(tmp_path / "new", 2.0)
    with cluster_files.claimed(tmp_path / "old"), cluster_files.claimed(tmp_path / "new"):
        cluster_files.write(newer, folder)
        cluster_files.write(older, folder)
        assert cluster_files.running(folder) == [newer, older]


def test_pools_that_do_not_fit_together_are_refused_at_once(tmp_path):
    plan = ClusterPlan("m", "fp32", "auto", 2, 1, True, "h:1", "g:1", tmp_path)
    overrides = {Role.DECODE: {"pool_bytes": "14GiB"}, Role.PREFILL: {"pool_bytes": "5GiB"}}
    with pytest.raises(ConfigError, match=r"pools of 3 pods take 24.0 GiB together, but 23.0 GiB .* decode.pool_bytes"):
        check_pools(replace(plan, overrides=overrides), 23 << 30)
    check_pools(replace(plan, overrides=overrides), 24 << 30)
    check_pools(replace(plan, overrides=overrides), None)
    with pytest.raises(ConfigError, match=r"3\.0 GiB together"):
        check_pools(plan, 2 << 30)
    for said_by_the_pod in ("900GB", "lots"):
        check_pools(replace(plan, overrides={Role.DECODE: {"pool_bytes": said_by_the_pod}}), 23 << 30)


async def test_a_pod_that_loads_for_long_is_spoken_of_once(monkeypatch):
    monkeypatch.setattr(cluster, "_SLOW_S", 0.01)
    told: list[str] = []
    with said_when_slow(told.append, "decode-0"):
        await asyncio.sleep(0.05)
    with said_when_slow(told.append, "decode-1"):
        pass
    await asyncio.sleep(0.05)
    assert len(told) == 1
    assert told[0].startswith("decode-0 is still loading")


def test_what_a_dead_cluster_left_is_swept_away(tmp_path, folder):
    with cluster_files.claimed(tmp_path / "data"):
        cluster_files.write(record_of(tmp_path / "data"), folder)
    assert cluster_files.running(folder) == []
    assert list(folder.iterdir()) == []
    assert not (tmp_path / "data").exists()


def test_only_a_folder_that_says_it_was_the_clusters_is_swept_away(tmp_path, folder):
    with cluster_files.claimed(tmp_path / "data"):
        cluster_files.write(record_of(tmp_path / "data"), folder)
    (tmp_path / "data" / "cluster.json").unlink()
    assert cluster_files.running(folder) == []
    assert (tmp_path / "data").exists()


def test_a_data_folder_has_one_owner(tmp_path, folder):
    with cluster_files.claimed(tmp_path / "data"):
        with pytest.raises(ConfigError, match="in use by another cluster that is starting"):
            cluster_files.claimed(tmp_path / "data").__enter__()
        cluster_files.write(record_of(tmp_path / "data"), folder)
        with pytest.raises(ConfigError, match="in use by the cluster of process 1001"):
            cluster_files.claimed(tmp_path / "data").__enter__()
    with cluster_files.claimed(tmp_path / "data"):
        pass


def test_a_file_that_makes_no_sense_is_passed_over(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "cluster-1.json").write_text("{")
    (folder / "cluster-2.json").write_text('{"pid": 2}')
    assert cluster_files.running(folder) == []


def test_the_state_folder_is_the_users(monkeypatch, tmp_path):
    assert cluster_files.state_dir({"XDG_RUNTIME_DIR": "/run/user/1"}).as_posix() == "/run/user/1/kvoy"
    monkeypatch.setenv("KVOY_CACHE", str(tmp_path))
    assert cluster_files.state_dir({}) == tmp_path / "run"
