"""The socket, and the server behind it. Every connection has a deadline; there are only so many connections."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regard.errors import bad_value, missing_extra

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as _error:
    raise missing_extra(_error.name or "uvicorn", "serve") from _error

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["address", "bound", "is_loopback", "run", "server"]

HEAD = 10.0  # seconds in which the head of a request has to be there
ANSWER = 60.0  # seconds in which an answer has to be made, sent and taken
KEEP = 15  # seconds that a connection may be idle between two requests
CONNECTIONS, MORE = 128, 64  # whose requests are served; who are told to come back (503); the rest is hung up on
BACKLOG = 32  # connections that wait to be taken up; so many at a time are


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise bad_value("port", expected="a number from 0 to 65535", received=repr(port))
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise OSError(
            str(
                bad_value("host", expected="an address of this machine", received=repr(host), remedy='host="127.0.0.1"')
            )
        ) from error
    listening = socket.socket(family, kind, protocol)
    try:
        if socket.AddressFamily(family) is socket.AF_INET6 and host != "::":
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if os.name == "posix":  # (elsewhere it lets two servers have one port)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen()
    except OSError as error:
        listening.close()
        raise _not_bound(host, port, error) from error
    return listening


def _not_bound(host: str, port: int, error: OSError) -> OSError:
    if error.errno == errno.EADDRINUSE:
        said = bad_value(
            "port",
            expected="a free one",
            received=f"{port}, which is in use",
            remedy=f"another, such as {min(port + 1, 65535)}, or 0 for any that is free",
        )
    elif error.errno == errno.EACCES:
        said = bad_value("port", expected="one that you may use", received=port, remedy="1024 or more")
    else:
        said = bad_value("host", expected="an address of this machine", received=repr(host), remedy='host="127.0.0.1"')
    words = OSError(str(said))
    words.errno = error.errno
    return words


def address(host: str, port: int) -> str:
    """What a browser calls it."""
    name = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"


def is_loopback(listening: socket.socket) -> bool:
    """Whether this machine alone can connect."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


class Door(H11Protocol):
    """A connection with a deadline: for the head of a request, for its answer, and for the next one. Without it a
    client that sends a byte a second, or never reads, would stay for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deadline: asyncio.TimerHandle | None = None
        self.inner, self.app = self.app, self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS + MORE:
            transport.abort()
        else:
            self._until(HEAD)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self._until(ANSWER)
        try:
            await self.inner(scope, receive, send)
        finally:
            self._until(KEEP + HEAD)

    def _until(self, seconds: float) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        closing = self.transport is None or self.transport.is_closing()
        self.deadline = None if closing else self.loop.call_later(seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends: what is not sent soon will not be."""
        super().shutdown()
        self._until(0.5)


def server(app: Starlette) -> uvicorn.Server:
    """The server, not running yet. It says nothing but errors, and touches no settings of `logging`."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Door,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=KEEP,
            timeout_graceful_shutdown=5,
            backlog=BACKLOG,
        )
    )


def run(app: Starlette, listening: socket.socket) -> None:
    """Serve until Ctrl-C."""
    with suppress(KeyboardInterrupt):  # (uvicorn has shut down by then, and says it once more)
        server(app).run(sockets=[listening])
