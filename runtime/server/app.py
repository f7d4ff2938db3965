"""The routes: those of OpenAI's API, and further ones that such servers have. Requests are checked before an engine
runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from ..shared.errors import EnginewrightError, RequestError, meant
from ..tasks.arguments import encode_within
from ..tasks.context import kind_of
from .engines.engine_client import Model
from .http.errors import NO_PATH, ApiError, api_error, error_response, failed, json_response
from .http.fields import Fields
from .http.front import VERSION, Front
from .http.gate import Gate
from .http.page import add_page
from .http.routes import Routes
from .http.tenants import QuotaError
from .protocols.answers import ChatShape, CompletionShape, InfillShape, Shape
from .protocols.anthropic import ANTHROPIC_VERSION, CountBody, MessagesBody, add_messages, model_info, model_page
from .protocols.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, InfillBody, TokenizeBody
from .protocols.conversations import chat_prompt, reasoning_switches, tokenizer_of
from .protocols.jobs import Order, answer
from .protocols.ollama import GenerateBody, OllamaChatBody, ShowBody, add_ollama
from .protocols.pooled import add_pooled
from .protocols.pooled_bodies import POOLED
from .protocols.response_items import InputTokensBody, ResponsesBody
from .protocols.responses import add_responses
from .protocols.tools import tool_choice
from .protocols.unsupported import text_only

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
    **POOLED,
}
"""Endpoint -> the fields of its body."""

_OF_TOKENS = "vectors of single tokens and sparse vectors aren't served: /v1/embeddings has a vector for each text"
_CHANGES = "models aren't changed by requests: `optimize export` makes a bundle, and `optimize serve` serves it"

NOT_SERVED: Mapping[str, str] = {
    **dict.fromkeys(("/embed_all", "/embed_sparse"), _OF_TOKENS),
    **dict.fromkeys(("/api/create", "/api/copy", "/api/pull", "/api/push", "/api/delete"), _CHANGES),
}
"""Path that clients may request but that isn't served -> the reason, for the answer with status 404."""


def make_app(front: Front) -> Gate:
    """Returns the server as an ASGI application, without startup and shutdown, which ``serve`` does."""
    routes = Routes()

    async def generation(request: Request, kind: type[Body], shape: type[Shape]) -> Response:
        body, ignored, charge = await front.body(request, kind)

        def order(model: Model) -> Order:
            replaced: list[str] = []
            if isinstance(body, ChatBody):
                body.messages, replaced = text_only(body.messages)
            return Order(body, shape, [*ignored, *replaced])

        return await answer(front, request, charge, body.model, order)

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation, in OpenAI's format."""
        return await generation(request, ChatBody, ChatShape)

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continues a text or token ids, in OpenAI's format."""
        return await generation(request, CompletionBody, CompletionShape)

    @routes.post("/infill")
    async def infill(request: Request) -> Response:
        """Fills the gap between two texts, in llama.cpp's format."""
        return await generation(request, InfillBody, InfillShape)

    add_responses(routes, front)
    add_messages(routes, front)

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        """Lists all models' names, in Anthropic's format with the header anthropic-version, otherwise in OpenAI's."""
        rows = [_model_row(front, name, model) for name, model in front.names.items()]
        if ANTHROPIC_VERSION in request.headers:
            return json_response(model_page([model_info(row) for row in rows], request.query_params))
        return json_response({"object": "list", "data": rows})

    @routes.get("/v1/models/{name:path}")
    async def model(request: Request) -> Response:
        """Returns one model's entry of the list of models."""
        name = request.path_params["name"]
        known = front.model(name)
        row = _model_row(front, front.name(name, known), known)
        return json_response(model_info(row) if ANTHROPIC_VERSION in request.headers else row)

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Returns the token ids of a text or a conversation."""
        body, _, charge = await front.body(request, TokenizeBody)
        with charge:
            work = partial(_tokenized, front, front.model(body.model), body)
            tokens = await front.in_thread(charge.tenant.name, work, charge.size)
            charge.tokens = tokens["count"]
            return json_response(tokens)

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Returns the text of token ids."""
        body, _, charge = await front.body(request, DetokenizeBody)
        with charge:
            charge.tokens = len(body.tokens)
            work = partial(_detokenized, front.model(body.model), body.tokens)
            text = await front.in_thread(charge.tenant.name, work, charge.size)
            return json_response({"prompt": text, "content": text})

    @routes.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        """Returns a model's special tokens and chat template, in vLLM's format."""
        tokenizer = tokenizer_of(front.model(request.query_params.get("model")))
        return json_response({**tokenizer.special_tokens, "chat_template": tokenizer.chat_templates.get("default")})

    @routes.get("/health")
    async def health(request: Request) -> Response:
        """Returns status 200 if each model answers or is unloaded, otherwise 503."""
        states = {name: one.state for name, one in front.models.items()}
        late = [name for name, one in front.models.items() if one.overdue]
        well = not late and not front.stopping and all(state in ("ready", "unloaded") for state in states.values())
        return json_response(
            {"status": "ok" if well else "unavailable", "models": states, "overdue": late}, 200 if well else 503
        )

    async def ping(request: Request) -> Response:
        """Returns status 200 while the server runs, even if no model answers."""
        return Response("")

    routes.add("/ping", ping, "GET", "POST", listed=False)

    @routes.get("/version")
    async def version(request: Request) -> Response:
        """Returns Enginewright's version."""
        return json_response({"version": VERSION})

    add_ollama(routes, front)
    add_pooled(routes, front)

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Returns the metrics in Prometheus' text format."""
        return Response(front.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/props")
    async def props(request: Request) -> Response:
        """Returns each model's state, and whether its answers are reproducible."""
        return json_response({"models": {name: _props(front, one) for name, one in front.models.items()}})

    add_page(routes, front.models, keys=front.tenants.needed)

    @routes.get("/openapi.json", listed=False)
    async def openapi(request: Request) -> Response:
        """Describes the endpoints and the fields of their bodies, in the format OpenAPI."""
        return json_response(routes.openapi(VERSION, BODIES))

    async def not_served(request: Request) -> Response:
        raise ApiError(404, NOT_SERVED[request.url.path])

    for path in NOT_SERVED:
        routes.add(path, not_served, "GET", "POST", "DELETE", listed=False)

    return Gate(Starlette(routes=routes.all, exception_handlers=_HANDLERS), front)


async def _error_of_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, EnginewrightError)
    return error_response(request.scope, api_error(error))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.scope, error)


