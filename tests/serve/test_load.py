"""Under load, as a process of its own: it serves whatever is sent, in bounded memory, and ends cleanly."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serve import serving
from serve.serving import BAD, LONG, Client


@contextmanager
def process(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """`serving.py` as a program: `serve` with a tiny model, on a free port."""
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        child = subprocess.Popen([sys.executable, serving.__file__], stdout=subprocess.PIPE, stderr=file, text=True)
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
