"""The socket and the server. Every connection has a deadline, and the number of connections is limited."""

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

__all__ = ["is_loopback", "listen", "make_server", "run", "url"]

HEADER_TIMEOUT = 10.0  # seconds in which the headers of a request have to arrive
RESPONSE_TIMEOUT = 60.0  # seconds in which a response has to be computed, sent and received
KEEP_ALIVE = 15  # seconds that a connection may be idle between two requests
MAX_CONNECTIONS = 128  # whose requests are served
MAX_REFUSED = 64  # connections beyond those that are answered with 503; any more are closed at once
BACKLOG = 32  # listen() backlog


def listen(host: str, port: int) -> socket.socket:
    """A listening socket."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
        raise bad_value("port", expected="a number from 0 to 65535", received=repr(port))
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
    except (OSError, UnicodeError) as error:
        raise OSError(str(_unknown_host(host))) from error
    listening = socket.socket(family, kind, protocol)
    try:
        if socket.AddressFamily(family) is socket.AF_INET6 and host != "::":
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if os.name == "posix":  # (elsewhere it lets two servers have one port)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        raise _bind_error(host, port, error) from error
    return listening


def _bind_error(host: str, port: int, error: OSError) -> OSError:
    if error.errno == errno.EADDRINUSE:
        remedy = f"another, such as {min(port + 1, 65535)}, or 0 for any that is free"
        message = bad_value("port", expected="a free one", received=f"{port}, which is in use", remedy=remedy)
    elif error.errno == errno.EACCES:
        message = bad_value("port", expected="one that you may use", received=port, remedy="1024 or more")
    else:
        message = _unknown_host(host)
    explained = OSError(str(message))
    explained.errno = error.errno
    return explained


def _unknown_host(host: str) -> ValueError:
    return bad_value("host", expected="an address of this machine", received=repr(host), remedy='host="127.0.0.1"')


def url(host: str, port: int) -> str:
    """The address to type into a browser."""
    name = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


class DeadlineProtocol(H11Protocol):
    """A connection with a deadline: for the headers of a request, for its response, and for the next request. Without
    it a client that sends a byte a second, or never reads, would stay for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deadline: asyncio.TimerHandle | None = None
        self.inner, self.app = self.app, self._respond

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS + MAX_REFUSED:
            transport.abort()
        else:
            self._set_deadline(HEADER_TIMEOUT)

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        self._set_deadline(RESPONSE_TIMEOUT)
        try:
            await self.inner(scope, receive, send)
        finally:
            self._set_deadline(KEEP_ALIVE + HEADER_TIMEOUT)

    def _set_deadline(self, seconds: float) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        closing = self.transport is None or self.transport.is_closing()
        self.deadline = None if closing else self.loop.call_later(seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends: what is not sent soon is dropped."""
        super().shutdown()
        self._set_deadline(0.5)


def make_server(app: Starlette) -> uvicorn.Server:
    """The server, not running yet. It logs errors only, and does not configure `logging`."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=DeadlineProtocol,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=5,
            backlog=BACKLOG,
        )
    )


def run(app: Starlette, listening: socket.socket) -> None:
    """Serve until Ctrl-C."""
    with suppress(KeyboardInterrupt):  # (raised once more when uvicorn has shut down)
        make_server(app).run(sockets=[listening])
