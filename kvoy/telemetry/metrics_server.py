"""Serves the metrics of a pod that has no HTTP server of its own: GET /metrics, and nothing else.

Runs in the pod's event loop, so that a scrape reads counts between two events and never in the middle of one.
"""

import asyncio
import contextlib

from kvoy.telemetry.metrics import CONTENT_TYPE, Metrics

_REQUEST_TIMEOUT_S = 5.0


class MetricsServer:
    """A listening socket; ``close`` ends it and the answers that are under way."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, metrics: Metrics, listen: str) -> "MetricsServer":
        """``listen`` is host:port. OSError if it is taken."""
        made = cls(metrics)
        host, _, port = listen.rpartition(":")
        made._server = await asyncio.start_server(made._connected, host.strip("[]"), int(port))
        return made

    @property
    def address(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await self._server.wait_closed()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_answer(self._metrics, reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)


async def _answer(metrics: Metrics, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_TIMEOUT_S)
        method, path = head.split(b" ", 2)[:2]
        found = method == b"GET" and path.split(b"?")[0] == b"/metrics"
        body = metrics.render() if found else b"There is only GET /metrics here.\n"
        status = "200 OK" if found else "404 Not Found"
        kind = CONTENT_TYPE if found else "text/plain; charset=utf-8"
        lines = (f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Connection: close")
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await writer.drain()
    except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass  # whoever asked is gone or does not speak HTTP; there is nobody to tell
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
