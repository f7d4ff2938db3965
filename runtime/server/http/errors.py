"""Error responses, in the format of the protocol of the request."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from ...requests.sampling import SEQUENCE_OPTIONS
from ...shared.errors import BundleError, CapacityError, ContextError, EnginewrightError, OverloadError, RequestError
from ..engines.engine_client import EngineLostError, UnavailableError

_LOG = logging.getLogger("enginewright.server")
_encode = msgspec.json.Encoder(enc_hook=str).encode


def encoded(value: Any) -> bytes:
    """Returns a value as JSON. Unlike msgspec, it accepts integers of any size, which a client's own body may
    contain.
    """
    try:
        return _encode(value)
    except OverflowError:
        return json.dumps(value, default=str).encode()


OPENAI, RESPONSES, ANTHROPIC, OLLAMA = "openai", "responses", "anthropic", "ollama"
CONTEXT, NO_KEY, WRONG_KEY, NO_MODEL, NO_PATH = "context", "no_key", "wrong_key", "no_model", "no_path"
NO_RESPONSE, NO_ITEM, RATE, TOO_LARGE, NO_INFILL = "no_response", "no_item", "rate", "too_large", "no_infill"


@dataclass(frozen=True)
class Words:
    """The text of one kind of error in one protocol.

    Attributes:
        message: a format string. Its fields are the error's ``values``, its own message as ``detail``, and the
            ``seconds`` to wait.
        type: the error's type; empty for the type that belongs to the status.
        code: a name that programs compare; None if the protocol has none.
        patterns: program -> a regular expression that it searches in the message or the code. The name of a protocol's
            owner stands for the many clients that compare the texts of the owner's servers.
        means: the meaning of the code, for docs.
    """

    message: str
    type: str = ""
    code: str | None = None
    patterns: Mapping[str, str] = field(default_factory=dict)
    means: str = ""


_INVALID = "invalid_request_error"
_LENGTH = "This model's maximum context length is {context} tokens. However, your {what} resulted in {tokens} tokens"
_LENGTH_CODE = "(context_length_exceeded)"
"""The error code as it must occur in the message: langchain-openai looks for it there."""
_LITELLM_LENGTH = "(?i)this model's maximum context length is"  # litellm: exception_mapping_utils.py
_OPENCODE_LENGTH = r"(?i)maximum context length is \d+ tokens"  # opencode: provider/error.ts
_TRY_AGAIN = r"(?i)try again in\s*(\d+(?:\.\d+)?)\s*(s|ms|seconds?)"  # codex: codex-api/src/sse/responses.rs
_LITELLM_RATE = r"(?i)rate[\s_\-]*limit"  # litellm: exception_mapping_utils.py
_RATE = "Rate limit reached: {detail}. Please try again in {seconds}s."
_NOT_THERE = "The model `{model}` does not exist or you do not have access to it. Models of this server: {models}."

WORDS: Mapping[str, Mapping[str, Words]] = {
    CONTEXT: {
        OPENAI: Words(
            _LENGTH + ". Please reduce the length of the {what}: there is room for {room} tokens. " + _LENGTH_CODE,
            _INVALID,
            "context_length_exceeded",
            {
                "litellm, aider": _LITELLM_LENGTH,
                "opencode": _OPENCODE_LENGTH,
                "LangChain": r"\(context_length_exceeded\)",  # langchain-openai: chat_models/base.py, in the message
                "OpenAI": r"maximum context length is (\d+) tokens\. However, your \w+ resulted in",
            },
            "the prompt doesn't fit into the model's context",
        ),
        RESPONSES: Words(
            "Your input exceeds the context window of this model. "
            + _LENGTH
            + ". Please adjust your input and try again: there is room for {room} tokens. "
            + _LENGTH_CODE,
            _INVALID,
            "context_length_exceeded",
            {
                "LangChain": r"\(context_length_exceeded\)",
                "codex": "^context_length_exceeded$",  # codex-api/src/sse/responses.rs compares the code
                "opencode": r"(?i)exceeds the context window",  # provider/error.ts
                "litellm": _LITELLM_LENGTH,
            },
        ),
        ANTHROPIC: Words(
            "prompt is too long: {tokens} tokens > {most} maximum",
            _INVALID,
            patterns={
                "Claude Code": r"(?i)prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
                "opencode, LangChain, litellm": "prompt is too long",
            },
        ),
        OLLAMA: Words(
            "the input length exceeds the context length. " + _LENGTH,
            patterns={
                "opencode": r"(?i)input length.*exceeds.*context length",  # provider/error.ts
                "litellm": _LITELLM_LENGTH,
                "Ollama": "the input length exceeds the context length",  # ollama: runner, with truncate false
            },
        ),
    },
    NO_KEY: {
        OPENAI: Words(
            "You didn't provide an API key. You need to provide it in a header: Authorization: Bearer KEY.",
            patterns={"OpenAI": "You didn't provide an API key"},
        ),
        ANTHROPIC: Words("x-api-key header is required", patterns={"Claude Code": "(?i)x-api-key"}),
        OLLAMA: Words("unauthorized: a key is needed (Authorization: Bearer KEY)", patterns={"Ollama": "unauthorized"}),
    },
    WRONG_KEY: {
        OPENAI: Words(
            "Incorrect API key provided: this server doesn't know it.",
            _INVALID,
            "invalid_api_key",
            {"litellm": "Incorrect API key provided", "OpenAI": "^invalid_api_key$"},
            "the server doesn't know the API key",
        ),
        ANTHROPIC: Words("invalid x-api-key", patterns={"Claude Code": "(?i)x-api-key"}),
        OLLAMA: Words("unauthorized: this server doesn't know the key", patterns={"Ollama": "unauthorized"}),
    },
    NO_MODEL: {
        OPENAI: Words(
            _NOT_THERE,
            _INVALID,
            "model_not_found",
            {"litellm": "model_not_found", "OpenAI": "does not exist"},
            "the server has no model with this name",
        ),
        ANTHROPIC: Words("model: {model}. Models of this server: {models}.", patterns={"Claude Code": "^model: "}),
        OLLAMA: Words(
            "model '{model}' not found; models of this server: {models}",
            patterns={"Ollama": "model '[^']*' not found"},
        ),
    },
    NO_INFILL: {
        OPENAI: Words(
            "Infill is not supported by this model: {detail}", patterns={"llama.cpp": "Infill is not supported"}
        ),
        OLLAMA: Words("{model} does not support insert: {detail}", patterns={"Ollama": "does not support insert"}),
    },
    NO_PATH: {
        OPENAI: Words(
            "Unknown request URL: {detail}", _INVALID, "unknown_url", means="the server has no endpoint with this path"
        )
    },
    NO_RESPONSE: {
        OPENAI: Words(
            "{detail}",
            _INVALID,
            "previous_response_not_found",
            means="the server has no response with the id in previous_response_id",
        )
    },
    NO_ITEM: {
        OPENAI: Words(
            "Item with id '{item}' not found. Items are kept while their response is stored: pass them whole, or ask "
            "with `store` set to true.",
            _INVALID,
            patterns={"OpenAI": "^Item with id '.*' not found"},
        )
    },
    RATE: {
        OPENAI: Words(
            _RATE,
            "rate_limit_error",
            "rate_limit_exceeded",
            {"codex": _TRY_AGAIN, "litellm": _LITELLM_RATE, "opencode": "rate_limit"},
            "too many requests wait, or a quota of the key is used up",
        ),
        ANTHROPIC: Words(_RATE, patterns={"litellm": _LITELLM_RATE}),
        OLLAMA: Words(_RATE, patterns={"litellm": _LITELLM_RATE}),
    },
    TOO_LARGE: {
        OPENAI: Words(
            "Request entity too large: {detail}", _INVALID, patterns={"opencode": "(?i)request entity too large"}
        )
    },
}
"""Kind of error -> protocol -> its text. A protocol without an entry has the text of ``OPENAI``."""

_BY_STATUS = {413: TOO_LARGE, 429: RATE}
_KINDS = {400: _INVALID, 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_KINDS |= {408: "timeout", 429: "rate_limit_error", **dict.fromkeys((405, 413, 415, 426, 431), _INVALID)}
_ANTHROPIC_KINDS = {**_KINDS, 408: "timeout_error", 413: "request_too_large", 503: "overloaded_error"}
_PARAM = re.compile(r"[A-Za-z0-9_.\[\]]{1,63}")
"""A field's name at the beginning of a message, such as ``messages[1].content[0]``."""
_MOST_HEADER = 1024
"""The most characters of a header's value, because it may contain names that a client chose."""
_PROMPTS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/api/chat"), "messages"),
    **dict.fromkeys(("/v1/responses", "/v1/responses/input_tokens"), "input"),
    **dict.fromkeys(("/v1/completions", "/api/generate"), "prompt"),
}
"""Endpoint -> the field from which its prompt is made. Endpoints with several such fields aren't listed."""


