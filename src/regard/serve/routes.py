"""The routes.

    GET    /                    the page
    POST   /api/look            {"text", "model", "generate"}: {"job"}
    GET    /api/jobs/ID         {"state", "progress", "said"}; waiting, running, done, failed or stopped
    DELETE /api/jobs/ID         stops it; the same
    GET    /api/jobs/ID/page    {"meta", "blobs"}, as docs/page.md says; blobs in base64
    GET    /api/jobs/ID/crop    ?layer=&head=&rows=a-b&cols=c-d: exact weights, as a crop of the page, with its "data"

What is refused is refused in words: {"error": "text: expected ..., received ...; remedy: ..."}.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from regard.draw.page import document, policy
from regard.draw.page.pack import VERSION, Packed
from regard.errors import bad_value, missing_extra
from regard.serve.guard import HEADERS, Guard
from regard.serve.jobs import Job, Jobs
from regard.serve.model_registry import Shelf
from regard.serve.requests import Ask, Limits, Refused, ask, number, span
from regard.serve.results import cropped, unpacked

try:
    import anyio
    from anyio import CapacityLimiter
    from anyio.to_thread import run_sync
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
except ImportError as _error:
    raise missing_extra(_error.name or "starlette", "serve") from _error

__all__ = ["application"]

SENTENCE = "The cat that I saw yesterday ran away"
PIECE = 2**18  # bytes that are sent at once: a client that does not read holds no more than that
DISCARDED = 2**23  # bytes of a request that is too large that are read all the same, so that its sender hears why


def application(shelf: Shelf, limits: Limits, host: str, port: int) -> Starlette:
    """The page and what it asks for."""
    web = Web(shelf, limits)
    app = Starlette(
        routes=[
            Route("/", web.front, methods=["GET"]),
            Route("/api/look", web.look, methods=["POST"]),
            Route("/api/jobs/{job}", web.job, methods=["GET"]),
            Route("/api/jobs/{job}", web.stop, methods=["DELETE"]),
            Route("/api/jobs/{job}/page", web.page, methods=["GET"]),
            Route("/api/jobs/{job}/crop", web.crop, methods=["GET"]),
        ],
        middleware=[Middleware(Guard, host=host, port=port)],  # type: ignore[arg-type]
        exception_handlers={Refused: _refused, HTTPException: _unknown, ClientDisconnect: _gone, Exception: _broken},
        lifespan=web.lifespan,
    )
    app.router.redirect_slashes = False
    return app


class Web:
    """What each route answers."""

    def __init__(self, shelf: Shelf, limits: Limits) -> None:
        self.shelf, self.limits = shelf, limits
        self.jobs = Jobs(shelf, limits)
        self.first: Job | None = None  # the sentence that is there before somebody types one
        self.fronts: dict[bool, tuple[bytes, str]] = {}  # the page without it and with it, each with its policy
        self.one: CapacityLimiter | None = None  # crops are computed one at a time

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.first = self.jobs.add(Ask(SENTENCE, next(iter(self.shelf.offers))), pinned=True)
        self.one = CapacityLimiter(1)
        try:
            yield
        finally:
            await run_sync(self.jobs.close)

    async def front(self, request: Request) -> Response:
        """The page; with the first sentence, once it is computed."""
        done = self.first is not None and self.first.result is not None
        if done not in self.fronts:
            self.fronts[done] = await run_sync(self._front, done)
        html, rules = self.fronts[done]
        return Pieces(html, media_type="text/html; charset=utf-8", headers={"content-security-policy": rules})

    def _front(self, done: bool) -> tuple[bytes, str]:
        live = {
            "models": [{"name": name, "kind": kind} for name, kind in self.shelf.kinds.items()],
            "model": next(iter(self.shelf.offers)),
            "text": SENTENCE,
            "limit": self.limits.characters,
            "most": self.limits.generate,
            "crop": self.limits.crop,
            "job": None if self.first is None else self.first.id,
        }
        content = Packed({"version": VERSION, "title": "regard", "runs": []})
        if done:
            assert self.first is not None and self.first.result is not None
            content = unpacked(self.first.result.page)
        html = document(content, live=live)
        return html.encode(), f"{policy(live=True)}; frame-ancestors 'none'"

    async def look(self, request: Request) -> Response:
        """A new job."""
        _check_type(request)
        asked = ask(await _body(request, self.limits), self.shelf.kinds, self.limits)
        return _json({"job": self.jobs.add(asked).id}, 202)

    async def job(self, request: Request) -> Response:
        """How far a job is."""
        return _state(self.jobs.get(request.path_params["job"]))

    async def stop(self, request: Request) -> Response:
        """Stop a job."""
        return _state(self.jobs.stop(request.path_params["job"]))

    async def page(self, request: Request) -> Response:
        """What a job made."""
        return Pieces(self.jobs.result(request.path_params["job"]).page, media_type="application/json")

    async def crop(self, request: Request) -> Response:
        """Exact weights of a part of a map."""
        scene = self.jobs.result(request.path_params["job"]).scene
        if scene is None:
            raise Refused(
                410,
                bad_value(
                    "crop", expected="a text whose queries and keys are kept", received="one that was too long for that"
                ),
            )
        said = request.query_params
        panel = scene[number("layer", said.get("layer"), len(scene))]
        if not panel.layer.exact:
            raise Refused(409, bad_value("layer", expected="one that kept queries and keys", received=panel.name))
        n, m = panel.shape
        head = number("head", said.get("head"), panel.heads)
        rows, cols = (span(what, said.get(what), size, self.limits.crop) for what, size in (("rows", n), ("cols", m)))
        return _json(await run_sync(cropped, panel, head, rows, cols, limiter=self.one))


class Pieces(Response):
    """A large answer, sent in pieces, each when the one before it has been taken."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for at in range(0, len(self.body), PIECE):
            more = at + PIECE < len(self.body)
            await send({"type": "http.response.body", "body": bytes(self.body[at : at + PIECE]), "more_body": more})


