"""The Directory port over Redis: a key with a TTL for each pod, and a set of pod ids that finds them without a scan.

kvoy:pod:<pod_id>   a kvoy.v1.Pod message, gone ttl_s after the last register
kvoy:pods           the ids of pods that have registered; ids whose key is gone are taken out when listed
kvoy:generation     the last generation given, of any pod
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kvoy.core.errors import ConfigError, InvalidRequest, PeerError
from kvoy.core.types import Pod
from kvoy.transport.codec import control as codec
from kvoy.transport.codec.fields import parse
from kvoy.v1 import control_pb2 as pb

_POD_PREFIX = "kvoy:pod:"
_PODS = "kvoy:pods"
_GENERATION = "kvoy:generation"

_LIST = """
local pods = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local pod = redis.call('GET', ARGV[1] .. id)
  if pod then pods[#pods + 1] = pod else redis.call('SREM', KEYS[1], id) end
end
return pods
"""
# Milliseconds of Redis's clock, so that a Redis that lost its memory still gives greater numbers than before.
_NEXT_GENERATION = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last = tonumber(redis.call('GET', KEYS[1]) or '0')
local next = string.format('%.0f', math.max(last + 1, now))
redis.call('SET', KEYS[1], next)
return next
"""

_log = logging.getLogger(__name__)


class RedisDirectory:
    """Directory over Redis. Connects on first use and again after an outage; every call ends within ``timeout_s``,
    with PeerError while Redis is away."""

    def __init__(self, url: str, timeout_s: float = 1.0) -> None:
        # One try again at once: after a restart of Redis the pooled connections are dead, a new one is not.
        try:
            self._redis = redis.asyncio.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 1),
                retry_on_error=[redis.exceptions.ConnectionError],
            )
        except ValueError as error:
            raise ConfigError(f"The Redis URL cannot be used: {error}. Write redis://HOST:PORT.") from error
        self._timeout_s = timeout_s

    async def register(self, pod: Pod, ttl_s: float) -> None:
        """See ports.Directory."""
        wire = codec.pod_to_proto(pod).SerializeToString()
        async with self._bounded(), self._redis.pipeline(transaction=True) as pipeline:
            pipeline.set(_POD_PREFIX + pod.pod_id, wire, px=max(1, round(ttl_s * 1000)))
            pipeline.sadd(_PODS, pod.pod_id)
            await pipeline.execute()

    async def deregister(self, pod_id: str) -> None:
        """See ports.Directory."""
        async with self._bounded(), self._redis.pipeline(transaction=True) as pipeline:
            pipeline.delete(_POD_PREFIX + pod_id)
            pipeline.srem(_PODS, pod_id)
            await pipeline.execute()

    async def list_pods(self) -> list[Pod]:
        """See ports.Directory. An entry that makes no sense here (another release's, say) is logged and left out."""
        pods: list[Pod] = []
        for wire in cast("list[bytes]", await self._run(_LIST, _PODS, _POD_PREFIX)):
            try:
                pods.append(codec.pod_from_proto(parse(pb.Pod, wire)))
            except InvalidRequest as error:
                _log.warning("the directory holds a pod that makes no sense: %s", error)
        return sorted(pods, key=lambda pod: pod.pod_id)

    async def next_generation(self, pod_id: str) -> int:  # noqa: ARG002 - one counter is greater for every pod
        """See ports.Directory."""
        return int(cast("bytes", await self._run(_NEXT_GENERATION, _GENERATION)))

    async def close(self) -> None:
        """Gives the connections back."""
        await self._redis.aclose()

    async def _run(self, script: str, *keys_and_args: str) -> object:
        async with self._bounded():
            return await self._redis.eval(script, 1, *keys_and_args)

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except (RedisError, OSError, TimeoutError) as error:
            raise PeerError(f"The directory (Redis) does not answer: {error or 'no answer in time'}.") from error