def protocol_of(path: str) -> str:
    """Returns the protocol, such as OpenAI's or Anthropic's, to which the endpoint ``path`` belongs."""
    for begin, protocol in (("/api/", OLLAMA), ("/v1/messages", ANTHROPIC), ("/v1/responses", RESPONSES)):
        if path.startswith(begin):
            return protocol
    return OPENAI


PROTOCOL_NAMES: Mapping[str, Mapping[str, str]] = {
    RESPONSES: {"max_tokens": "max_output_tokens", "response_format": "text.format"},
    OLLAMA: {
        "max_tokens": "options.num_predict",
        "repetition_penalty": "options.repeat_penalty",
        "response_format": "format",
        **{name: f"options.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop")},
        **{name: f"options.{name}" for name in ("presence_penalty", "frequency_penalty", *SEQUENCE_OPTIONS)},
    },
}
"""Protocol -> fields of chat completions -> their names in the protocol's bodies, which errors have.

Ollama's bodies take the ``options`` of its row."""


class ApiError(Exception):
    """An error response.

    Args:
        status: the HTTP status.
        message: the problem.
        param: the body's field that is wrong.
        problem: the kind of error, a key of ``WORDS``; empty for the kind of the status, or for ``message`` unchanged.
        values: values for the format of the message.
        retry_after: seconds after which to try again; each 503 has some.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        problem: str = "",
        values: Mapping[str, Any] = MappingProxyType({}),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        if status == 503 and retry_after is None:
            retry_after = 1.0
        self.problem, self._values = problem or _BY_STATUS.get(status, ""), values
        self.headers = {} if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}

    def body_for(self, path: str, request_id: str = "") -> dict[str, Any]:
        """Returns the error's body, in the words and the format of the protocol of a path."""
        protocol = protocol_of(path)
        rows = WORDS.get(self.problem, {})
        words = rows.get(protocol) or rows.get(OPENAI) or Words("{detail}")
        param, detail = self.param, str(self)
        if param is not None and param in PROTOCOL_NAMES.get(protocol, {}) and detail.startswith(f"{param}: "):
            name = PROTOCOL_NAMES[protocol][param]
            param, detail = name, name + detail.removeprefix(param)
        values = {"detail": detail, "seconds": self.headers.get("retry-after", "1"), **self._values}
        if self.problem == CONTEXT:
            if param is None or (path in _PROMPTS and param in ("prompt", "messages", "input")):
                param = _PROMPTS.get(path, "prompt")
            values["what"] = param
        message = words.message.format(**values)
        if protocol == OLLAMA:
            return {"error": message}
        if protocol == ANTHROPIC:
            return anthropic_error(self.status, message, request_id)
        return openai_error(
            message, words.type or _KINDS.get(self.status, "server_error"), param=param, code=words.code
        )


