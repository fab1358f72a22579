"""Fixtures for every area: real servers, started when first asked for."""

from tests.servers import nats_url, own_nats, own_redis, redis_url

__all__ = ["nats_url", "own_nats", "own_redis", "redis_url"]