def _check_type(request: Request) -> None:
    """A form of somebody else's page cannot send JSON."""
    said = request.headers.get("content-type", "")
    if said.partition(";")[0].strip().lower() != "application/json":
        raise Refused(
            415, bad_value("content-type", expected="application/json", received=repr(said[:80])), connection="close"
        )


async def _body(request: Request, limits: Limits) -> bytes:
    """What was sent, whatever its headers say of its size: so much, in so many seconds, and no more."""
    body, size = bytearray(), 0
    try:
        with anyio.fail_after(limits.reading):
            async for piece in request.stream():
                size += len(piece)
                if size <= limits.body:
                    body += piece
                elif size > DISCARDED:
                    break
    except TimeoutError:
        raise Refused(
            408,
            bad_value("body", expected=f"all of it in {limits.reading:g} seconds", received=f"{size} bytes"),
            connection="close",
        ) from None
    if size > limits.body:
        raise Refused(
            413,
            bad_value(
                "body", expected=f"at most {limits.body} bytes", received=f"{size} or more", remedy="a shorter text"
            ),
            connection="close",
        )
    return bytes(body)


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, media_type="application/json")


def _state(job: Job) -> Response:
    return _json({"state": job.state, "progress": round(job.progress, 4), "said": job.said})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _json({"error": error.why}, error.status, error.headers)


async def _unknown(request: Request, error: Exception) -> Response:
    """No such page, or no such method."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"[:80]
    words = str(bad_value("request", expected="one that the page makes", received=repr(asked)))
    return _json({"error": words}, error.status_code, {**(error.headers or {}), "connection": "close"})


async def _gone(request: Request, error: Exception) -> Response:
    """Who asked has gone: nobody will read this."""
    return Response(status_code=400)


async def _broken(request: Request, error: Exception) -> Response:
    """Our own mistake; the server's log says more. (It is answered outside of the guard.)"""
    return _json({"error": "the server failed; its terminal says why"}, 500, {**HEADERS, "connection": "close"})
