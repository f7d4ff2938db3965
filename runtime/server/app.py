"""The routes: OpenAI's, and what servers of this kind have besides. All is checked before an engine hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from ..engine import arguments
from ..executors.open import TARGETS
from ..requests.sampling import SamplingParams
from ..shared.errors import BundleError, CapacityError, EnginewrightError, OverloadError, RequestError
from ..text.tokenizer import Tokenizer
from . import ollama
from .answers import DONE, KEEP_ALIVE, ChatShape, CompletionShape, Given, Shape, error_body, event, usage
from .bodies import (
    IGNORED_HEADER,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    checked_kwargs,
    checked_messages,
    checked_params,
    decoded,
)
from .engine_client import EngineLostError, Model, Running, UnavailableError, open_models
from .metrics import Metrics
from .options import ServerOptions
from .page import add_page
from .records import Ended, Piece, Submit
from .tenants import FairTurns, QuotaError, Tenant, Tenants
from .tracing import Tracing, exporter_to
from .turns import Turns

_LOG = logging.getLogger("enginewright.server")
_VERSION = metadata.version("enginewright")
_encode = msgspec.json.Encoder(enc_hook=str).encode


class ApiError(Exception):
    """A response that isn't what was asked for."""

    def __init__(
        self, status: int, message: str, *, kind: str = "", param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        kinds = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
        kinds |= {404: "not_found_error", 408: "timeout", 429: "rate_limit_error"}
        kinds |= dict.fromkeys((405, 413, 431), "invalid_request_error")
        self.status, self.param = status, param
        self.body = error_body(message, kind or kinds.get(status, "server_error"), param=param, code=status)
        self.headers = {} if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}


def api_error(error: EnginewrightError) -> ApiError:
    """The response of one of our errors."""
    message = error.message + (f". {error.hint}" if error.hint else "")
    name = error.message.partition(":")[0].strip("'")
    name = "messages" if name == "chat" else name  # what a template says of them
    param = name if name.replace("_", "").replace("[", "").replace("]", "").isalnum() and len(name) < 64 else None
    if isinstance(error, OverloadError):
        return ApiError(429, message, retry_after=error.retry_after)
    if isinstance(error, UnavailableError):
        return ApiError(503, message, retry_after=error.retry_after)
    if isinstance(error, (EngineLostError, BundleError)):
        return ApiError(503, message, retry_after=1.0)
    if isinstance(error, (RequestError, CapacityError)):
        return ApiError(400, message, param=param)
    return ApiError(503, message)


def _failed() -> ApiError:
    return ApiError(503, "the server failed; its log says why")


def error_response(path: str, error: ApiError) -> Response:
    """In the shape of the protocol that the path is of."""
    body = ollama.error_body(str(error)) if path.startswith("/api/") else error.body
    return json_response(body, error.status, error.headers)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(value), status, headers, "application/json")


