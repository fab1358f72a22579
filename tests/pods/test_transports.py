"""By what KV goes between a prefill and a decode pod that are told several ways, and what happens where one fails."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvoy.core.errors import ConfigError
from kvoy.core.frames import Opening
from kvoy.runtime.config import parse
from kvoy.transport import shm
from kvoy.transport.shm import ShmLink, ShmSources
from services.prefill.config import PrefillConfig
from tests.pods.cluster import Cluster, RunningPod, ask, cluster, sentence
from tests.pods.test_serving import prompt
from tests.pods.toy_engine import SPEC, continuation
from tests.transport.handlers import until
from tests.transport.transports import WAYS

_starts = itertools.count()
SENT, RECEIVED = "kvoy_prefill_sent_bytes", "kvoy_decode_received_bytes"


async def went_by(pods: Cluster, prefill: RunningPod, decode: RunningPod, length: int = 60) -> Sequence[str]:
    """The transports of one more handoff, as both ends count them."""
    before = [prefill.metrics.observations(SENT), decode.metrics.observations(RECEIVED)]
    request = ask(prompt(length, start=next(_starts)))
    outcome = await pods.router.generate(request, decode.address, prefill.address)
    assert outcome.token_ids == continuation(request.token_ids, request.sampling)
    after = [prefill.metrics.observations(SENT), decode.metrics.observations(RECEIVED)]
    news = [
        {key: now[key] - then[key] for key in now if now[key] > then[key]}
        for then, now in zip(before, after, strict=True)
    ]
    assert sum(news[1].values()) == SPEC.blocks_for(length) * SPEC.block_bytes
    assert news[0].keys() >= news[1].keys()
    return [name for (name,) in news[1]]


@pytest.mark.parametrize(
    ("prefers", "offers", "taken"),
    [
        ("shm,tcp", "shm,tcp", "shm"),
        ("tcp,shm", "shm,tcp", "tcp"),
        ("shm,tcp", "tcp", "tcp"),
        ("shm", "tcp,shm,grpc", "shm"),
        ("shm", "tcp", "grpc"),
        ("grpc", "shm,tcp", "grpc"),
        ("shm,tcp", "grpc", "grpc"),
    ],
)
async def test_the_first_way_of_the_prefill_pod_that_is_offered_is_taken(prefers: str, offers: str, taken: str) -> None:
    async with cluster() as pods:
        prefill = await pods.prefill(transport=tuple(prefers.split(",")))
        decode = await pods.decode(transport=tuple(offers.split(",")))
        assert await went_by(pods, prefill, decode) == [taken]


async def test_memory_of_another_host_is_not_even_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster() as pods:
        prefill = await pods.prefill(transport=("shm", "tcp"))
        monkeypatch.setattr(shm, "host_identity", lambda: "elsewhere")
        monkeypatch.setattr(ShmLink, "_pass_on", None)
        decode = await pods.decode(transport=("shm", "tcp"))
        assert await went_by(pods, prefill, decode) == ["tcp"]
        assert await went_by(pods, prefill, decode) == ["tcp"]
    assert "do without shm" not in caplog.text, "between most pods it is so"


async def test_a_way_that_can_be_taken_but_not_used_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def never(_: ShmSources, opening: Opening) -> None:
        assert opening.transport == "shm"

    monkeypatch.setattr(ShmSources, "find", never)
    async with cluster() as pods:
        prefill, decode = await pods.prefill(transport=("shm", "tcp")), await pods.decode(transport=("shm", "tcp"))
        assert await went_by(pods, prefill, decode) == ["tcp"]
        assert await went_by(pods, prefill, decode) == ["tcp"]
        assert prefill.service.brain.counters.handoffs_lost == 2
        await prefill.until_free()
        await decode.until_free()
    assert caplog.text.count("do without shm: This pod cannot reach the sender's memory") == 1


async def test_a_slab_is_let_go_of_when_its_pod_has_left() -> None:
    async with cluster() as pods:
        prefill, decode = await pods.prefill(transport=("shm",)), await pods.decode(transport=("shm",))
        assert await went_by(pods, prefill, decode) == ["shm"]
        assert len(decode.engine._lent._views) == 1
        await prefill.stop()
        await until(lambda: not decode.engine._lent._views)


async def test_connections_share_one_port() -> None:
    offered = ("nixl", "tcp") if "nixl" in WAYS else ("tcp",)
    async with cluster() as pods:
        decode = await pods.decode(transport=offered)
        outcome = await pods.router.generate(ask(prompt(5)), decode.address, (await pods.prefill()).address)
        ports = {offer.address for offer in outcome.reservation.transports}
        assert [offer.name for offer in outcome.reservation.transports] == list(offered)
        assert len(ports) == 1
        for name in offered:
            assert await went_by(pods, await pods.prefill(transport=(name,)), decode) == [name]


async def test_what_cannot_be_had_is_said_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    monkeypatch.setattr(shm.tempfile, "tempdir", str(tmp_path))
    async with cluster() as pods:
        with pytest.raises(BaseExceptionGroup) as caught:
            await pods.decode(transport=("shm", "nixl", "tcp"))
        assert sentence(caught.value) == "Transport nixl needs the extra nixl: pip install 'kvoy[nixl]'."
    assert is_empty(tmp_path)


def is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


def test_what_would_never_be_used_is_a_mistake() -> None:
    told = "--transport is tcp,grpc,shm, but shm would never be used behind grpc, which always works."
    with pytest.raises(ConfigError, match=told):
        parse(PrefillConfig, ["--transport=tcp,grpc,shm"], {})
