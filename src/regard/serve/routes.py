"""The routes.

    GET    /                    the page
    POST   /api/look            {"text", "model", "generate"}: {"job"}
    GET    /api/jobs/ID         {"state", "progress", "message"}; waiting, running, done, failed or stopped
    DELETE /api/jobs/ID         stops it; the same
    GET    /api/jobs/ID/page    {"meta", "blobs"}, as docs/page.md says; blobs in base64
    POST   /api/jobs/ID/without {"layer", "head"}: {"job"}, whose page is what changes without the head, as "effects"
    GET    /api/jobs/ID/crop    ?layer=&head=&rows=a-b&cols=c-d: exact weights, as a crop of the page, with its "data"

A refused request is answered with {"error": "text: expected ..., received ...; remedy: ..."}.
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
from regard.serve.jobs import Job, JobQueue
from regard.serve.model_registry import ModelRegistry
from regard.serve.requests import (
    Limits,
    LookRequest,
    RequestError,
    WithoutRequest,
    parse_head,
    parse_index,
    parse_look,
    parse_range,
)
from regard.serve.results import crop_weights, page_content

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
CHUNK = 2**18  # bytes that are sent at once: a client that does not read holds no more than that
DISCARDED = 2**23  # bytes of a too large request that are still read, so that its sender gets the answer


def application(registry: ModelRegistry, limits: Limits, host: str, port: int) -> Starlette:
    """The page and its API."""
    routes = Routes(registry, limits)
    app = Starlette(
        routes=[
            Route("/", routes.front, methods=["GET"]),
            Route("/api/look", routes.look, methods=["POST"]),
            Route("/api/jobs/{job}", routes.job, methods=["GET"]),
            Route("/api/jobs/{job}", routes.stop, methods=["DELETE"]),
            Route("/api/jobs/{job}/page", routes.page, methods=["GET"]),
            Route("/api/jobs/{job}/crop", routes.crop, methods=["GET"]),
            Route("/api/jobs/{job}/without", routes.without, methods=["POST"]),
        ],
        middleware=[Middleware(Guard, host=host, port=port)],  # type: ignore[arg-type]
        exception_handlers={
            RequestError: _on_request_error,
            HTTPException: _on_unknown_route,
            ClientDisconnect: _on_disconnect,
            Exception: _on_failure,
        },
        lifespan=routes.lifespan,
    )
    app.router.redirect_slashes = False
    return app


class Routes:
    """The handler of each route."""

    def __init__(self, registry: ModelRegistry, limits: Limits) -> None:
        self.registry, self.limits = registry, limits
        self.queue = JobQueue(registry, limits)
        self.example: Job | None = None  # the sentence that is shown before anything is typed
        self.front_pages: dict[bool, tuple[bytes, str]] = {}  # without and with the example: HTML, policy
        self.crop_limiter: CapacityLimiter | None = None  # crops are computed one at a time

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.example = self.queue.add(LookRequest(SENTENCE, self.registry.first), pinned=True)
        self.crop_limiter = CapacityLimiter(1)
        try:
            yield
        finally:
            await run_sync(self.queue.close)

    async def front(self, request: Request) -> Response:
        """The page; with the example, once it is computed."""
        done = self.example is not None and self.example.result is not None
        if done not in self.front_pages:
            self.front_pages[done] = await run_sync(self._front_page, done)
        html, content_policy = self.front_pages[done]
        headers = {"content-security-policy": content_policy}
        return ChunkedResponse(html, media_type="text/html; charset=utf-8", headers=headers)

    def _front_page(self, done: bool) -> tuple[bytes, str]:
        live = {
            "models": [{"name": name, "kind": kind} for name, kind in self.registry.kinds.items()],
            "model": self.registry.first,
            "text": SENTENCE,
            "limit": self.limits.characters,
            "most": self.limits.generate,
            "crop": self.limits.crop,
            "job": None if self.example is None else self.example.id,
        }
        content = Packed({"version": VERSION, "title": "regard", "runs": []})
        if done:
            assert self.example is not None and self.example.result is not None
            content = page_content(self.example.result.page)
        html = document(content, live=live)
        return html.encode(), f"{policy(live=True)}; frame-ancestors 'none'"

    async def look(self, request: Request) -> Response:
        """Add a job."""
        _check_content_type(request)
        look = parse_look(await _read_body(request, self.limits), self.registry.kinds, self.limits)
        return _json({"job": self.queue.add(look).id}, 202)

    async def job(self, request: Request) -> Response:
        """The state of a job."""
        return _state(self.queue.get(request.path_params["job"]))

    async def stop(self, request: Request) -> Response:
        """Stop a job."""
        return _state(self.queue.stop(request.path_params["job"]))

    async def page(self, request: Request) -> Response:
        """The page's content that a job computed."""
        return ChunkedResponse(self.queue.result(request.path_params["job"]).page, media_type="application/json")

    async def without(self, request: Request) -> Response:
        """Add a job: run the model again without one head."""
        _check_content_type(request)
        job = self.queue.get(request.path_params["job"])
        scene = self.queue.result(job.id).scene
        if scene is None or not isinstance(job.request, LookRequest):
            expected, received = "a look whose record is kept", "another, or one of a text that was too long for it"
            raise RequestError(410, bad_value("without", expected=expected, received=received))
        layer, head = parse_head(await _read_body(request, self.limits), [panel.heads for panel in scene])
        return _json({"job": self.queue.add(WithoutRequest(job.id, job.request.model, layer, head)).id}, 202)

    async def crop(self, request: Request) -> Response:
        """Exact weights of a part of a map."""
        scene = self.queue.result(request.path_params["job"]).scene
        if scene is None:
            expected, received = "a text whose queries and keys are kept", "one that was too long for that"
            raise RequestError(410, bad_value("crop", expected=expected, received=received))
        query = request.query_params
        panel = scene[parse_index("layer", query.get("layer"), len(scene))]
        if not panel.layer.exact:
            raise RequestError(409, bad_value("layer", expected="one that kept queries and keys", received=panel.name))
        head = parse_index("head", query.get("head"), panel.heads)
        rows, cols = (
            parse_range(name, query.get(name), size, self.limits.crop)
            for name, size in zip(("rows", "cols"), panel.shape, strict=True)
        )
        return _json(await run_sync(crop_weights, panel, head, rows, cols, limiter=self.crop_limiter))


