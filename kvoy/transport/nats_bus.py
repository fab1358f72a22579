"""The Bus port over NATS. Best effort by contract: what cannot be sent is counted, and gaps show in seq numbers.

One task connects (nats-py reconnects by itself from then on), one sends what has been published.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from kvoy.core.errors import ConfigError, KvoyError
from kvoy.transport.ports import Subscription

Handler = Callable[[str, bytes], Awaitable[None]]

OUTBOX_MESSAGES = 8192
"""That may wait while the connection is slow; more are dropped."""
SUBSCRIPTION_MESSAGES = 65_536
SUBSCRIPTION_BYTES = 64 * 1024 * 1024
FIRST_CONNECT_S = 1.0
"""How long start waits for a NATS that is there, so that the first events are not lost."""
FLUSH_S = 2
CLOSE_S = 2.0

_log = logging.getLogger(__name__)


class NatsBus:
    """Bus over NATS; use ``await NatsBus.start(url)``, which succeeds whether or not NATS is there."""

    def __init__(self, url: str, name: str) -> None:
        if not urlsplit(url).hostname:
            raise ConfigError(f"The NATS URL {url!r} names no host. Write nats://HOST:PORT.")
        self.dropped = 0
        self._url = url
        self._name = name
        self._client = Client()
        self._outbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(OUTBOX_MESSAGES)
        self._subscriptions: set[_NatsSubscription] = set()
        self._closing = False
        self._met = False
        """NATS has answered once: from now on nats-py keeps connection and subscriptions."""
        self._up = True
        """Only for the log, which says each change once."""
        self._connecting = asyncio.create_task(self._connect())
        self._sending = asyncio.create_task(self._send())

    @classmethod
    async def start(cls, url: str, name: str = "kvoy") -> "NatsBus":
        """Begins to connect, and goes on trying for ever. ConfigError if the URL is none."""
        bus = cls(url, name)
        await asyncio.wait({bus._connecting}, timeout=FIRST_CONNECT_S)
        if not bus._met:
            await bus._lost()
        return bus

    @property
    def connected(self) -> bool:
        """Whether NATS answers now."""
        return self._client.is_connected

    async def publish(self, subject: str, payload: bytes) -> None:
        """See ports.Bus."""
        if not self.connected or self._outbox.full():
            self.dropped += 1
        else:
            self._outbox.put_nowait((subject, payload))

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """See ports.Bus. Survives outages; a handler's KvoyError is logged, its messages come one at a time."""
        subscription = _NatsSubscription(subject, handler, self._subscriptions.discard)
        self._subscriptions.add(subscription)
        if self._met:
            await subscription.begin(self._client)
        return subscription

    async def close(self) -> None:
        """Ends subscriptions and connection; what waits to be sent is dropped."""
        self._closing = True
        for task in (self._connecting, self._sending):
            task.cancel()
        await asyncio.wait({self._connecting, self._sending})
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._client.close()
        except (nats.errors.Error, OSError, TimeoutError) as error:
            _log.warning("the event bus (NATS at %s) did not take what was left: %r", self._where, error)

    async def _connect(self) -> None:
        await self._client.connect(
            self._url,
            name=self._name,
            max_reconnect_attempts=-1,
            reconnect_time_wait=1,
            ping_interval=10,
            flush_timeout=FLUSH_S,
            error_cb=self._failed,
            disconnected_cb=self._lost,
            reconnected_cb=self._found,
        )
        await self._found()
        self._met = True
        for subscription in list(self._subscriptions):
            await subscription.begin(self._client)

    async def _send(self) -> None:
        while not self._closing:  # nats-py swallows a cancellation that comes while it flushes
            subject, payload = await self._outbox.get()
            try:
                await self._client.publish(subject, payload)
            except (nats.errors.Error, OSError):
                self.dropped += 1

    async def _failed(self, error: Exception) -> None:
        _log.debug("NATS: %s", error)

    async def _lost(self) -> None:
        if self._up:
            self._up = False
            _log.warning("the event bus (NATS at %s) is away; it will be tried until it is back", self._where)

    async def _found(self) -> None:
        self._up = True
        _log.info("the event bus (NATS at %s) is there", self._where)

    @property
    def _where(self) -> str:
        """For the log: a URL may hold a password."""
        parts = urlsplit(self._url)
        return f"{parts.hostname}:{parts.port or 4222}"


class _NatsSubscription:
    """What is to be heard, from before the first connection on."""

    def __init__(self, subject: str, handler: Handler, forget: "Callable[[_NatsSubscription], None]") -> None:
        self._subject = subject
        self._handler = handler
        self._forget = forget
        self._subscription: NatsSubscription | None = None

    async def begin(self, client: Client) -> None:
        """Subscribes; returns when the server knows, if it is there (if not, nats-py tells it when it is back)."""
        self._subscription = await client.subscribe(
            self._subject,
            cb=self._deliver,
            pending_msgs_limit=SUBSCRIPTION_MESSAGES,
            pending_bytes_limit=SUBSCRIPTION_BYTES,
        )
        if client.is_connected:
            try:
                await client.flush(FLUSH_S)
            except (nats.errors.Error, OSError) as error:
                _log.debug("the subscription to %s is not confirmed: %s", self._subject, error)

    async def _deliver(self, message: Msg) -> None:
        try:
            await self._handler(message.subject, message.data)
        except KvoyError as error:
            _log.warning("an event on %s was not taken: %s", message.subject, error)

    async def close(self) -> None:
        self._forget(self)
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            try:
                await subscription.unsubscribe()
            except (nats.errors.Error, OSError) as error:
                _log.debug("the subscription to %s had ended: %s", self._subject, error)
