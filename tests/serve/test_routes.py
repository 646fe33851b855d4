"""The routes: what is answered, what is refused, with which headers."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlencode

import pytest
from serve.serving import Client, live, served, tiny

from regard.serve import routes
from regard.serve.jobs import JobQueue
from regard.serve.requests import Limits


def test_the_page_offers_the_models_and_shows_a_first_sentence_once_it_is_computed(client):
    about = live(client.ask("GET", "/").data)["live"]
    assert about["models"] == [{"name": "tiny", "kind": "decoder"}, {"name": "small", "kind": "encoder"}]
    assert (about["model"], about["limit"], about["most"], about["crop"]) == ("tiny", 4000, 128, 256)
    assert client.until(about["job"])["state"] == "done"
    answer = client.ask("GET", "/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    meta = live(answer.data)
    assert meta["title"] == routes.SENTENCE == about["text"]
    assert meta["runs"][0]["texts"][0]["tokens"] == routes.SENTENCE.lower().split()
    assert meta["live"]["job"] == about["job"]


def test_the_policy_of_the_page_is_a_header_too_and_nobody_may_frame_it(client):
    answer = client.ask("GET", "/")
    inside = re.search('Content-Security-Policy" content="([^"]*)"', answer.data.decode())
    assert inside is not None
    assert answer.headers["content-security-policy"] == inside[1] + "; frame-ancestors 'none'"
    assert "connect-src 'self'" in inside[1]


@pytest.mark.parametrize("path", ["/", "/api/jobs/none", "/nowhere", "/../../etc/passwd", "/api/look"])
def test_every_answer_carries_the_headers_of_a_guarded_page(client, path):
    for headers in ({}, {"host": "evil.example"}):
        answer = client.ask("GET", path, **headers)
        for name, value in routes.HEADERS.items():
            assert answer.headers[name].endswith(
                "frame-ancestors 'none'" if "policy" in name and "sec" in name else value
            )
        assert not any(name.startswith("access-control") for name in map(str.lower, answer.headers))
        assert "server" not in answer.headers


@pytest.mark.parametrize(
    "change, words",
    [
        ({"layer": "2"}, "layer: expected a number from 0 to 1, received '2'"),
        ({"layer": "-1"}, "layer: expected a number from 0 to 1"),
        ({"layer": None}, "layer: expected a number from 0 to 1, received None"),
        ({"head": "3"}, "head: expected a number from 0 to 2"),
        ({"head": "٣"}, "head: expected a number from 0 to 2"),
        ({"head": "9" * 5000}, "head: expected a number from 0 to 2"),
        ({"rows": "0-8"}, "rows: expected first-last within 0-7, at most 256 of them, received '0-8'"),
        ({"rows": "3-3"}, "rows: expected first-last within"),
        ({"rows": "4-3"}, "rows: expected first-last within"),
        ({"cols": "0--1"}, "cols: expected first-last within"),
        ({"cols": "../../etc"}, "cols: expected first-last within"),
        ({"cols": None}, "cols: expected first-last within 0-7, at most 256 of them, received None"),
    ],
)
def test_a_crop_outside_of_the_map_is_refused_in_words(client, change, words):
    job = client.look("the cat ran away over the hill")
    client.until(job)
    asked = {"layer": "0", "head": "0", "rows": "0-7", "cols": "0-7"}
    assert client.ask("GET", f"/api/jobs/{job}/crop?{urlencode(asked)}").status == 200
    said = {name: value for name, value in (asked | change).items() if value is not None}
    answer = client.ask("GET", f"/api/jobs/{job}/crop?{urlencode(said)}")
    assert answer.status == 422
    assert words in answer.json["error"]
    assert len(answer.json["error"]) < 200


@pytest.mark.parametrize("said", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_only_json_is_read(client, said):
    answer = client.ask("POST", "/api/look", b'{"text": "a", "model": "tiny"}', content_type=said)
    assert answer.status == 415
    assert answer.json["error"].startswith("content-type: expected application/json, received ")


def test_a_body_may_be_so_large_whatever_its_headers_say(client):
    big = b" " * (Limits(characters=4000).body + 1)
    with Client(client.port) as one:
        answer = one.ask("POST", "/api/look", big, content_type="application/json")
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert answer.json["error"].startswith(
            "body: expected at most 52096 bytes, received 52097 or more; remedy: a sh"
        )
        pieces = (big[:9000] for _ in range(9))  # chunked: no header says how long it is
        answer = one.ask("POST", "/api/look", pieces, content_type="application/json")
        assert answer.status == 413
    with socket.create_connection(("127.0.0.1", client.port)) as line:  # less than it said: it waits for the rest
        head = f"POST /api/look HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nContent-Type: application/json\r\n"
        line.sendall(f"{head}Content-Length: 5\r\n\r\n".encode() + b"[1,2]" + b"GET / HTTP/1.1\r\n\r\n")
        assert line.recv(1000).startswith(b"HTTP/1.1 422")  # five bytes are the body; the rest is another request


def test_a_body_has_to_arrive_in_time():
    with served({"tiny": tiny()}, reading=0.3) as client, socket.create_connection(("127.0.0.1", client.port)) as line:
        head = f"POST /api/look HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\nContent-Type: application/json\r\n"
        line.sendall(f"{head}Content-Length: 500\r\n\r\n{{".encode())
        answer = line.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body: expected all of it in 0.3 seconds, received 1 bytes" in answer


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/nowhere", 404),
        ("POST", "/", 405),
        ("GET", "/api/look", 405),
        ("PUT", "/api/jobs/x", 405),
        ("GET", "/api/look/", 404),
        ("GET", "/index.html", 404),
        ("GET", "/%2e%2e/etc/passwd", 404),
        ("TRACE", "/", 405),
        ("OPTIONS", "/api/look", 405),
    ],
)
def test_there_is_nothing_else(client, method, path, status):
    answer = client.ask(method, path)
    assert answer.status == status
    assert answer.json["error"].startswith("request: expected one that the page makes, received ")


def test_a_mistake_in_a_route_is_answered_without_its_traceback_and_serving_goes_on(monkeypatch, caplog):
    with served({"tiny": tiny()}) as client:
        with monkeypatch.context() as patch:
            patch.setattr(JobQueue, "get", lambda self, name: {}["secret"])
            answer = client.ask("GET", "/api/jobs/some")
        assert (answer.status, answer.json) == (500, {"error": "the server failed; its terminal says why"})
        assert all(name in answer.headers for name in routes.HEADERS)
        assert client.ask("GET", "/api/jobs/some").status == 404
    assert "KeyError: 'secret'" in caplog.text
