"""Who may ask: our own page, under our own host name. Refuses pages of other sites in the same browser (CSRF), and host
names that others made to point here (DNS rebinding)."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from regard.errors import bad_value

__all__ = ["HEADERS", "Guard"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",  # the page has one of its own
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """ASGI middleware that refuses foreign requests, and adds `HEADERS` to every response."""

    def __init__(self, app: App, host: str, port: int) -> None:
        self.app, self.port = app, port
        self.everywhere = host in ("", "0.0.0.0", "::")
        names = ["localhost", "127.0.0.1", "[::1]", _bracketed(host)]
        names += [socket.gethostname()] if self.everywhere else []
        self.names = {name.lower() for name in names if name}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = self.why_not(scope)
            if refusal is None:
                await self.app(scope, receive, _with_headers(send))
            else:
                await _refuse(_with_headers(send), *refusal)
        else:  # websockets: we have none
            await send({"type": "websocket.close", "code": 1008})

    def why_not(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the message of a refusal; None if the request is allowed."""
        hosts, origins, sites = (_values(scope, name) for name in (b"host", b"origin", b"sec-fetch-site"))
        if len(hosts) != 1 or not self.is_ours(hosts[0]):
            expected = " or ".join(f"{name}:{self.port}" for name in sorted(self.names))
            received = repr(hosts[0][:80]) if hosts else "none"
            return 421, str(bad_value("host", expected=expected, received=received, remedy="serve(host=...)"))
        if scope["method"] in ("GET", "HEAD") and scope["path"] == "/":  # a link may lead here from anywhere
            return None
        if any(origin != f"http://{hosts[0]}" for origin in origins):
            return 403, str(bad_value("origin", expected=f"http://{hosts[0]}", received=repr(origins[0][:80])))
        if any(site not in ("same-origin", "none") for site in sites):
            return 403, str(bad_value("request", expected="one of our own page", received="one of another page"))
        return None

    def is_ours(self, host: str) -> bool:
        """Whether a Host header names this server and its port. A numeric address cannot be made to point elsewhere."""
        name, colon, port = host.lower().rpartition(":")
        if not colon or port.endswith("]"):
            name, port = host.lower(), "80"
        return port == str(self.port) and (name in self.names or (self.everywhere and _is_numeric(name)))


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_numeric(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {key.lower() for key, _ in message["headers"]}
            more = [(key.encode(), value.encode()) for key, value in HEADERS.items() if key.encode() not in present]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return send_with_headers


async def _refuse(send: Send, status: int, message: str) -> None:
    """Answer without reading the body, and close the connection."""
    body = json.dumps({"error": message}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