async def _client_left(request: Request, error: Exception) -> Response:
    return error_response(request.scope, ApiError(400, "the body isn't whole: the client left"))


async def _unforeseen(request: Request, error: Exception) -> Response:
    return error_response(request.scope, failed())  # Starlette raises the error again, and Gate logs it


async def _over_quota(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuotaError)
    return error_response(request.scope, ApiError(429, str(error), retry_after=error.retry_after))


async def _no_route(request: Request, error: Exception) -> Response:
    path = request.url.path
    known = [route.path for route in request.app.routes if "{" not in route.path]
    hint = _hint_of(path) or meant(path, known).rstrip()
    message = " ".join(filter(None, (f"{request.method[:20]} {path[:80]}.", hint)))
    return error_response(request.scope, ApiError(404, message, problem=NO_PATH))


async def _no_method(request: Request, error: Exception) -> Response:
    problem = ApiError(405, f"{request.url.path[:80]} doesn't take {request.method[:20]}")
    # Starlette's own list has the methods of the path's first route alone.
    routes = request.app.routes
    path = next(route.path for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    methods = {method for route in routes if route.path == path for method in route.methods}
    problem.headers["allow"] = ", ".join(sorted(methods))
    return error_response(request.scope, problem)


_HANDLERS: Mapping[Any, Any] = {
    EnginewrightError: _error_of_ours,
    ApiError: _api_error,
    ClientDisconnect: _client_left,
    QuotaError: _over_quota,
    404: _no_route,
    405: _no_method,
    Exception: _unforeseen,
}
"""Type of an exception, or status -> the function that makes the response."""


def _hint_of(path: str) -> str:
    """Returns a hint for an unknown path that ends like an endpoint's, as with a base URL without /v1; "" for other
    paths.
    """
    tail = next((tail for tail in _TAILS if path.rstrip("/").endswith(tail)), None)
    if tail is None:
        return ""
    bases = "OpenAI's clients take a base URL that ends with /v1, and Anthropic's and Ollama's take one without."
    return f"Did you mean {_TAILS[tail]}? {bases}"


_PATHS = ("/v1/models", "/api/tags", *BODIES)
_TAILS = dict(
    sorted(
        ((path.removeprefix("/v1").removeprefix("/api"), path) for path in _PATHS),
        key=lambda pair: len(pair[0]),
        reverse=True,
    )
)
"""The end of an endpoint's path, without /v1 or /api -> the whole path. The longest ends come first."""


def _model_row(front: Front, name: str, model: Model) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(model.created),
        "owned_by": "enginewright",
        "kind": kind_of(model.model),
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
        "kind": kind_of(model.model),
        "exact": exact,
        "guarantee": promise,
        "system_fingerprint": front.fingerprint(model),
        "model": model.model.name,
        "context_length": model.model.context_length,
        "chat_template": model.tokenizer is not None and bool(model.tokenizer.chat_templates),
        "reasoning_switches": reasoning_switches(model.tokenizer),
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
        prompt, _ = chat_prompt(front, model, body, tool_choice(body.tools), "", splice=False)
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


def _piece(data: bytes) -> str | list[int]:
    """Returns a token in llama.cpp's format: its text, or a list of its bytes if they aren't valid text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
