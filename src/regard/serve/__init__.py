"""The page, live on this machine: type a text, pick a model, see it; zoom in, and exact weights are computed.

    browser
     │  server.py     a socket; connections have deadlines, and their number is limited
     ▼
    bytes
     │  guard.py      refuses other sites' pages and foreign host names
     ▼
    request
     │  routes.py     the routes; requests.py checks requests
     ▼
    LookRequest
     │  jobs.py       a queue, one worker thread, results that are kept for a while
     ▼
    Job
     │  model_registry.py  the models that may be asked for, loaded on first use
     │  results.py    runs the model and makes the page's content; exact crops
     ▼
    LookResult

Only models that were named at the start can be asked for: no request names a file.
"""

from __future__ import annotations

import sys
import threading
import webbrowser
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from regard.serve.model_registry import DEFAULT, ModelRegistry
from regard.serve.requests import Limits

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["Limits", "application", "serve"]

Models = Iterable[str] | Mapping[str, Any]


def serve(
    models: Models = DEFAULT,
    host: str = "127.0.0.1",
    port: int = 8808,
    *,
    open_browser: bool = False,
    limits: Limits | None = None,
) -> None:
    """Serve the page until Ctrl-C.

    Args:
        models: the models that may be asked for: names or paths as `models.load` takes them; or a mapping of names to
            those, to models of regard, or to pairs `(model, tokenizer)`. By default the installed embedded models.
        host: the address to listen on: by default only this machine can connect ("0.0.0.0": everyone).
        port: 0 takes a free one. The address is printed.
        open_browser: whether to open the page in the browser.
        limits: how much may be asked for, and how much is kept.
    """
    from regard.serve import server  # brings uvicorn

    with server.listen(host, port) as listening:
        port = listening.getsockname()[1]
        app = application(models, host=host, port=port, limits=limits)
        url = server.url(host, port)
        print(f"regard: {url} (Ctrl-C ends it)", flush=True)
        if not server.is_loopback(listening):
            print("regard: everyone who can reach this machine can use it", file=sys.stderr, flush=True)
        if open_browser:  # (some browsers return only when they are closed)
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        server.run(app, listening)


def application(
    models: Models = DEFAULT, *, host: str = "127.0.0.1", port: int = 8808, limits: Limits | None = None
) -> Starlette:
    """The ASGI application of `serve`, for a server of your own. It answers only to the names of `host` and `port`."""
    from regard.serve import routes  # brings starlette

    limits = limits or Limits()
    return routes.application(ModelRegistry(models, limits.models), limits, host, port)
