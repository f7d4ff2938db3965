"""The server's application, called without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from enginewright.runtime.server.app import make_app
from enginewright.runtime.server.http.front import Front
from enginewright.runtime.server.http.options import ServerOptions

from .conftest import Reply


class InProcess:
    """An application of a bundle "m" and of others by their names; their engines start when requests need them.

    Use it within one event loop, and close its front end there.
    """

    def __init__(self, bundle: Path, others: Mapping[str, Path] = MappingProxyType({}), **options: Any) -> None:
        models = {"m": str(bundle), **{name: str(path) for name, path in others.items()}}
        self.front = Front(ServerOptions(models=models, **options))
        self._app = make_app(self.front)

    async def ask(self, path: str, body: Any, method: str = "POST", headers: Mapping[str, str] | None = None) -> Reply:
        """Returns the whole response. ``body``: bytes, or what is sent as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent: list[Any] = []
        delivered = False

        async def receive() -> Any:
            nonlocal delivered
            if delivered:  # the client stays until it has the answer
                await asyncio.get_running_loop().create_future()
            delivered = True
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        path, _, query = path.partition("?")
        scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": method, "path": path}
        scope |= {"query_string": query.encode(), "root_path": "", "scheme": "http", "client": ("127.0.0.1", 1)}
        names = {"host": "localhost", "content-type": "application/json", **(headers or {})}
        scope["headers"] = [(name.encode(), value.encode()) for name, value in names.items()]
        await self._app(scope, receive, send)
        start = sent[0]
        fields = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
        return Reply(start["status"], fields, b"".join(one.get("body", b"") for one in sent[1:]))
