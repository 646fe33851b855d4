"""The socket, deadlines, limits of connections, and how it ends."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
from serve.serving import Client, running, tiny
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import regard.serve
from regard.serve import routes, server


@pytest.fixture
def no_other_loop():
    """The main thread without an event loop: tests in a browser leave theirs running in it."""
    other = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    yield
    asyncio._set_running_loop(other)


@pytest.mark.usefixtures("no_other_loop")
@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_program_ends_the_server(monkeypatch, raised):
    """In the main thread, as Ctrl-C and `sys.exit` are; in a job's thread they end the job alone."""
    begun = threading.Event()
    monkeypatch.setattr(server.uvicorn.Server, "startup", lambda *_, **__: ended())

    async def ended() -> None:
        begun.set()
        raise raised

    with server.listen("127.0.0.1", 0) as listening:
        app = regard.serve.application({"tiny": tiny()}, port=listening.getsockname()[1])
        if raised is SystemExit:
            with pytest.raises(SystemExit):
                server.run(app, listening)
        else:
            server.run(app, listening)  # (Ctrl-C is how it is meant to end)
    assert begun.is_set()


def test_a_port_in_use_is_said_with_a_remedy():
    with server.listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        words = (
            f"port: expected a free one, received {port}, which is in use; remedy: another, such as {port + 1}, or 0"
        )
        with pytest.raises(OSError, match=words) as caught:
            regard.serve.serve({"tiny": tiny()}, port=port)
    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize(
    "host, port, error, words",
    [
        ("127.0.0.1", 65536, ValueError, "port: expected a number from 0 to 65535, received 65536"),
        ("127.0.0.1", True, ValueError, "port: expected a number"),
        (
            "192.0.2.1",
            0,
            OSError,
            "host: expected an address of this machine, received '192.0.2.1'; remedy: host=\"127",
        ),
        ("no host", 0, OSError, "host: expected an address of this machine, received 'no host'"),
    ],
)
def test_what_cannot_be_bound_is_said_in_words(host, port, error, words):
    with pytest.raises(error, match=words):
        server.listen(host, port)


def test_the_address_is_one_that_a_browser_can_open():
    assert server.url("0.0.0.0", 80) == "http://127.0.0.1:80/"
    assert server.url("::1", 80) == "http://[::1]:80/"
    with server.listen("127.0.0.1", 0) as here, server.listen("0.0.0.0", 0) as everywhere:
        assert (server.is_loopback(here), server.is_loopback(everywhere)) == (True, False)


def large(port: int) -> Starlette:
    async def answer(request: Any) -> Any:
        return routes.ChunkedResponse(bytes(2**25)) if request.url.path == "/large" else PlainTextResponse("small")

    return Starlette(routes=[Route("/large", answer), Route("/", answer)])


def ended(line: socket.socket, seconds: float) -> bool:
    """Whether the other side hangs up in time, before it has said much."""
    line.settimeout(seconds)
    got = 0
    try:
        while piece := line.recv(2**16):
            got += len(piece)
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return got < 2**24


def test_who_does_not_ask_or_does_not_listen_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(server, "HEADER_TIMEOUT", 0.3)
    monkeypatch.setattr(server, "KEEP_ALIVE", 0.1)
    monkeypatch.setattr(server, "RESPONSE_TIMEOUT", 0.6)
    with running(large) as port:
        with ExitStack() as stack:
            silent, slow, deaf = (stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3))
            slow.sendall(b"GET / HT")
            deaf.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
            begun = time.monotonic()
            assert ended(silent, 5)
            assert ended(slow, 5)
            time.sleep(max(0, 1.0 - (time.monotonic() - begun)))
            deaf.settimeout(5)
            assert ended(deaf, 5)
        monkeypatch.setattr(server, "RESPONSE_TIMEOUT", 60)
        with Client(port) as client:
            assert len(client.ask("GET", "/large").data) == 2**25  # who listens gets it all


def test_there_are_only_so_many_connections(monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(server, "MAX_REFUSED", 2)
    with running(large) as port, ExitStack() as stack:
        lines = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(5)]
        assert ended(lines[-1], 5)
        lines[0].sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert lines[0].recv(100).startswith(b"HTTP/1.1 503")
        for line in lines[1:]:
            line.close()
        begun, status = time.monotonic(), 503
        while status == 503 and time.monotonic() - begun < 5:
            with Client(port) as client:
                status = client.ask("GET", "/").status
        assert status == 200


@pytest.mark.parametrize("missing, room", [("starlette", "routes"), ("uvicorn", "server")])
def test_what_is_not_installed_is_said_with_the_extra_that_brings_it(monkeypatch, missing, room):
    monkeypatch.setitem(sys.modules, missing, None)
    for name in [name for name in sys.modules if name.startswith(f"{missing}.")] + [f"regard.serve.{room}"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(regard.serve, room)
    with pytest.raises(
        ImportError, match=rf"{missing}.* is not installed; it comes with: pip install 'regard\[serve\]'"
    ):
        regard.serve.serve({"tiny": tiny()}, port=0)
