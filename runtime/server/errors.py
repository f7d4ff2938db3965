"""Responses that aren't what was asked for, in the shape of the protocol that was asked by."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Response

from ..shared.errors import BundleError, CapacityError, ContextError, EnginewrightError, OverloadError, RequestError
from .engine_client import EngineLostError, UnavailableError

_LOG = logging.getLogger("enginewright.server")
_encode = msgspec.json.Encoder(enc_hook=str).encode


def encoded(value: Any) -> bytes:
    """JSON. Numbers of any size may be in what a client sent and gets back."""
    try:
        return _encode(value)
    except OverflowError:
        return json.dumps(value, default=str).encode()


_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_KINDS |= {408: "timeout", 429: "rate_limit_error", **dict.fromkeys((405, 413, 426, 431), "invalid_request_error")}
_ANTHROPIC = {**_KINDS, 408: "timeout_error", 413: "request_too_large", 503: "overloaded_error"}
CONTEXT_CODE = "context_length_exceeded"
_MOST_HEADER = 1024
"""The most characters of a header's value: they may have names that a client chose."""


class ApiError(Exception):
    """A response that isn't what was asked for.

    Args:
        code: a name that clients look for, in place of the status.
        retry_after: seconds after which to ask again; each 503 has some.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        if status == 503 and retry_after is None:
            retry_after = 1.0
        kind = kind or _KINDS.get(status, "server_error")
        self.body = openai_error(message, kind, param=param, code=status if code is None else code)
        self.headers = {} if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}

    def body_for(self, path: str, request_id: str = "") -> dict[str, Any]:
        """Its body in the shape of the protocol that the path is of."""
        if path.startswith("/api/"):
            return {"error": str(self)}
        if path.startswith("/v1/messages"):
            return anthropic_error(self.status, str(self), request_id)
        return self.body


def openai_error(message: str, kind: str, *, param: str | None = None, code: str | int | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(status: int, message: str, request_id: str) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    error = {"type": _ANTHROPIC.get(status, "api_error"), "message": message}
    return {"type": "error", "error": error, "request_id": request_id or None}


def api_error(error: EnginewrightError) -> ApiError:
    """The response of one of our errors."""
    message = error.message + (f". {error.hint}" if error.hint else "")
    name, _, rest = error.message.partition(":")
    name = name.strip("'")
    if name == "chat":  # what a template says of them
        name = "tools" if rest.startswith(" tools:") else "messages"
    param = name if name.replace("_", "").replace("[", "").replace("]", "").isalnum() and len(name) < 64 else None
    if isinstance(error, OverloadError):
        return ApiError(429, message, retry_after=error.retry_after)
    if isinstance(error, UnavailableError):
        return ApiError(503, message, retry_after=error.retry_after)
    if isinstance(error, EngineLostError):
        return ApiError(503, message)
    if isinstance(error, (RequestError, CapacityError)):
        return ApiError(400, message, param=param, code=CONTEXT_CODE if isinstance(error, ContextError) else None)
    _LOG.error(
        "a request failed: %s", error
    )  # it may name files of this machine, which are none of a client's business
    what = "the model's bundle can't be read" if isinstance(error, BundleError) else "the request failed in the engine"
    return ApiError(503, f"{what}; the server's log says why")


def failed() -> ApiError:
    return ApiError(503, "the server failed; its log says why")


def error_response(path: str, error: ApiError, request_id: str = "") -> Response:
    """Makes a response in the shape of the protocol that the path is of."""
    return json_response(error.body_for(path, request_id), error.status, error.headers)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoded(value), status, clean_headers(headers or {}), "application/json")


def clean_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns headers whose values are printable ASCII of a bounded length, whatever a client's names have."""
    clean = {}
    for name, value in headers.items():
        text = "".join(c if " " <= c <= "~" else "?" for c in value[:_MOST_HEADER])
        clean[name] = text.strip() if len(value) <= _MOST_HEADER else text[: _MOST_HEADER - 3].rstrip() + "..."
    return clean
