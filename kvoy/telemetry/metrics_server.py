"""Serves the metrics of a pod that has no HTTP server of its own: GET /metrics, and nothing else.

Runs in the pod's event loop, so that a scrape reads counts between two events and never in the middle of one.
"""

import asyncio

from kvoy.telemetry.metrics import CONTENT_TYPE, Metrics

_REQUEST_TIMEOUT_S = 5.0


class MetricsServer:
    """A listening socket; ``close`` ends it."""

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server

    @classmethod
    async def start(cls, metrics: Metrics, listen: str) -> "MetricsServer":
        """``listen`` is host:port. OSError if it is taken."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _answer(metrics, reader, writer)

        host, _, port = listen.rpartition(":")
        return cls(await asyncio.start_server(answer, host.strip("[]"), int(port)))

    @property
    def address(self) -> str:
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def close(self) -> None:
        self._server.close()
        await self._server.wait_closed()


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
