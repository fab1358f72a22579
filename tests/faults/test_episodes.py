"""Random faults, one after the other and at once, upon random requests: each answer is right or its end is said, and
when all is over the pods are as they were.

KVOY_FAULT_EPISODES says how many, KVOY_FAULT_SEED which ones. The first pod of each role is never killed: what has
been lost in it would show at the end.
"""

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest

from kvoy.core.errors import DeadlinePassed, KvoyError
from tests.faults.proxy import NOWHERE
from tests.faults.site import Pod, Site, ask, prompt, until
from tests.pods.cluster import Router
from tests.pods.cluster import ask as as_request

EPISODES = int(os.environ.get("KVOY_FAULT_EPISODES", "15"))
SEED = os.environ.get("KVOY_FAULT_SEED") or str(random.SystemRandom().randrange(1 << 32))
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120 + 4 * EPISODES)]

LONGEST_TOKENS = 388
GROWTH_BYTES = 24 << 20
"""What a pod may keep of all episodes: an allocator's reserve, and code that had not run before."""


@dataclass(eq=False)
class Episode:
    """What is drawn, and what has happened."""

    site: Site
    draw: random.Random
    requests: list[asyncio.Task[None]] = field(default_factory=list)
    cancelled: set[asyncio.Task[None]] = field(default_factory=set)
    killed: list[Pod] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def decode(self) -> Pod:
        return self.draw.choice(self.site.decodes)

    async def pause(self, longest_s: float) -> None:
        await asyncio.sleep(self.draw.uniform(0.0, longest_s))


async def damage(episode: Episode) -> None:
    episode.decode.link.flips += episode.draw.randint(1, 3)


async def slow_down(episode: Episode) -> None:
    episode.decode.link.rate_bytes_s = episode.draw.uniform(60_000, 300_000)


async def cut(episode: Episode) -> None:
    episode.decode.link.cut()


async def cut_again_and_again(episode: Episode) -> None:
    async with episode.decode.link.cutting(episode.draw.uniform(0.05, 0.2)):
        await episode.pause(0.6)


async def stall(episode: Episode) -> None:
    link = episode.decode.link
    link.stall()
    await episode.pause(0.5)
    link.flow()


async def be_unreachable(episode: Episode) -> None:
    link = episode.decode.link
    target, link.target = link.target, NOWHERE
    link.cut()
    await episode.pause(0.5)
    if link.target == NOWHERE:
        link.target = target


async def stand_still(episode: Episode) -> None:
    pod = episode.draw.choice(episode.site.pods)
    pod.send(signal.SIGSTOP)
    await episode.pause(0.4)
    if pod not in episode.killed:
        pod.send(signal.SIGCONT)


async def kill_a_prefill_pod(episode: Episode) -> None:
    await kill(episode, episode.site.prefills)


async def kill_a_decode_pod(episode: Episode) -> None:
    await kill(episode, episode.site.decodes)


async def kill(episode: Episode, pods: list[Pod]) -> None:
    if len(pods) > 1:
        episode.killed.append(pods[-1])
        await episode.site.kill(pods[-1])


async def cancel(episode: Episode) -> None:
    request = episode.draw.choice(episode.requests)
    episode.cancelled.add(request)
    request.cancel()


FAULTS: list[Callable[[Episode], Coroutine[None, None, None]]] = [
    damage,
    slow_down,
    cut,
    cut_again_and_again,
    stall,
    be_unreachable,
    stand_still,
    kill_a_prefill_pod,
    kill_a_decode_pod,
    cancel,
    cancel,
]


async def fail(episode: Episode, fault: Callable[[Episode], Coroutine[None, None, None]]) -> None:
    """The fault, at a random moment."""
    await episode.pause(0.15)
    await fault(episode)


async def answer(episode: Episode, ids: list[int], timeout_s: float | None) -> None:
    """Right, or with a reason to be none: its time is up, or its decode pod was killed when it had said something."""
    await episode.pause(0.05)
    try:
        await ask(episode.site, ids, timeout_s)
    except DeadlinePassed:
        if timeout_s is None:
            raise
    except KvoyError as error:
        is_excused = any(pod.role == "decode" for pod in episode.killed)
        if not (is_excused and str(error).startswith("The answer broke off after")):
            raise


def prompts(draw: random.Random, count: int) -> list[list[int]]:
    """Some begin like another one."""
    made = [draw.choices(range(900), k=draw.randint(2, LONGEST_TOKENS)) for _ in range(count)]
    for ids in made[1:]:
        if draw.random() < 0.3:
            shared = draw.randint(0, min(len(ids), len(made[0])) - 1)
            ids[:shared] = made[0][:shared]
    return made


async def play(episode: Episode) -> None:
    """Until its last request has ended."""
    site, draw = episode.site, episode.draw
    for pod in site.decodes:
        pod.link.rate_bytes_s = draw.uniform(200_000, 2_000_000)
    faults = draw.choices(FAULTS, k=draw.randint(1, 3))
    episode.faults = [fault.__name__ for fault in faults]
    for ids in prompts(draw, draw.randint(1, 5)):
        timeout_s = draw.uniform(0.05, 0.6) if draw.random() < 0.1 else None
        episode.requests.append(asyncio.create_task(answer(episode, ids, timeout_s)))
    await asyncio.gather(*(fail(episode, fault) for fault in faults))
    async with asyncio.timeout(30.0):
        results = await asyncio.gather(*episode.requests, return_exceptions=True)
    for request, result in zip(episode.requests, results, strict=True):
        if isinstance(result, BaseException) and request not in episode.cancelled:
            raise result


async def make_whole(episode: Episode) -> None:
    """Good links, other pods for those that were killed, and nothing is held for anybody."""
    site = episode.site
    for pod in [*site.decodes, *episode.killed]:
        pod.link.heal()
    await asyncio.gather(*(site.replace(pod) for pod in episode.killed))
    await site.seen()
    await site.free()


async def visit_all(site: Site) -> None:
    """Each prefill pod hands over to each decode pod, so that every connection there can be is there."""
    for _ in range(4):
        await asyncio.gather(*(ask(site, prompt(200)) for _ in range(4)))
    router = Router()
    for prefill, decode in itertools.product(site.prefills, site.decodes):
        outcome = await router.generate(as_request(prompt(200)), decode.address, prefill.address)
        assert outcome.finish is not None
    await router.close()


async def test_when_all_is_over_the_pods_are_as_they_were(site: Site) -> None:
    stayers = [site.prefills[0], site.decodes[0]]
    await visit_all(site)
    blocks = await site.each(stayers, "kvoy_pool_blocks")
    opened = {pod: pod.descriptors for pod in stayers}
    resident = {pod: pod.resident_bytes for pod in stayers}
    for number in range(EPISODES):
        episode = Episode(site, random.Random(f"{SEED}/{number}"))
        try:
            await play(episode)
            await make_whole(episode)
        except BaseException as error:
            error.add_note(f"episode {number} of KVOY_FAULT_SEED={SEED}: {episode.faults}")
            raise
    await visit_all(site)
    await site.free()
    assert await site.each(stayers, "kvoy_pool_blocks") == blocks
    await until(lambda: have(opened), what=lambda: {pod.name: pod.descriptors - opened[pod] for pod in stayers})
    for pod in stayers:
        assert pod.resident_bytes <= resident[pod] + GROWTH_BYTES


async def have(opened: dict[Pod, Counter[str]]) -> bool:
    """No more than then; maybe fewer, for a way to a pod that failed of late is not tried again at once."""
    return all(pod.descriptors <= before for pod, before in opened.items())
