"""The gate before the routes: hosts, origins, sizes, times and keys of a request."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .errors import NO_KEY, WRONG_KEY, ApiError, error_response, failed
from .front import Front
from .intake import IncomingBody, body_deadline
from .logs import log_request
from .tenants import Tenant

_LOG = logging.getLogger("enginewright.server")


class Gate:
    """Checks each request's hosts, origins, sizes, times and keys before the routes; gives each response an id, and
    logs it.

    Plain ASGI: Starlette's middleware would copy each piece of a stream.
    """

    def __init__(self, app: Any, front: Front) -> None:
        self._app, self._front = app, front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await self._refuse_websocket(receive, send)
        if scope["type"] != "http":
            return await self._app(scope, receive, send)  # type: ignore[no-any-return]
        began, status = time.monotonic(), 0
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = headers.get("x-request-id", "")
        request_id = request_id if _REQUEST_ID.fullmatch(request_id) else "req_" + secrets.token_hex(12)
        allowed = self._cors(headers)
        more = [(b"x-request-id", request_id.encode()), *allowed]
        if scope["path"].startswith("/v1/messages"):
            more.append((b"request-id", request_id.encode()))  # Anthropic's clients look for this one

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                if status:
                    raise RuntimeError("the response was begun already")
                status = message["status"]
                self._front.metrics.responded(status)
                message["headers"] = [*message.get("headers", ()), *more]
                if allowed:
                    message["headers"].append(_exposed(message["headers"]))
                if status in _CLOSING or (status >= 400 and scope["state"]["tenant"] is None):
                    message["headers"].append((b"connection", b"close"))
            elif scope["method"] == "HEAD":
                message["body"] = b""
            elif len(body := message.get("body", b"")) > _PIECE_BYTES:
                # A piece at a time, each once the client has taken the one before: no more waits for it in memory.
                for begin in range(0, len(body) - _PIECE_BYTES, _PIECE_BYTES):
                    piece = body[begin : begin + _PIECE_BYTES]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                message["body"] = body[begin + _PIECE_BYTES :]
            await send(message)

        # A stream's pieces go past what Starlette wraps around each: it looks for errors before the first alone.
        log: dict[str, Any] = {}  # of the request, by all that take part in its answer
        state = {"request_id": request_id, "send": sending, "tenant": None, "log": log}
        scope["state"] = {**scope.get("state", {}), **state}
        incoming: IncomingBody | None = None
        try:
            self._check(scope, headers)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await Response()(scope, receive, sending)
                return None
            tenant: Tenant | None = scope["state"]["tenant"]
            if tenant is not None and _has_body(headers):
                self._check_length(headers)
                _check_encoding(headers)
                incoming = self._front.intake.begin(tenant)
                receive = self._limited(receive, incoming)
            # What GET answers is what HEAD answers, without the body.
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(inner, receive, sending)
        except ApiError as e:
            if not status:
                await error_response(scope, e)(scope, receive, sending)
        except Exception:  # noqa: BLE001  nothing that a client sends ends the server
            _LOG.exception("request %s", request_id)
            if not status:
                await error_response(scope, failed())(scope, receive, sending)
        finally:
            if incoming is not None:
                self._front.intake.end(incoming)
            path = _PATH.sub("?", scope["path"])[:200]
            caller = scope["state"]["tenant"]
            log_request(
                {
                    **{"method": scope["method"], "path": path, "status": status},
                    **{"tenant": None if caller is None else caller.name or None, **log, "request_id": request_id},
                    "seconds": round(time.monotonic() - began, 4),
                }
            )
        return None

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raises ApiError for a request that must not reach the routes.

        Stores the request's tenant in the scope's state.
        """
        self._check_headers(scope, headers)
        path = scope["path"]
        if scope["method"] == "OPTIONS" or path in _OPEN_PATHS or path.startswith("/assets/"):
            return
        tenant = self._tenant(path, headers)
        if self._front.stopping and scope["method"] == "POST":
            raise ApiError(503, "the server is stopping", retry_after=self._front.options.drain_seconds)
        if (connection := scope["state"].get("connection")) is not None:  # Ray Serve's own proxies have none
            self._front.intake.enter(connection, tenant)
        scope["state"]["tenant"] = tenant

    def _check_headers(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raises ApiError for too many headers, another site's name, and an origin that isn't listed."""
        if (count := len(scope["headers"])) > _MOST_HEADERS:
            raise ApiError(431, f"the request has {count} headers, and {_MOST_HEADERS} are taken")
        host, path = headers.get("host", "").lower(), scope["path"]
        hosts = self._front.options.fixed_hosts
        if hosts is not None and path not in _ANY_HOST and _without_port(host) not in hosts:
            raise ApiError(403, f"the host {host[:80]!r} isn't this server's; --allowed-host names those that are")
        origin = headers.get("origin")
        if origin is not None and not self._may(origin, host):
            raise ApiError(403, f"pages of {origin[:80]!r} may not ask; --allowed-origin names those that may")
        if path == "/v1/responses" and headers.get("upgrade", "").lower() == "websocket":
            problem = ApiError(426, "responses are streamed as server-sent events; ask with POST, by HTTP/1.1")
            problem.headers["upgrade"] = "HTTP/1.1"
            raise problem

    def _tenant(self, path: str, headers: Mapping[str, str]) -> Tenant:
        """Returns the tenant of a request's key. Raises ApiError without a key, and for a key that isn't allowed for
        the path.
        """
        key = _key_of(headers)
        tenant = self._front.tenants.find(key)
        if tenant is None:
            what, problem = ("no key", NO_KEY) if key is None else ("a wrong key", WRONG_KEY)
            raise ApiError(401, what, problem=problem)
        if path in ("/live", "/metrics", "/props") and tenant.key is not None and not tenant.key.admin:
            raise ApiError(403, f"{path} is for keys with admin = true")
        return tenant

    def _may(self, origin: str, host: str) -> bool:
        allowed = self._front.options.allowed_origins
        return "*" in allowed or origin in allowed or origin.partition("://")[2].lower() == host

    def _cors(self, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
        origin = headers.get("origin")
        if origin is None or not self._may(origin, headers.get("host", "").lower()):
            return []
        fields = {"access-control-allow-origin": origin, "vary": "Origin"}
        if "access-control-request-method" in headers:
            fields |= {"access-control-allow-methods": "GET, HEAD, POST, DELETE", "access-control-max-age": "600"}
            fields["vary"] = "Origin, Access-Control-Request-Headers"
            names = headers.get("access-control-request-headers", "")
            if _HEADER_NAMES.fullmatch(names):
                fields["access-control-allow-headers"] = names
        return [(name.encode(), value.encode("latin-1", "replace")) for name, value in fields.items()]

    def _check_length(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError for a body whose content-length is too large."""
        most, length = self._front.options.max_body, headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > most:
            raise ApiError(413, f"the body has {length[:20]} bytes, and {most} are taken")

    def _limited(self, receive: Receive, incoming: IncomingBody) -> Receive:
        """Returns a ``receive`` that limits a body's size, rate and time, and the memory of all bodies. It raises
        ApiError.
        """
        options, intake, loop = self._front.options, self._front.intake, asyncio.get_running_loop()
        began = loop.time()

        async def limited() -> Message:
            if incoming.finished:
                return await receive()
            deadline = body_deadline(incoming.size, options.body_rate, options.body_seconds)
            try:
                async with asyncio.timeout_at(began + deadline) as limit:
                    incoming.wake = lambda: limit.reschedule(loop.time())
                    message = await receive()
            except TimeoutError:
                if incoming.refused is not None:
                    raise incoming.refused from None
                seconds = f"{deadline:g} s" if deadline == options.body_seconds else f"its {options.body_rate} bytes/s"
                raise ApiError(408, f"the body took more than {seconds}") from None
            finally:
                incoming.wake = lambda: None
            intake.add(incoming, len(message.get("body", b"")))
            if incoming.size > options.max_body:
                raise ApiError(413, f"the body has more than the {options.max_body} bytes that are taken")
            if not message.get("more_body", False):
                intake.finish(incoming)
            return message

        return limited

    async def _refuse_websocket(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.close", "code": 1008})


_ANY_HOST = frozenset({"/health", "/ping", "/version", "/api/version"})
"""Paths that are served for any Host header, or none: load balancers and orchestrators request them by address."""
_OPEN_PATHS = _ANY_HOST | {"/"}
"""Paths that need no key."""
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]{1,4096}")
_READABLE = frozenset(
    {
        *("cache-control", "content-language", "content-length", "content-type", "expires", "last-modified", "pragma"),
        *("connection", "vary"),
    }
)
"""Headers of a response that a web page may read without permission, or that are of no use to it."""
_MOST_HEADERS = 128
_CLOSING = frozenset({401, 403, 408, 413, 415, 431})
"""Statuses after which the connection is closed. Anything else that its client has sent isn't read."""
_PIECE_BYTES = 64 << 10
"""The most bytes of an answer that wait for a client to read them."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PATH = re.compile(r"[^A-Za-z0-9._~/-]")


def _exposed(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Returns the header that lets a page read all others of a response."""
    names = {name.decode("latin-1").lower() for name, _ in headers}
    shown = sorted(name for name in names - _READABLE if not name.startswith("access-control-"))
    return b"access-control-expose-headers", ", ".join(shown).encode("latin-1")


def _check_encoding(headers: Mapping[str, str]) -> None:
    """Raises ApiError for a compressed body, because the limits apply to the bytes as sent."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        problem = ApiError(415, f"the body is compressed ({encoding[:40]}), and isn't read so; send it uncompressed")
        problem.headers["accept-encoding"] = "identity"
        raise problem


def _without_port(host: str) -> str:
    """Returns the name of a Host header: without the port, and without the brackets of an IPv6 address."""
    name, _, port = host.rpartition(":")
    has_port = port.isdigit() and host.count(":") in (1, *range(3, 9))
    return (name if has_port else host).strip("[]")


def _has_body(headers: Mapping[str, str]) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _key_of(headers: Mapping[str, str]) -> str | None:
    """Returns the key from the header of OpenAI's clients, or that of Anthropic's; None without either."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" and key.strip() else headers.get("x-api-key")
