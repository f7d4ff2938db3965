"""The routes: OpenAI's, and what servers of this kind have besides. All is checked before an engine hears of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..engine.arguments import encode_within
from ..shared.errors import EnginewrightError, RequestError
from .answers import ChatShape, CompletionShape, InfillShape, Shape
from .anthropic import ANTHROPIC_VERSION, CountBody, MessagesBody, add_messages, model_info, model_page
from .bodies import Body, ChatBody, CompletionBody, DetokenizeBody, Fields, InfillBody, TokenizeBody, body_schema
from .engine_client import Model
from .errors import NO_PATH, ApiError, api_error, error_response, failed, json_response
from .front import VERSION, Front, tokenizer_of
from .gate import Gate
from .jobs import Order, answer
from .ollama import GenerateBody, OllamaChatBody, ShowBody, add_ollama
from .page import add_page
from .responses import InputTokensBody, ResponsesBody, add_responses
from .tenants import QuotaError
from .tools import tool_choice
from .unsupported import text_only

BODIES: Mapping[str, type[Fields]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/infill": InfillBody,
    "/v1/responses": ResponsesBody,
    "/v1/responses/input_tokens": InputTokensBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountBody,
    "/api/chat": OllamaChatBody,
    "/api/generate": GenerateBody,
    "/api/show": ShowBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
"""Endpoint -> the fields of its body."""


def make_app(front: Front) -> Gate:
    """The server as an ASGI application, without its start and its end: ``serve`` has these."""
    app = FastAPI(title="Enginewright", version=VERSION, docs_url=None, redoc_url=None, responses=_ERRORS)

    @app.exception_handler(EnginewrightError)
    async def _ours(request: Request, error: EnginewrightError) -> Response:
        return await _api(request, api_error(error))

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> Response:
        return error_response(request.scope, error)

    @app.exception_handler(RequestValidationError)
    async def _odd_query(request: Request, error: RequestValidationError) -> Response:
        where = next((one.get("loc", ()) for one in error.errors()), ())
        name = str(where[-1])[:64] if where else "the query"
        return await _api(request, ApiError(400, f"{name}: it isn't a value of its type", param=name))

    @app.exception_handler(ClientDisconnect)
    async def _left(request: Request, error: ClientDisconnect) -> Response:
        return await _api(request, ApiError(400, "the body isn't whole: the client left"))

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> Response:
        return await _api(request, failed())  # Starlette raises the error again, and Gate logs it

    @app.exception_handler(QuotaError)
    async def _quota(request: Request, error: QuotaError) -> Response:
        return await _api(request, ApiError(429, str(error), retry_after=error.retry_after))

    @app.exception_handler(404)
    async def _no_route(request: Request, error: Exception) -> Response:
        path = request.url.path
        message = f"{request.method[:20]} {path[:80]}.{_hint_of(path)}"
        return await _api(request, ApiError(404, message, problem=NO_PATH))

    @app.exception_handler(405)
    async def _no_method(request: Request, error: HTTPException) -> Response:
        problem = ApiError(405, f"{request.url.path[:80]} doesn't take {request.method[:20]}")
        methods = dict(error.headers or {}).get("Allow", "").split(", ")
        problem.headers["allow"] = ", ".join(methods + ["HEAD"] * ("GET" in methods and "HEAD" not in methods))
        return await _api(request, problem)

    async def generation(request: Request, kind: type[Body], shape: type[Shape]) -> Response:
        body, ignored, charge = await front.body(request, kind)

        def order(model: Model) -> Order:
            replaced: list[str] = []
            if isinstance(body, ChatBody):
                body.messages, replaced = text_only(body.messages)
            return Order(body, shape, [*ignored, *replaced])

        return await answer(front, request, charge, body.model, order)

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions."""
        return await generation(request, ChatBody, ChatShape)

    @app.post("/v1/completions", openapi_extra=body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        """OpenAI's completions, of text or token ids."""
        return await generation(request, CompletionBody, CompletionShape)

    @app.post("/infill", openapi_extra=body_schema(InfillBody))
    async def infill(request: Request) -> Response:
        """llama.cpp's answer to the text before and after a gap."""
        return await generation(request, InfillBody, InfillShape)

    add_responses(app, front)
    add_messages(app, front)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The models that there are, by all their names; as Anthropic lists them where its version is named."""
        rows = [_model_row(front, name, model) for name, model in front.names.items()]
        if ANTHROPIC_VERSION in request.headers:
            return json_response(model_page([model_info(row) for row in rows], request.query_params))
        return json_response({"object": "list", "data": rows})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        """One of them."""
        known = front.model(name)
        row = _model_row(front, front.name(name, known), known)
        return json_response(model_info(row) if ANTHROPIC_VERSION in request.headers else row)

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or a conversation."""
        body, _, charge = await front.body(request, TokenizeBody)
        with charge:
            work = partial(_tokenized, front, front.model(body.model), body)
            tokens = await front.in_thread(charge.tenant.name, work, charge.size)
            charge.tokens = tokens["count"]
            return json_response(tokens)

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body, _, charge = await front.body(request, DetokenizeBody)
        with charge:
            charge.tokens = len(body.tokens)
            work = partial(_detokenized, front.model(body.model), body.tokens)
            text = await front.in_thread(charge.tenant.name, work, charge.size)
            return json_response({"prompt": text, "content": text})

    @app.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> Response:
        """A model's special tokens and chat template, as vLLM tells them."""
        tokenizer = tokenizer_of(front.model(model))
        return json_response({**tokenizer.special_tokens, "chat_template": tokenizer.chat_templates.get("default")})

    @app.get("/health")
    async def health() -> Response:
        """200 where every model that should answer does."""
        states = {name: one.state for name, one in front.models.items()}
        late = [name for name, one in front.models.items() if one.overdue]
        well = not late and not front.stopping and all(state in ("ready", "unloaded") for state in states.values())
        return json_response(
            {"status": "ok" if well else "unavailable", "models": states, "overdue": late}, 200 if well else 503
        )

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def ping() -> Response:
        """200: the front end answers."""
        return Response("")

    @app.get("/version")
    async def version() -> Response:
        """Enginewright's version."""
        return json_response({"version": VERSION})

    add_ollama(app, front)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The metrics in Prometheus' text format."""
        return Response(front.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/props")
    async def props() -> Response:
        """The promises of each model's answers, and its state."""
        return json_response({"models": {name: _props(front, one) for name, one in front.models.items()}})

    add_page(app, front.models, keys=front.tenants.needed)
    return Gate(app, front)


def _hint_of(path: str) -> str:
    """Returns a hint for a path that is an endpoint's but for its beginning, as of a base URL without /v1."""
    tail = next((tail for tail in _TAILS if path.rstrip("/").endswith(tail)), None)
    if tail is None:
        return ""
    bases = "OpenAI's clients take a base URL that ends with /v1, and Anthropic's and Ollama's take one without."
    return f" Did you mean {_TAILS[tail]}? {bases}"


_PATHS = ("/v1/models", "/api/tags", *BODIES)
_TAILS = dict(
    sorted(
        ((path.removeprefix("/v1").removeprefix("/api"), path) for path in _PATHS),
        key=lambda pair: len(pair[0]),
        reverse=True,
    )
)
"""The end of a path without its base -> the path; the longest first."""


def _model_row(front: Front, name: str, model: Model) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(model.created),
        "owned_by": "enginewright",
        "max_model_len": model.model.context_length,
        "system_fingerprint": front.fingerprint(model),
        **({} if name == model.name else {"root": model.name}),
    }


def _props(front: Front, model: Model) -> dict[str, Any]:
    exact = front.exact(model)
    promise = (
        "a request's tokens and log-probabilities are the same alone and in any batch, from the prefix cache or "
        "computed anew, with tokens computed ahead or without"
        if exact
        else "on this target a request's tokens may differ with the other requests of a step"
    )
    return {
        **model.describe(),
        "exact": exact,
        "guarantee": promise,
        "system_fingerprint": front.fingerprint(model),
        "model": model.model.name,
        "context_length": model.model.context_length,
        "chat_template": model.tokenizer is not None and bool(model.tokenizer.chat_templates),
        "template_appends": None if model.tokenizer is None else model.tokenizer.template_appends,
        "default_generation_settings": dict(model.model.generation_defaults),
        "executor": model.info.get("executor", {}),
        "kv_cache": model.info.get("kv_cache", ""),
        "kept_turns": len(front.turns(model)),
        "total_slots": int(model.options.get("max_requests", 64)),
    }


def _detokenized(model: Model, tokens: Sequence[int]) -> str:
    size = model.model.vocab_size
    if wrong := [index for index in tokens if not 0 <= index < size]:
        raise RequestError(f"tokens: {wrong[0]} is outside the vocabulary of {size}")
    return tokenizer_of(model).decode(tokens, skip_special_tokens=False)


def _tokenized(front: Front, model: Model, body: TokenizeBody) -> dict[str, Any]:
    tokenizer = tokenizer_of(model)
    if body.messages is not None:
        body.messages, _ = text_only(body.messages)
        prompt, _ = front.chat_prompt(model, body, tool_choice(body.tools), "", splice=False)
        ids = list(prompt.ids)
    else:
        text = body.prompt if body.prompt is not None else body.content
        if text is None:
            raise RequestError("prompt: there is neither a prompt nor messages", hint="Pass one of them.")
        # As vLLM's: a prompt gets the tokens that the model expects around a text; llama.cpp's content doesn't.
        choice = body.add_special if body.add_special_tokens is None else body.add_special_tokens
        special = body.prompt is not None if choice is None else choice
        encode = partial(tokenizer.encode, add_special_tokens=special)
        name = "content" if body.prompt is None else "prompt"
        ids = encode_within(encode, text, model.model.context_length - 1, name) if text else encode(text)
    counted: dict[str, Any] = {"count": len(ids), "max_model_len": model.model.context_length, "tokens": ids}
    if body.with_pieces:
        counted["tokens"] = [{"id": index, "piece": _piece(tokenizer.token_bytes(index))} for index in ids]
    if body.return_token_strs:
        counted["token_strs"] = [tokenizer.spelled(index) for index in ids]
    return counted


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "What is wrong with the request, and where."},
    "503": {"description": "The model doesn't answer now; Retry-After says when to ask again."},
}


def _piece(data: bytes) -> str | list[int]:
    """Returns a token as llama.cpp has it: its text, or its bytes where they aren't text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
