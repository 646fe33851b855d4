"""Who may ask: our own page, under our own names."""

from __future__ import annotations

import re
import socket

import pytest

from regard.serve.guard import Guard


@pytest.mark.parametrize(
    "host, ours",
    [
        ("127.0.0.1:{}", True),
        ("localhost:{}", True),
        ("LOCALHOST:{}", True),
        ("[::1]:{}", True),
        ("evil.example:{}", False),
        ("evil.example", False),
        ("127.0.0.1", False),
        ("localhost:1", False),
        ("", False),
        ("localhost.evil.example:{}", False),
        ("127.0.0.1:{}.evil.example", False),
        ("127.0.0.2:{}", False),
        ("[::1]", False),
    ],
)
def test_only_our_own_names_are_answered(client, host, ours):
    for method in ("GET", "POST"):
        answer = client.ask(method, "/", host=host.format(client.port))
        assert (answer.status != 421) == ours
        if not ours:
            assert answer.json["error"].startswith(f"host: expected 127.0.0.1:{client.port} or [::1]:{client.port} or ")


def test_a_request_without_a_host_is_refused(client):
    for head in ("GET / HTTP/1.0", "GET / HTTP/1.1", "GET / HTTP/1.1\r\nHost: localhost:1\r\nHost: 127.0.0.1"):
        with socket.create_connection(("127.0.0.1", client.port)) as line:
            line.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode())
            assert re.match(b"HTTP/1.1 4(21|00)", line.makefile("rb").read())


def test_a_host_that_was_asked_for_is_ours_and_so_are_numbers_where_all_were_asked_for():
    def ours(asked: str, name: str, port: int = 80) -> bool:
        return Guard(None, asked, port).is_ours(name)  # type: ignore[arg-type]

    assert ours("my.house", "my.house")
    assert ours("my.house", "my.house:80")
    assert ours("fe80::1", "[fe80::1]")
    assert ours("0.0.0.0", "192.168.0.7:99", 99)
    assert ours("::", "[fe80::7]:99", 99)
    assert ours("0.0.0.0", socket.gethostname())
    assert not ours("0.0.0.0", "evil.example")
    assert not ours("127.0.0.1", "192.168.0.7")


@pytest.mark.parametrize(
    "headers, allowed",
    [
        ({}, True),
        ({"origin": "http://127.0.0.1:{}"}, True),
        ({"origin": "http://127.0.0.1:{}", "sec_fetch_site": "same-origin"}, True),
        ({"sec_fetch_site": "none"}, True),
        ({"origin": "http://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": "http://localhost:{}"}, False),  # another origin, even if it is us
        ({"origin": "https://127.0.0.1:{}"}, False),
        ({"origin": "http://127.0.0.1:1"}, False),
        ({"sec_fetch_site": "cross-site"}, False),
        ({"sec_fetch_site": "same-site"}, False),
    ],
)
def test_pages_of_others_may_not_ask(client, headers, allowed):
    said = {name: value.format(client.port) for name, value in headers.items()}
    asked = {"text": "the cat", "model": "tiny"}
    assert client.ask("POST", "/api/look", asked, **said).status == (202 if allowed else 403)
    assert client.ask("DELETE", "/api/jobs/none", **said).status == (404 if allowed else 403)
    assert client.ask("GET", "/api/jobs/none", **said).status == (404 if allowed else 403)
    assert client.ask("GET", "/", **said).status == 200  # a link may lead here


def test_there_are_no_websockets(client):
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec_websocket_key": "a", "sec_websocket_version": "13"}
    assert client.ask("GET", "/api/look", **upgrade).status == 405
