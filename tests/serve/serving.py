"""A server in a thread, a client that asks it, and tiny models to serve."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import regard.serve
from regard.draw.page.numbers import decoded
from regard.models import Decoder, Encoder, ModelConfig
from regard.serve.requests import Limits

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, which cuts text, is not installed")
pytest.importorskip("starlette", reason="starlette, which serves, is not installed")
pytest.importorskip("uvicorn", reason="uvicorn, which serves, is not installed")

from starlette.applications import Starlette  # noqa: E402

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


class Gate:
    """Makes a model wait in its first layer, until it may go on."""

    def __init__(self, model: nn.Module) -> None:
        self.arrived, self.open = threading.Semaphore(0), threading.Event()
        model.get_submodule("blocks.0").register_forward_pre_hook(self.wait)

    def wait(self, *_: Any) -> None:
        self.arrived.release()
        assert self.open.wait(20)


def live(html: bytes) -> dict[str, Any]:
    found = re.search(r'id="regard-meta">(.*?)</script>', html.decode())
    assert found is not None
    return json.loads(found[1])


def values(piece: dict[str, Any], data: bytes) -> torch.Tensor:
    """What the page reads: whole numbers, low bytes first, as weights."""
    count = torch.Size(piece["shape"]).numel()
    raw = torch.tensor(list(data[piece["at"] : piece["at"] + count * piece["bits"] // 8])).view(-1, *piece["shape"])
    code = sum(part << 8 * i for i, part in enumerate(raw))
    return decoded(code, torch.tensor(piece["scale"]), piece["bits"])


# Bodies that are refused: the status, and the words
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    regard.serve.serve({"tiny": tiny()}, port=0, limits=Limits(reading=0.4))