class Front:
    """The front end: models, tenants, turns, and what is done for a request before its engine has it.

    Args:
        options: see there.
        models: that were opened already.
    """

    def __init__(self, options: ServerOptions, models: dict[str, Model] | None = None) -> None:
        self.options = options
        self.models = open_models(options) if models is None else models
        self.tenants = Tenants(options.api_keys)
        self.metrics = Metrics(self.models)
        self.rendering = FairTurns()
        self.tracing = None if options.otlp is None else Tracing(exporter_to(options.otlp))
        self.stopping = False
        self.running: set[asyncio.Task[Any]] = set()
        self._pool = ThreadPoolExecutor(2, "text")
        self._turns: dict[str, Turns] = {}
        self._loading = asyncio.Lock()

    async def start(self) -> None:
        """Starts the engines, without waiting for them."""
        for model in list(self.models.values())[: self.options.max_loaded or None]:
            model.start()

    async def close(self) -> None:
        await asyncio.gather(*(model.close() for model in self.models.values()))
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def model(self, name: str | None) -> Model:
        """Raises ApiError for one that isn't there."""
        if name is None or self.options.any_model:
            return self.models.get(name or "", next(iter(self.models.values())))
        if name not in self.models:
            raise ApiError(404, f"model: there is no {name[:80]!r}; there is {', '.join(self.models)}", param="model")
        return self.models[name]

    async def loaded(self, model: Model) -> Model:
        """The model, once it answers. Another one that is idle is unloaded for it where only so many may be.

        Raises UnavailableError if none is idle, or it is starting again.
        """
        if model.state != "unloaded":
            return model
        async with self._loading:
            others = [one for one in self.models.values() if one.state not in ("unloaded", "failed", "closed")]
            if model.state == "unloaded" and self.options.max_loaded and len(others) >= self.options.max_loaded:
                idle = [one for one in others if one.state == "ready" and not one.running]
                if not idle:
                    raise UnavailableError(f"model {model.name!r} isn't loaded, and those that are are busy", 5.0)
                await min(idle, key=lambda one: one.last_used).close(unload=True)
            if model.state == "unloaded":
                model.start()
            await model.wait_until_ready()
        return model

    def turns(self, model: Model) -> Turns:
        """The finished turns of a model."""
        if model.hash not in self._turns:
            ends, tokenizer = list[str](), model.tokenizer
            if tokenizer is not None:
                ends = [tokenizer.guarded(tokenizer.spelled(index)) for index in model.model.eos_token_ids]
            self._turns[model.hash] = Turns([end for end in ends if end])
        return self._turns[model.hash]

    async def in_thread(self, tenant: str, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, done beside the event loop; tenants alternate."""
        async with self.rendering.turn(tenant):
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def fingerprint(self, model: Model) -> str | None:
        """Changes whenever the same request might get other tokens. None for a model that was never loaded."""
        if not model.info:
            return None
        executor = model.info.get("executor", {})
        how = executor.get("isa"), executor.get("numerics")
        about = (model.hash, model.target, *how, _VERSION)
        return "fp_" + hashlib.sha256(repr(about).encode()).hexdigest()[:16]

    def exact(self, model: Model) -> bool:
        """Whether a request's tokens hang on nothing but itself, on the model's target."""
        opening = TARGETS[model.target].opening if model.target in TARGETS else None
        return opening is not None and opening.exact

    def chat_prompt(self, model: Model, body: ChatBody | TokenizeBody, tenant: str, splice: bool) -> tuple[Given, int]:
        """A conversation's prompt, and how many of its tokens are a kept turn's. Runs in a thread."""
        tokenizer = _tokenizer(model)
        assert body.messages is not None
        special = tuple(tokenizer.special_names)
        options = {
            "add_generation_prompt": body.add_generation_prompt,
            "continue_final_message": bool(body.continue_final_message),
            **checked_kwargs(body.chat_template_kwargs, special),
        }
        text = tokenizer.guarded_chat(checked_messages(body.messages), of_params=_OF_PARAMS, **options)
        most = model.model.context_length - 1
        encode = partial(arguments.encode_within, tokenizer.encode_guarded, most=most, name="messages")
        ids, spliced = self.turns(model).encode(tenant, text, encode) if splice else (encode(text), 0)
        return Given(tokenizer.unguarded(text), ids, text), spliced

    def remember(self, model: Model, tenant: str, given: Given, text: str, ids: Sequence[int]) -> None:
        """Keeps a finished turn: its text, as the client has it, and its tokens."""
        tokenizer = model.tokenizer
        if tokenizer is not None and ids and ids[-1] in model.model.eos_token_ids and given.guarded is not None:
            end = tokenizer.guarded(tokenizer.spelled(ids[-1]))
            self.turns(model).add(tenant, given.guarded + text + end, [*given.ids, *ids])


_OF_PARAMS = frozenset(SamplingParams.__dataclass_fields__)


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise RequestError(f"model: {model.name} has no tokenizer", hint="Send token ids to /v1/completions.")
    return model.tokenizer


class Job:
    """One body on its way: its prompts and parameters, then the requests that run."""

    def __init__(
        self,
        front: Front,
        tenant: Tenant,
        model: Model,
        body: Body,
        kind: type[Shape],
        trace: str | None = None,
        request_id: str = "",
    ) -> None:
        self.front, self.tenant, self.model, self.body = front, tenant, model, body
        self._trace, self._request_id = trace, request_id
        self.params = body.params(model.model)
        sampling = checked_params(self.params)
        self.answers = sampling.n
        if body.streamed and (sampling.num_beams > 1 or sampling.best_of is not None):
            name = "num_beams" if sampling.num_beams > 1 else "best_of"
            raise RequestError(f"{name}: which answers are given is known at their end", hint="Leave stream out.")
        self.given: list[Given] = []
        self.spliced: int | None = None
        self.splices = isinstance(body, ChatBody) and body.splice and front.options.splice
        self.tokens = 0  # that it took
        self._kind = kind

    @property
    def requests(self) -> int:
        """How many there are of it: its prompts, with their answers."""
        return len(self.given) * self.answers

    async def prepare(self) -> None:
        """Makes the prompts."""
        body, front, model = self.body, self.front, self.model
        scope = self.tenant.name + (f"\0{body.cache_salt}" if body.cache_salt else "")
        self.scope = arguments.checked_name("cache_salt", scope)
        if isinstance(body, ChatBody):
            make = partial(front.chat_prompt, model, body, self.scope, self.splices)
            given, self.spliced = await front.in_thread(self.tenant.name, make)
            self.given = [given]
        else:
            assert isinstance(body, CompletionBody)
            self.given = await front.in_thread(self.tenant.name, partial(_prompts, model, body))
        self.shape = self._kind(
            body, model.name, model.tokenizer, front.fingerprint(model), self.params["seed"], self.spliced
        )

    def submit(self) -> list[Running]:
        """Starts the requests. Raises what ``Model.submit`` raises, and OverloadError where too many wait."""
        model, body = self.model, self.body
        most = int(model.options.get("max_requests", 64)) + self.front.options.max_waiting
        if model.running + len(self.given) > most:
            raise OverloadError(f"{model.running} requests run or wait already", retry_after=2.0)
        priority, of_class = self.tenant.rank(body.priority, body.request_class)
        self.tokens = sum(len(given.ids) for given in self.given)  # also of a client that leaves
        found: list[Running] = []
        try:
            for given in self.given:
                submit = Submit(0, given.ids, self.params, self.scope, priority, of_class, not body.streamed)
                found.append(model.submit(submit))
        except EnginewrightError:
            for running in found:
                model.abort(running.number)
            raise
        return found

    def ended(self, given: Given, ended: Ended, new: int) -> None:
        """Counts a request that has ended."""
        self.front.metrics.ended(self.model.name, len(given.ids), new, ended)
        self._span(len(given.ids), new, ended)

    def aborted(self, prompt: int, new: int, error: BaseException | None) -> None:
        """Counts requests whose client has left, or whose engine was lost."""
        self.front.metrics.aborted(self.model.name)
        self._span(prompt, new, None, str(error) if isinstance(error, EnginewrightError) else "the client left")

    def _span(self, prompt: int, new: int, ended: Ended | None, problem: str = "") -> None:
        if self.front.tracing is not None:
            operation = "chat" if isinstance(self.body, ChatBody) else "text_completion"
            about = {"gen_ai.response.id": self.shape.id, "enginewright.request_id": self._request_id}
            self.front.tracing.request(
                self.model.name, operation, self.params, self._trace, prompt, new, ended, problem, about
            )

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        running = self.submit()
        try:
            results = await asyncio.gather(*(one.result() for one in running))
        except BaseException as e:
            for one in running:
                self.model.abort(one.number)
            self.aborted(sum(len(given.ids) for given in self.given), 0, e)
            raise
        choices, new = [], 0
        for i, (given, ended) in enumerate(zip(self.given, results, strict=True)):
            tokens = sum(len(one.token_ids) for one in ended.answers)
            self.ended(given, ended, tokens)
            new += tokens
            for j, answer in enumerate(ended.answers):
                choices.append(self.shape.choice(i * self.answers + j, answer, ended, given))
                if self.splices:
                    self.front.remember(self.model, self.scope, given, answer.text, answer.token_ids)
        self.tokens = sum(len(given.ids) for given in self.given) + new
        counts = usage(sum(len(given.ids) for given in self.given), new, results)
        if isinstance(self.body, CompletionBody) and self.body.scores_alone:
            counts = usage(counts["prompt_tokens"], 0, results)
        found = self.shape.response(choices, counts)
        if self.body.prompt_logprobs is not None and results[0].prompt_logprobs is not None:
            found["prompt_logprobs"] = self.shape.prompt_logprobs(results[0])
        if self.body.return_token_ids:
            found["prompt_token_ids"] = self.given[0].ids
        return found

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer's events, several together where they have come together."""
        shape, began = self.shape, set[int]()
        running = self.submit()
        news: dict[int, tuple[list[str], list[int]]] = {}
        prompt = sum(len(given.ids) for given in self.given)
        ends: list[Ended] = []
        new = 0
        try:
            async with contextlib.aclosing(_merged(running)) as events:
                async for i, found in events:
                    given = self.given[i]
                    if isinstance(found, Ended):
                        ends.append(found)
                        mine = [own for index, own in news.items() if index // self.answers == i]
                        self.ended(given, found, sum(len(ids) for _, ids in mine))
                        if self.splices:
                            for texts, ids in mine:
                                self.front.remember(self.model, self.scope, given, "".join(texts), ids)
                        continue
                    out = []
                    for piece in found:
                        index = i * self.answers + piece.index
                        if index not in began:
                            began.add(index)
                            news[index] = [], []
                            if (first := shape.first(index, given.text)) is not None:
                                out.append(event(shape.chunks([first])))
                        new += len(piece.token_ids)
                        news[index][0].append(piece.text)
                        news[index][1].extend(piece.token_ids)
                        if not (piece.text or piece.finish_reason or piece.logprobs or self.body.return_token_ids):
                            continue  # part of a character, or what may be a stop string's beginning
                        counts = usage(prompt, new) if shape.usage_always else None
                        out.append(event(shape.chunks([shape.piece(index, piece)], counts)))
                    yield b"".join(out)
            out = [event(shape.chunks([], usage(prompt, new, ends)))] if shape.usage_at_end else []
            yield b"".join([*out, DONE])
        finally:
            self.tokens = prompt + new
            if len(ends) < len(running):
                self.aborted(prompt, new, sys.exception())
                for one in running:
                    self.model.abort(one.number)


def _prompts(model: Model, body: CompletionBody) -> list[Given]:
    found = []
    most = model.model.context_length - 1
    for prompt in body.prompts():
        if isinstance(prompt, str):
            tokenizer = _tokenizer(model)
            encode = partial(tokenizer.encode, add_special_tokens=body.add_special_tokens)
            found.append(Given(prompt, arguments.encode_within(encode, prompt, most) if prompt else []))
        else:
            text = ""
            if body.echo and model.tokenizer is not None:
                text = model.tokenizer.decode([i for i in prompt if i >= 0], skip_special_tokens=False)
            found.append(Given(text, prompt))
        if not found[-1].ids:
            raise RequestError("prompt: it is empty", hint="Pass at least one token.")
    return found


async def _merged(running: Sequence[Running]) -> AsyncGenerator[tuple[int, list[Piece] | Ended], None]:
    """The events of several requests, with the place of each. Raises the first error."""
    if len(running) == 1:
        async with contextlib.aclosing(running[0].events()) as events:
            async for found in events:
                yield 0, found
        return
    queue: asyncio.Queue[tuple[int, list[Piece] | Ended | EnginewrightError]] = asyncio.Queue()

    async def forward(i: int, one: Running) -> None:
        try:
            async with contextlib.aclosing(one.events()) as events:
                async for found in events:
                    queue.put_nowait((i, found))
        except EnginewrightError as e:
            queue.put_nowait((i, e))

    tasks = [asyncio.create_task(forward(i, one)) for i, one in enumerate(running)]
    left = len(running)
    try:
        while left:
            i, event = await queue.get()
            if isinstance(event, EnginewrightError):
                raise event
            left -= isinstance(event, Ended)
            yield i, event
    finally:
        for task in tasks:
            task.cancel()


class Work(Response):
    """Sends what a job gives, whole or as a stream; ends the job where the client leaves or reads nothing."""

    def __init__(self, front: Front, tenant: Tenant, job: Job, ignored: list[str]) -> None:
        super().__init__()
        self.front, self.tenant, self.job = front, tenant, job
        self.extra = {IGNORED_HEADER: ", ".join(ignored)} if ignored else {}
        self._begun = False
        self._sent = time.monotonic()  # when something was sent last
        self._sending: float | None = None  # since when the client was to take what is sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streamed, send = self.job.body.streamed, scope["state"]["send"]
        work = asyncio.ensure_future(self._stream(send) if streamed else self._whole(scope, receive, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        watch = asyncio.ensure_future(self._watch(work, send))
        self.front.running.add(work)
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone, watch):
                task.cancel()
            found = await asyncio.gather(work, gone, watch, return_exceptions=True)
            self.front.running.discard(work)
            self.tenant.end(self.job.tokens, self.job.requests)
        if isinstance(found[0], Exception):
            raise found[0]

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self.front.options.request_seconds or None
        try:
            async with asyncio.timeout(limit):
                response = json_response(await self.job.whole(), headers=self.extra)
        except TimeoutError:
            error = ApiError(408, f"the answer took more than {limit:g} s")
            response = json_response(error.body, error.status)
        except EnginewrightError as e:
            error = api_error(e)
            response = json_response(error.body, error.status, error.headers)
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        try:
            async with (
                asyncio.timeout(self.front.options.request_seconds or None),
                contextlib.aclosing(self.job.stream()) as events,
            ):
                async for data in events:
                    await self._send(send, data)
        except (TimeoutError, EnginewrightError) as e:
            limit = self.front.options.request_seconds
            error = (
                api_error(e)
                if isinstance(e, EnginewrightError)
                else ApiError(408, f"the answer took more than {limit:g} s")
            )
            if not self._begun:
                await send(
                    {
                        "type": "http.response.start",
                        "status": error.status,
                        "headers": _headers("application/json", error.headers),
                    }
                )
                await send({"type": "http.response.body", "body": _encode(error.body)})
                return
            await self._send(send, event(error.body) + DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            more = {"cache-control": "no-cache", "x-accel-buffering": "no", **self.extra}
            headers = _headers("text/event-stream; charset=utf-8", more)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._sending = self._sent = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending = None

    async def _watch(self, work: asyncio.Future[None], send: Send) -> None:
        """Sends comments where a stream has nothing else, and ends the work where the client takes nothing."""
        options = self.front.options
        while True:
            await asyncio.sleep(min(1.0, options.keep_alive_seconds / 2, options.stall_seconds / 2))
            now = time.monotonic()
            if self._sending is not None:
                if now - self._sending > options.stall_seconds:
                    work.cancel()
                    return
            elif self.job.body.streamed and now - self._sent > options.keep_alive_seconds and not work.done():
                await self._send(send, KEEP_ALIVE)


def _headers(kind: str, more: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in {"content-type": kind, **more}.items()]


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Gate:
    """Stands before the routes: hosts, origins, sizes, times, keys; names each response, and logs it.

    Plain ASGI: Starlette's middleware would copy each piece of a stream.
    """

    def __init__(self, app: Any, front: Front) -> None:
        self._app, self._front = app, front
        self._hosts = front.options.fixed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await self._refuse_websocket(receive, send)
        if scope["type"] != "http":
            return await self._app(scope, receive, send)  # type: ignore[no-any-return]
        began, status = time.monotonic(), 0
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = headers.get("x-request-id", "")
        request_id = request_id if _REQUEST_ID.fullmatch(request_id) else "req_" + secrets.token_hex(12)
        more = [(b"x-request-id", request_id.encode()), *self._cors(headers)]

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                if status:
                    raise RuntimeError("the response was begun already")
                status = message["status"]
                self._front.metrics.responded(status)
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        # A stream's pieces go past what Starlette wraps around each: it looks for errors before the first alone.
        scope["state"] = {**scope.get("state", {}), "request_id": request_id, "send": sending}
        try:
            self._check(scope, headers)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await Response()(scope, receive, sending)
                return None
            await self._app(scope, self._limited(receive, headers), sending)
        except ApiError as e:
            if not status:
                await error_response(scope["path"], e)(scope, receive, sending)
        except Exception:  # noqa: BLE001  nothing that a client sends ends the server
            _LOG.exception("request %s", request_id)
            if not status:
                await error_response(scope["path"], _failed())(scope, receive, sending)
        finally:
            path = _PATH.sub("?", scope["path"])[:200]
            _ACCESS.info(
                "%s %s %s",
                scope["method"],
                path,
                status,
                extra={
                    "fields": {
                        "method": scope["method"],
                        "path": path,
                        "status": status,
                        "request_id": request_id,
                        "seconds": round(time.monotonic() - began, 4),
                    }
                },
            )
        return None

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raises ApiError for many headers, another site's name, an origin that isn't listed, a key that is missing."""
        options = self._front.options
        if (count := len(scope["headers"])) > _MOST_HEADERS:
            raise ApiError(431, f"the request has {count} headers, and {_MOST_HEADERS} are taken")
        host = headers.get("host", "").lower()
        name = (
            host.rpartition(":")[0]
            if host.rpartition(":")[2].isdigit() and host.count(":") in (1, *range(3, 9))
            else host
        )
        if self._hosts is not None and name.strip("[]") not in self._hosts:
            raise ApiError(403, f"the host {host[:80]!r} isn't this server's; --allowed-host names those that are")
        origin = headers.get("origin")
        if origin is not None and not self._may(origin, host):
            raise ApiError(403, f"pages of {origin[:80]!r} may not ask; --allowed-origin names those that may")
        path = scope["path"]
        scope["state"]["tenant"] = None
        if scope["method"] == "OPTIONS" or path in _OPEN_PATHS or path.startswith("/assets/"):
            return
        tenant = self._front.tenants.find(_key_of(headers))
        if tenant is None:
            raise ApiError(401, "a key is needed: Authorization: Bearer KEY")
        if path in ("/live", "/metrics", "/props") and tenant.key is not None and not tenant.key.admin:
            raise ApiError(403, f"{path} is for keys with admin = true")
        if self._front.stopping and scope["method"] == "POST":
            raise ApiError(503, "the server is stopping", retry_after=options.drain_seconds)
        scope["state"]["tenant"] = tenant

    def _may(self, origin: str, host: str) -> bool:
        allowed = self._front.options.allowed_origins
        return "*" in allowed or origin in allowed or origin.partition("://")[2].lower() == host

    def _cors(self, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
        origin = headers.get("origin")
        if origin is None or not self._may(origin, headers.get("host", "").lower()):
            return []
        found = {"access-control-allow-origin": origin, "vary": "Origin"}
        if "access-control-request-method" in headers:
            found |= {"access-control-allow-methods": "GET, POST", "access-control-max-age": "600"}
            found["access-control-allow-headers"] = "authorization, content-type, x-api-key, x-request-id"
        return [(name.encode(), value.encode("latin-1", "replace")) for name, value in found.items()]

    def _limited(self, receive: Receive, headers: Mapping[str, str]) -> Receive:
        """Reads a body within its limits of size and time. Raises ApiError."""
        options = self._front.options
        most, left = options.max_body, options.max_body
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > most:
            raise ApiError(413, f"the body has {length[:20]} bytes, and {most} are taken")
        ends = time.monotonic() + options.body_seconds
        whole = False

        async def limited() -> Message:
            nonlocal left, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout(max(ends - time.monotonic(), 0)):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body took more than {options.body_seconds:g} s") from None
            left -= len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if left < 0:
                raise ApiError(413, f"the body has more than the {most} bytes that are taken")
            return message

        return limited

    async def _refuse_websocket(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.close", "code": 1008})


_OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version"})
_MOST_HEADERS = 128
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PATH = re.compile(r"[^A-Za-z0-9._~/-]")
_ACCESS = logging.getLogger("enginewright.access")


def _key_of(headers: Mapping[str, str]) -> str | None:
    """The key as OpenAI's clients send it, or as Anthropic's do."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" and key.strip() else headers.get("x-api-key")


def make_app(front: Front) -> Gate:
    """The server as an ASGI application, without its start and its end: ``serve`` has these."""
    app = FastAPI(title="Enginewright", version=_VERSION, docs_url=None, redoc_url=None, responses=_ERRORS)

    @app.exception_handler(EnginewrightError)
    async def _ours(request: Request, error: EnginewrightError) -> Response:
        return await _api(request, api_error(error))

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> Response:
        return error_response(request.url.path, error)

    @app.exception_handler(ClientDisconnect)
    async def _left(request: Request, error: ClientDisconnect) -> Response:
        return await _api(request, ApiError(400, "the body isn't whole: the client left"))

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> Response:
        return await _api(request, _failed())  # Starlette raises the error again, and Gate logs it

    @app.exception_handler(QuotaError)
    async def _quota(request: Request, error: QuotaError) -> Response:
        return await _api(request, ApiError(429, str(error), retry_after=error.retry_after))

    @app.exception_handler(404)
    async def _no_route(request: Request, error: Exception) -> Response:
        return await _api(request, ApiError(404, f"there is no {request.url.path[:80]}"))

    @app.exception_handler(405)
    async def _no_method(request: Request, error: HTTPException) -> Response:
        problem = ApiError(405, f"{request.url.path[:80]} doesn't take {request.method[:20]}")
        problem.headers |= error.headers or {}  # Allow
        return await _api(request, problem)

    async def generation(request: Request, kind: type[Body], shape: type[Shape]) -> Response:
        body, ignored = decoded(await request.body(), kind)
        tenant: Tenant = request.state.tenant
        model = await front.loaded(front.model(body.model))
        model.check()
        tenant.begin()
        try:
            headers = request.headers
            job = Job(front, tenant, model, body, shape, headers.get("traceparent"), request.state.request_id)
            await job.prepare()
            tenant.widen(job.requests - 1)
        except BaseException:
            tenant.end(0)
            raise
        return Work(front, tenant, job, ignored)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions."""
        return await generation(request, ChatBody, ChatShape)

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        """OpenAI's completions, of text or token ids."""
        return await generation(request, CompletionBody, CompletionShape)

    @app.get("/v1/models")
    async def models() -> Response:
        """The models that there are."""
        return json_response({"object": "list", "data": [_model_row(front, one) for one in front.models.values()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One of them."""
        return json_response(_model_row(front, front.model(name)))

    @app.post("/tokenize", openapi_extra=_body_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or a conversation."""
        body, _ = decoded(await request.body(), TokenizeBody)
        model = front.model(body.model)
        return json_response(await front.in_thread(request.state.tenant.name, partial(_tokenized, front, model, body)))

    @app.post("/detokenize", openapi_extra=_body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body, _ = decoded(await request.body(), DetokenizeBody)
        model = front.model(body.model)
        size = model.model.vocab_size
        if wrong := [index for index in body.tokens if not 0 <= index < size]:
            raise RequestError(f"tokens: {wrong[0]} is outside the vocabulary of {size}")
        decode = partial(_tokenizer(model).decode, body.tokens, skip_special_tokens=False)
        text = await front.in_thread(request.state.tenant.name, decode)
        return json_response({"prompt": text, "content": text})

    @app.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> Response:
        """A model's special tokens and chat template, as vLLM tells them."""
        tokenizer = _tokenizer(front.model(model))
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
        return json_response({"version": _VERSION})

    @app.get("/api/version")
    async def api_version() -> Response:
        """Enginewright's version, where Ollama has its own."""
        return json_response({"version": _VERSION})

    @app.get("/api/tags")
    async def api_tags() -> Response:
        """The models that there are, as Ollama lists them."""
        return json_response(ollama.tags(front.models.values()))

    @app.get("/api/ps")
    async def api_ps() -> Response:
        """The models that are loaded, as Ollama lists them."""
        return json_response(ollama.running(front.models.values()))

    @app.post("/api/show", openapi_extra=_body_schema(ollama.ShowBody))
    async def api_show(request: Request) -> Response:
        """What is known of a model, as Ollama tells it."""
        body, _ = decoded(await request.body(), ollama.ShowBody)
        return json_response(ollama.shown(front.model(body.asked())))

    async def not_served(request: Request) -> Response:
        raise ApiError(404, ollama.NOT_SERVED[request.url.path])

    for path in ollama.NOT_SERVED:
        app.add_api_route(path, not_served, methods=["GET", "POST", "DELETE"], include_in_schema=False)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The metrics in Prometheus' text format."""
        return Response(front.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/props")
    async def props() -> Response:
        """What holds of each model's answers, and how it is doing."""
        return json_response({"models": {name: _props(front, one) for name, one in front.models.items()}})

    add_page(app, front.models, keys=front.tenants.needed)
    return Gate(app, front)


def _model_row(front: Front, model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.created),
        "owned_by": "enginewright",
        "max_model_len": model.model.context_length,
        "system_fingerprint": front.fingerprint(model),
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


def _tokenized(front: Front, model: Model, body: TokenizeBody) -> dict[str, Any]:
    tokenizer = _tokenizer(model)
    if body.messages is not None:
        given, _ = front.chat_prompt(model, body, "", splice=False)
        ids = list(given.ids)
    else:
        text = body.prompt if body.prompt is not None else body.content
        if text is None:
            raise RequestError("prompt: there is neither a prompt nor messages", hint="Pass one of them.")
        # As vLLM's: a prompt gets the tokens that the model expects around a text; llama.cpp's content doesn't.
        said = body.add_special if body.add_special_tokens is None else body.add_special_tokens
        special = body.prompt is not None if said is None else said
        ids = tokenizer.encode(text, add_special_tokens=special)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": model.model.context_length, "tokens": ids}
    if body.with_pieces:
        found["tokens"] = [{"id": index, "piece": _piece(tokenizer.token_bytes(index))} for index in ids]
    if body.return_token_strs:
        found["token_strs"] = [tokenizer.spelled(index) for index in ids]
    return found


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "What is wrong with the request, and where."},
    "503": {"description": "The model doesn't answer now; Retry-After says when to ask again."},
}


def _piece(data: bytes) -> str | list[int]:
    """As llama.cpp has it: bytes where they aren't text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A body's schema for openapi.json."""
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    name = schema["$ref"].rpartition("/")[2]
    own = parts.pop(name)
    own.pop("title", None)
    for part, found in parts.items():
        own = _inlined(own, f"#/components/schemas/{part}", found)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": own}}}}


def _inlined(value: Any, ref: str, found: Any) -> Any:
    if isinstance(value, dict):
        return found if value.get("$ref") == ref else {k: _inlined(v, ref, found) for k, v in value.items()}
    return [_inlined(one, ref, found) for one in value] if isinstance(value, list) else value
