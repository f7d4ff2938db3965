"""The page at ``/``: its files, with a policy by which it loads nothing from elsewhere, and its live view's figures."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...shared.errors import EnginewrightError, RequestError
from ..engines.engine_client import Model
from .routes import Routes, from_query

FOLDER = Path(__file__).parent / "page"
POLICY = "; ".join(
    (
        *("default-src 'self'", "object-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        "require-trusted-types-for 'script'; trusted-types 'none'",  # whatever would read a text as HTML fails
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
    ".woff2": "font/woff2",
}
_FRESH_SECONDS = 0.25
"""The shortest time between two questions to an engine, however many pages show it."""
_PATIENCE_SECONDS = 3.0


@dataclass(frozen=True)
class _File:
    data: bytes
    kind: str
    tag: str

    @classmethod
    def read(cls, path: Path, keys: bool) -> _File:
        data = path.read_bytes()
        if keys:
            data = data.replace(b'data-keys="no"', b'data-keys="yes"')
        return cls(data, _TYPES[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:16]}"')

    def response(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.data, 200, headers, self.kind)


class _Looks:
    """The figures of engines for the page. Pages that ask at the same time share an answer."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[float, asyncio.Task[dict[str, Any]]]] = {}

    async def at(self, model: Model) -> dict[str, Any] | None:
        """Returns the live state of a model's engine; None if the engine doesn't answer in time."""
        now = asyncio.get_running_loop().time()
        when, task = self._asked.get(model.name, (0.0, None))
        if task is None or (task.done() and now - when > _FRESH_SECONDS):
            task = asyncio.create_task(model.ask("live"))
            self._asked[model.name] = now, task
        done, _ = await asyncio.wait((task,), timeout=_PATIENCE_SECONDS)
        if not done or isinstance(task.exception(), (EnginewrightError, TimeoutError)):
            return None
        return task.result()


def add_page(routes: Routes, models: Mapping[str, Model], *, keys: bool) -> None:
    """Adds the page's routes. ``keys``: True if requests need a key, for which the page asks."""
    paths = [path for path in FOLDER.rglob("*") if path.suffix in _TYPES]
    files = {path.relative_to(FOLDER).as_posix(): _File.read(path, keys) for path in paths}
    looks = _Looks()

    @routes.get("/", listed=False)
    async def page(request: Request) -> Response:
        """Returns the chat page."""
        return files["index.html"].response(request)

    @routes.get("/assets/{name:path}", listed=False)
    async def asset(request: Request) -> Response:
        """Returns a file of the web page."""
        name = request.path_params["name"]
        if name not in files:
            raise HTTPException(404)
        return files[name].response(request)

    @routes.get("/live")
    async def live(request: Request) -> Response:
        """Returns current figures of one model's engine, the first model's unless the query names a ``model``."""
        name = from_query(request, "model", next(iter(models)))
        if name not in models:
            raise RequestError(f"model: there is no {name[:80]!r}", hint=f"There is {', '.join(models)}.")
        status = {
            "model": name,
            "models": {name: one.describe() for name, one in models.items()},
            "engine": await looks.at(models[name]),
        }
        return Response(
            msgspec.json.encode(status), headers={"cache-control": "no-store"}, media_type="application/json"
        )
