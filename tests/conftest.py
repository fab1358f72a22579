"""Fixtures for every area: real servers, started when first asked for."""

from hypothesis import settings

from tests.servers import nats_url, own_nats, own_redis, redis_url

__all__ = ["nats_url", "own_nats", "own_redis", "redis_url"]

# How long an example takes says how busy the machine is; the time limit of the test itself stays.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