class ChunkedResponse(Response):
    """A large response, sent in chunks, each when the one before it has been received."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for at in range(0, len(self.body), CHUNK):
            more = at + CHUNK < len(self.body)
            await send({"type": "http.response.body", "body": bytes(self.body[at : at + CHUNK]), "more_body": more})


def _check_content_type(request: Request) -> None:
    """Require JSON, which a form on another site's page cannot send."""
    received = request.headers.get("content-type", "")
    if received.partition(";")[0].strip().lower() != "application/json":
        error = bad_value("content-type", expected="application/json", received=repr(received[:80]))
        raise RequestError(415, error, connection="close")


async def _read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request, limited in bytes and in seconds whatever its headers say."""
    body, size = bytearray(), 0
    try:
        with anyio.fail_after(limits.reading):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limits.body:
                    body += chunk
                elif size > DISCARDED:
                    break
    except TimeoutError:
        error = bad_value("body", expected=f"all of it in {limits.reading:g} seconds", received=f"{size} bytes")
        raise RequestError(408, error, connection="close") from None
    if size > limits.body:
        expected = f"at most {limits.body} bytes"
        error = bad_value("body", expected=expected, received=f"{size} or more", remedy="a shorter text")
        raise RequestError(413, error, connection="close")
    return bytes(body)


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, media_type="application/json")


def _state(job: Job) -> Response:
    return _json({"state": job.state, "progress": round(job.progress, 4), "message": job.message})


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _json({"error": error.message}, error.status, error.headers)


async def _on_unknown_route(request: Request, error: Exception) -> Response:
    """No such path, or no such method."""
    assert isinstance(error, HTTPException)
    received = f"{request.method} {request.url.path}"[:80]
    message = str(bad_value("request", expected="one that the page makes", received=repr(received)))
    return _json({"error": message}, error.status_code, {**(error.headers or {}), "connection": "close"})


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client has gone: nobody will read this."""
    return Response(status_code=400)


async def _on_failure(request: Request, error: Exception) -> Response:
    """Our own mistake, which the server logs. (Answered outside of the guard, so with its headers.)"""
    return _json({"error": "the server failed; its terminal says why"}, 500, {**HEADERS, "connection": "close"})
