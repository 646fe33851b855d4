"""Jobs: a queue, one thread that does one after another (a watch sees the thread that it began in), and results that
are kept for a while."""

from __future__ import annotations

import ctypes
import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from regard.errors import bad_value, printable
from regard.serve.model_registry import Shelf
from regard.serve.requests import Ask, Limits, Refused
from regard.serve.results import Result, looked

__all__ = ["Job", "Jobs"]

log = logging.getLogger("regard.serve")


def _without_commands(record: logging.LogRecord) -> bool:
    """A model's error may hold words of a text: they do not command the terminal that shows the log."""
    record.msg, record.args = printable(record.getMessage(), lines=True), ()
    if record.exc_info:
        record.exc_text = printable(logging.Formatter().formatException(record.exc_info), lines=True)
    return True


log.addFilter(_without_commands)

TIDY = 30.0  # seconds between two looks at what may be forgotten, where nothing else happens
LOADING = 0.4  # the share of the bar that is for loading a model


class Stopped(Exception):
    """A job that is not to go on."""


@dataclass(eq=False)
class Job:
    """Something to look at, and how far it is. Its name cannot be guessed."""

    ask: Ask
    pinned: bool = False  # never forgotten, and computed even if nobody asks
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    state: Literal["waiting", "running", "done", "failed", "stopped"] = "waiting"
    progress: float = 0.0
    said: str = ""
    stop: bool = False
    asked: float = field(default_factory=time.monotonic)  # when somebody last asked for it
    result: Result | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ("done", "failed", "stopped")

    def idle(self) -> float:
        """Seconds since somebody asked for it."""
        return 0.0 if self.pinned else time.monotonic() - self.asked

    def end(self, state: Literal["done", "failed", "stopped"], said: str = "") -> None:
        """Nothing more will happen to it."""
        self.progress, self.said, self.state = 1.0, said, state


class Jobs:
    """All jobs that are known. Its functions may be called from any thread."""

    def __init__(self, shelf: Shelf, limits: Limits) -> None:
        self.shelf, self.limits = shelf, limits
        self.known: dict[str, Job] = {}
        self.waiting: deque[Job] = deque()
        self.kept: OrderedDict[str, Job] = OrderedDict()  # with results, those asked for last at the end
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.closed = False

    def add(self, ask: Ask, pinned: bool = False) -> Job:
        """A new job, at the end of the queue."""
        with self.changed:
            self._tidy()
            if len(self.waiting) >= self.limits.waiting or self.closed:
                raise Refused(
                    503,
                    bad_value(
                        "queue",
                        expected=f"fewer than {self.limits.waiting} texts that wait",
                        received=len(self.waiting),
                        remedy="try again in a few seconds",
                    ),
                    **{"retry-after": "5"},
                )
            job = Job(ask, pinned)
            self.known[job.id] = job
            self.waiting.append(job)
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="regard.serve", daemon=True)
                self.thread.start()
            self.changed.notify()
            return job

    def get(self, name: str) -> Job:
        """A job by its name."""
        with self.changed:
            self._tidy()
            job = self.known.get(name)
            if job is None:
                raise Refused(
                    404,
                    bad_value(
                        "job",
                        expected="one that is known",
                        received="another, or one that was forgotten",
                        remedy="look again",
                    ),
                )
            job.asked = time.monotonic()
            if job.id in self.kept:
                self.kept.move_to_end(job.id)
            if job in self.waiting:
                before = self.waiting.index(job)
                job.said = f"waiting, {before} before it" if before else "waiting"
            return job

    def result(self, name: str) -> Result:
        """What a job made."""
        job = self.get(name)
        if job.state != "done":
            raise Refused(409, bad_value("job", expected="one that is done", received=f"one that is {job.state}"))
        if job.result is None:
            raise Refused(
                410,
                bad_value(
                    "job",
                    expected="a result that is still kept",
                    received="one that was forgotten",
                    remedy="look again",
                ),
            )
        return job.result

    def stop(self, name: str) -> Job:
        """Stop a job: one that waits at once, one that runs as soon as it tells how far it is."""
        job = self.get(name)
        with self.changed:
            job.stop = True
            if job in self.waiting:
                self.waiting.remove(job)
                job.end("stopped", "stopped")
        return job

    def close(self, patience: float = 5.0) -> None:
        """Stop everything; wait for the thread, but not for ever."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join(patience)

    # The thread

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._do(job)
            del job  # else the last result would be held until there is another
            _give_back()

    def _next(self) -> Job | None:
        with self.changed:
            while not self.waiting and not self.closed:
                self.changed.wait(TIDY)
                self._tidy()
            if self.closed:
                return None
            job = self.waiting.popleft()
            job.state, job.said = "running", ""
            return job

    def _do(self, job: Job) -> None:
        """Compute one. What the asker got wrong is said to him; what we got wrong also goes to the log. Nothing that a
        job raises may end this thread: there is no other."""
        try:
            self._keep(job, self._looked(job))
        except Stopped as why:
            job.end("stopped", str(why))
        except (ValueError, TypeError, ImportError, OSError) as error:
            job.end("failed", str(error))
        except BaseException as error:  # (a panic of a tokenizer is no `Exception`; Ctrl-C goes to the main thread)
            log.exception("a look failed")
            job.end("failed", f"the model failed: {type(error).__name__}: {str(error)[:200]}")

    def _looked(self, job: Job) -> Result:
        ask, first = job.ask, 0.0 if self.shelf.ready(job.ask.model) else LOADING

        def tell(share: float, said: str) -> None:
            if job.stop or self.closed:
                raise Stopped("stopped")
            if job.idle() > self.limits.patience:
                raise Stopped("stopped: nobody asked for it any more")
            job.progress, job.said = share, said

        tell(0.0, "")
        model, tokenizer = self.shelf.take(ask.model, lambda share: tell(LOADING * share, f"loading {ask.model}"))
        return looked(model, tokenizer, ask, self.limits, lambda share, said: tell(first + (1 - first) * share, said))

    def _keep(self, job: Job, result: Result) -> None:
        with self.changed:
            job.result = result
            if not job.pinned:
                self.kept[job.id] = job
            while len(self.kept) > 1 and not self._fits():
                _, oldest = self.kept.popitem(last=False)
                oldest.result = None
            job.end("done")

    def _fits(self) -> bool:
        held = sum(job.result.size for job in self.kept.values() if job.result is not None)
        return len(self.kept) <= self.limits.results and held <= self.limits.memory

    def _tidy(self) -> None:
        """Forget jobs that are over and that nobody asked for in a while; of very many, the oldest."""
        over = [job for job in self.known.values() if job.over and not job.pinned]
        late = [job for job in over if job.idle() > self.limits.forget]
        many = sorted(over, key=lambda job: job.asked)[: max(0, len(over) - 8 * self.limits.waiting)]
        for job in {*late, *many}:
            del self.known[job.id]
            self.kept.pop(job.id, None)
            job.result = None


def _give_back() -> None:
    """Memory that is free goes back to the system. (What is kept lies between what is not, so that glibc, unless it is
    asked, keeps nearly as much again.)"""
    with suppress(AttributeError, OSError, TypeError):  # another C library, another system
        ctypes.CDLL(None).malloc_trim(0)
