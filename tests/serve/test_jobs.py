"""The queue: states, stopping, forgetting, and errors that do not end it."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serve.serving import LONG, Gate, live, served, tiny, tokenizers

from regard.serve.jobs import Job, JobQueue
from regard.serve.model_registry import ModelRegistry
from regard.serve.requests import Limits, LookRequest, RequestError


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
