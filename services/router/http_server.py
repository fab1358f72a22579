"""Runs an ASGI app on a socket of its own in this event loop, and ends without a word to signals: those are the pod's.

Owns uvicorn. No access log, no server or date header, no websockets.
"""

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from kvoy.core.errors import ConfigError

_BACKLOG = 2048
_LAST_PORT = 65535
_KEEP_ALIVE_S = 30
_END_S = 2
"""What exchanges that are still going on get at the end; the pod has drained before."""


class HttpServer:
    """A server that is serving; made by ``start``, ended by ``stop``."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket) -> None:
        self._server = server
        self._listener = listener

    @classmethod
    async def start(cls, app: ASGIApp, listen: str) -> "HttpServer":
        """``listen`` is host:port, port 0 picks one; ConfigError when it cannot be had."""
        listener = _bind(listen)
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_END_S,
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        return cls(server, listener)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """Takes nothing new and ends every connection, at once if it is idle."""
        await self._server.shutdown(sockets=[self._listener])
        for connection in list(self._server.server_state.connections):
            # uvicorn leaves those alone that outlast its patience, or came while it was ending the others.
            connection.transport.abort()
        await asyncio.sleep(0)  # a transport closes its socket in the next turn of the loop


def _bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    if not port.isdecimal() or int(port) > _LAST_PORT:
        raise ConfigError(f"--http-listen {listen!r} is not an address to listen on; write host:port.")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"Cannot listen on {listen} for HTTP: {error}.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot listen on {listen} for HTTP: {error}.") from error
    return listener