def openai_error(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns the JSON body of an error in OpenAI's format.

    ``kind``, ``param`` and ``code`` are the error's fields ``type``, ``param`` and ``code``.
    """
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Returns the JSON body of an error in Anthropic's format. The status determines its type."""
    error = {"type": _ANTHROPIC_KINDS.get(status, "api_error"), "message": message}
    return {"type": "error", "error": error, "request_id": request_id or None}


def api_error(error: EnginewrightError) -> ApiError:
    """Returns the error response for one of our errors."""
    message = error.message + (f". {error.hint}" if error.hint else "")
    name, _, rest = error.message.partition(":")
    name = name.strip("'")
    if name == "chat":  # what a template says of them
        name = "tools" if rest.startswith(" tools:") else "messages"
    param = name if _PARAM.fullmatch(name) else None
    if isinstance(error, OverloadError):
        return ApiError(429, error.message, retry_after=error.retry_after)
    if isinstance(error, UnavailableError):
        return ApiError(503, message, retry_after=error.retry_after)
    if isinstance(error, EngineLostError):
        return ApiError(503, message)
    if isinstance(error, ContextError):
        return ApiError(400, message, param=param, problem=CONTEXT, values=_lengths(error))
    if isinstance(error, (RequestError, CapacityError)):
        return ApiError(400, message, param=param)
    _LOG.error(
        "a request failed: %s", error
    )  # it may name files of this machine, which are none of a client's business
    what = "the model's bundle can't be read" if isinstance(error, BundleError) else "the request failed in the engine"
    return ApiError(503, f"{what}; the server's log says why")


def _lengths(error: ContextError) -> dict[str, Any]:
    """Returns the numbers of tokens for the message about a prompt that is too long, by their names in
    ``Words.message``.
    """
    tokens = str(error.tokens) if error.exact else f"at least {error.tokens}"
    most = min(error.context, error.tokens - 1)  # a prompt of the whole context leaves no room for an answer
    return {"context": error.context, "room": error.room, "tokens": tokens, "most": most}


def failed() -> ApiError:
    return ApiError(503, "the server failed; its log says why")


def error_response(scope: Scope, error: ApiError) -> Response:
    """Makes a response in the format of the request's protocol, and records the reason for the log."""
    state, path = scope["state"], scope["path"]
    state["log"]["reason"] = str(error)
    if path.startswith("/v1/models") and any(name == b"anthropic-version" for name, _ in scope["headers"]):
        path = "/v1/messages"
    return json_response(error.body_for(path, state["request_id"]), error.status, error.headers)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoded(value), status, clean_headers(headers or {}), "application/json")


def clean_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns headers whose values are printable ASCII of a bounded length, even if they repeat a client's text."""
    clean = {}
    for name, value in headers.items():
        text = "".join(c if " " <= c <= "~" else "?" for c in value[:_MOST_HEADER])
        clean[name] = text.strip() if len(value) <= _MOST_HEADER else text[: _MOST_HEADER - 3].rstrip() + "..."
    return clean
