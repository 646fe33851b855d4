"""Jobs: a queue, one worker thread (a watch sees only the thread that it began in), and results that are kept for a
while."""

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
from regard.serve.model_registry import ModelRegistry
from regard.serve.requests import Limits, LookRequest, RequestError, WithoutRequest
from regard.serve.results import LookResult, run_look, run_without

__all__ = ["Job", "JobQueue"]

log = logging.getLogger("regard.serve")


def _escape_controls(record: logging.LogRecord) -> bool:
    """A model's error may quote a text: its control characters must not reach the terminal that shows the log."""
    record.msg, record.args = printable(record.getMessage(), lines=True), ()
    if record.exc_info:
        record.exc_text = printable(logging.Formatter().formatException(record.exc_info), lines=True)
    return True


log.addFilter(_escape_controls)

CLEANUP_INTERVAL = 30.0  # seconds, while the queue is empty
LOADING_SHARE = 0.4  # of the progress bar


class JobStopped(Exception):
    """Raised inside a job to end it."""


@dataclass(eq=False)
class Job:
    """A look that was asked for, and its progress. Its id cannot be guessed."""

    request: LookRequest | WithoutRequest
    pinned: bool = False  # never forgotten, and computed even if nobody asks for it
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    state: Literal["waiting", "running", "done", "failed", "stopped"] = "waiting"
    progress: float = 0.0
    message: str = ""
    stop_requested: bool = False
    last_asked: float = field(default_factory=time.monotonic)
    result: LookResult | None = None

    @property
    def finished(self) -> bool:
        return self.state in ("done", "failed", "stopped")

    def idle(self) -> float:
        """Seconds since somebody asked for it."""
        return 0.0 if self.pinned else time.monotonic() - self.last_asked

    def finish(self, state: Literal["done", "failed", "stopped"], message: str = "") -> None:
        self.progress, self.message, self.state = 1.0, message, state


class JobQueue:
    """All jobs. Its methods may be called from any thread."""

    def __init__(self, registry: ModelRegistry, limits: Limits) -> None:
        self.registry, self.limits = registry, limits
        self.jobs: dict[str, Job] = {}
        self.waiting: deque[Job] = deque()
        self.kept: OrderedDict[str, Job] = OrderedDict()  # jobs whose results are kept, the last asked for at the end
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.closed = False

    def add(self, request: LookRequest | WithoutRequest, pinned: bool = False) -> Job:
        """A new job, at the end of the queue."""
        with self.changed:
            self._forget_old()
            if len(self.waiting) >= self.limits.waiting or self.closed:
                message = f"the queue is full: {len(self.waiting)} texts are waiting; try again in a few seconds"
                raise RequestError(503, message, **{"retry-after": "5"})
            job = Job(request, pinned)
            self.jobs[job.id] = job
            self.waiting.append(job)
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="regard.serve", daemon=True)
                self.thread.start()
            self.changed.notify()
            return job

    def get(self, job_id: str) -> Job:
        """A job by its id."""
        with self.changed:
            self._forget_old()
            job = self.jobs.get(job_id)
            if job is None:
                raise RequestError(404, "unknown or expired job; look again")
            job.last_asked = time.monotonic()
            if job.id in self.kept:
                self.kept.move_to_end(job.id)
            if job in self.waiting:
                before = self.waiting.index(job)
                job.message = f"waiting, {before} before it" if before else "waiting"
            return job

    def result(self, job_id: str) -> LookResult:
        """The result of a job."""
        job = self.get(job_id)
        if job.state != "done":
            raise RequestError(409, bad_value("job", expected="one that is done", received=f"one that is {job.state}"))
        if job.result is None:
            raise RequestError(410, "the result of this job is no longer kept; look again")
        return job.result

    def stop(self, job_id: str) -> Job:
        """Stop a job: a waiting one at once, a running one when it next reports progress."""
        job = self.get(job_id)
        with self.changed:
            job.stop_requested = True
            if job in self.waiting:
                self.waiting.remove(job)
                job.finish("stopped", "stopped")
        return job

    def close(self, timeout: float = 5.0) -> None:
        """Stop everything, and wait for the worker thread."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        if self.thread is not None:
            self.thread.join(timeout)

    # The worker thread

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._run(job)
            del job  # else the last result would stay alive until there is another job
            _trim_memory()

    def _next(self) -> Job | None:
        with self.changed:
            while not self.waiting and not self.closed:
                self.changed.wait(CLEANUP_INTERVAL)
                self._forget_old()
            if self.closed:
                return None
            job = self.waiting.popleft()
            job.state, job.message = "running", ""
            return job

    def _run(self, job: Job) -> None:
        """Compute one job. An error of the caller becomes its message; one of ours is also logged. Nothing that a job
        raises may end this thread: there is no other."""
        try:
            self._keep(job, self._look(job))
        except JobStopped as why:
            job.finish("stopped", str(why))
        except (ValueError, TypeError, ImportError, OSError, RequestError) as error:
            job.finish("failed", str(error))
        except BaseException as error:  # (a tokenizer's panic is no `Exception`; Ctrl-C goes to the main thread)
            log.exception("a look failed")
            job.finish("failed", f"the model failed: {type(error).__name__}: {str(error)[:200]}")

    def _look(self, job: Job) -> LookResult:
        request = job.request
        start = 0.0 if self.registry.is_loaded(request.model) else LOADING_SHARE

        def report(share: float, message: str) -> None:
            if job.stop_requested or self.closed:
                raise JobStopped("stopped")
            if job.idle() > self.limits.patience:
                raise JobStopped("stopped: nobody asked for it any more")
            job.progress, job.message = share, message

        def loading(share: float) -> None:
            report(LOADING_SHARE * share, f"loading {request.model}")

        def looking(share: float, message: str) -> None:
            report(start + (1 - start) * share, message)

        report(0.0, "")
        if isinstance(request, WithoutRequest):
            scene = self.result(request.job).scene
            if scene is None:
                expected, received = "a text whose record is kept", "one that was too long for it"
                raise bad_value("without", expected=expected, received=received)
            return run_without(scene, request.layer, request.head)
        model, tokenizer = self.registry.get(request.model, loading)
        return run_look(model, tokenizer, request, self.limits, looking)

    def _keep(self, job: Job, result: LookResult) -> None:
        with self.changed:
            job.result = result
            if not job.pinned:
                self.kept[job.id] = job
            while len(self.kept) > 1 and not self._fits():
                _, oldest = self.kept.popitem(last=False)
                oldest.result = None
            job.finish("done")

    def _fits(self) -> bool:
        size = sum(job.result.size for job in self.kept.values() if job.result is not None)
        return len(self.kept) <= self.limits.results and size <= self.limits.memory

    def _forget_old(self) -> None:
        """Forget finished jobs that nobody asked for in a while; if there are very many, also the oldest."""
        finished = [job for job in self.jobs.values() if job.finished and not job.pinned]
        expired = [job for job in finished if job.idle() > self.limits.forget]
        excess = sorted(finished, key=lambda job: job.last_asked)[: max(0, len(finished) - 8 * self.limits.waiting)]
        for job in {*expired, *excess}:
            del self.jobs[job.id]
            self.kept.pop(job.id, None)
            job.result = None


def _trim_memory() -> None:
    """Return free memory to the system. (Kept results lie between freed memory, so glibc would keep nearly as much
    again.)"""
    with suppress(AttributeError, OSError, TypeError):  # another C library, another system
        ctypes.CDLL(None).malloc_trim(0)
