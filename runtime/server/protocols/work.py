"""The work for one body, and the response that sends its answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...requests.outputs import RequestMetrics
from ...shared.errors import EnginewrightError
from ..engines.engine_client import Model, Running
from ..http.errors import ApiError, api_error, clean_headers, error_response, json_response
from ..http.front import Front
from ..http.tenants import Charge
from .answers import Shape

IGNORED_HEADER = "x-enginewright-ignored"


class BodyJob:
    """The work for one body, and the counts of its requests.

    Args:
        front: the front end.
        charge: the body's use of the tenant's quotas.
        model: the model that answers.
        request: the HTTP request: its id, its line in the log, and the client's ``traceparent``.

    Attributes:
        ignored: names of fields that don't change the answer.
        notes: further headers of the answer.
        shape: the format of a stream.
    """

    ignored: list[str]
    shape: Shape

    def __init__(self, front: Front, charge: Charge, model: Model, request: Request) -> None:
        self.front, self.charge, self.tenant, self.model = front, charge, charge.tenant, model
        self._trace, self._request_id = request.headers.get("traceparent"), request.state.request_id
        self._log: dict[str, Any] = request.state.log
        self._log["model"] = model.name
        self.notes: Mapping[str, str] = {}
        self._running: list[Running] = []
        self._cancelled: EnginewrightError | None = None

    @property
    def streamed(self) -> bool:
        """True if the client asks for a stream."""
        return False

    async def whole(self) -> Any:
        """Returns the whole answer, which is sent as JSON."""
        raise NotImplementedError

    def stream(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of a stream."""
        raise NotImplementedError

    def span_fields(self) -> tuple[str, dict[str, Any]]:
        """Returns the name of the job's operation for tracing, such as "chat", and the attributes of its OpenTelemetry
        span.
        """
        raise NotImplementedError

    def cancel(self, error: EnginewrightError) -> None:
        """Ends the requests. The client gets the error as the last event of a stream, or as the response."""
        self._cancelled = error
        for running in self._running:
            self.model.abort(running.number)
            running.put(error)

    def ended(self, prompt: int, new: int, metrics: RequestMetrics, reasons: Sequence[str]) -> None:
        """Counts a request that has ended.

        Args:
            prompt, new: numbers of prompt tokens and of generated tokens.
            metrics: its times and counts.
            reasons: how each of its answers ended.
        """
        self.front.metrics.ended(self.model.name, prompt, new, metrics, reasons[0], self.tenant.name)
        self._count(prompt_tokens=prompt, completion_tokens=new, cached_tokens=metrics.cached_tokens)
        names = ("queue_seconds", "prefill_seconds", "decode_seconds")
        self._log |= {
            name: round(max(self._log.get(name, 0.0), one), 4) for name, one in zip(names, metrics.times, strict=True)
        }
        self._span(prompt, new, metrics, reasons=reasons)

    def aborted(self, prompt: int, new: int, error: BaseException | None) -> None:
        """Counts the requests of a body whose client has left, or whose engine was lost, with their tokens so far."""
        self.front.metrics.aborted(self.model.name, prompt, new, self.tenant.name)
        why = str(error) if isinstance(error, EnginewrightError) else "the client left"
        self._count(prompt_tokens=prompt, completion_tokens=new)
        self._log["reason"] = why
        self._span(prompt, new, None, why)

    def _count(self, **counts: int) -> None:
        for name, count in counts.items():
            self._log[name] = self._log.get(name, 0) + count

    def _span(
        self, prompt: int, new: int, metrics: RequestMetrics | None, problem: str = "", reasons: Sequence[str] = ()
    ) -> None:
        if self.front.tracing is not None:
            operation, attributes = self.span_fields()
            attributes |= {"enginewright.request_id": self._request_id}
            if reasons:
                attributes["gen_ai.response.finish_reasons"] = list(reasons)
            counts = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": new}
            self.front.tracing.request(
                self.model.name, operation, self._trace, metrics, problem, {**counts, **attributes}
            )


J = TypeVar("J", bound=BodyJob)


class Work(Response, Generic[J]):
    """Sends a job's answer, whole or as a stream, and ends the job if the client disconnects.

    Attributes:
        at_end: function that is called at the end, even after an error.
    """

    def __init__(self, front: Front, job: J) -> None:
        super().__init__()
        self.front, self.job = front, job
        self.at_end: Callable[[], None] = lambda: None
        self.extra = dict(job.notes) | ({IGNORED_HEADER: ", ".join(job.ignored)} if job.ignored else {})
        self._begun = False
        self._sent = time.monotonic()  # when something was sent last
        self._sending = False  # and the client hasn't taken it yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streamed, send = self.job.streamed, scope["state"]["send"]
        work = asyncio.ensure_future(self._stream(scope, send) if streamed else self._whole(scope, receive, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        watch = asyncio.ensure_future(self._watch(work, send))
        self.front.running[work] = self.job.cancel
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone, watch):
                task.cancel()
            outcomes = await asyncio.gather(work, gone, watch, return_exceptions=True)
            self.front.running.pop(work, None)
            self.job.charge.end()
            self.at_end()
        if isinstance(outcomes[0], Exception):
            raise outcomes[0]

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self.front.options.request_seconds or None
        try:
            async with asyncio.timeout(limit):
                response = json_response(await self.job.whole(), headers=self.extra)
        except (TimeoutError, EnginewrightError) as e:
            response = error_response(scope, self._error(e))
        await response(scope, receive, send)

    def _error(self, error: TimeoutError | EnginewrightError) -> ApiError:
        if isinstance(error, EnginewrightError):
            return api_error(error)
        return ApiError(408, f"the answer took more than {self.front.options.request_seconds:g} s")

    async def _stream(self, scope: Scope, send: Send) -> None:
        try:
            async with (
                asyncio.timeout(self.front.options.request_seconds or None),
                contextlib.aclosing(self.job.stream()) as events,
            ):
                async for data in events:
                    await self._send(send, data)
        except (TimeoutError, EnginewrightError) as e:
            error = self._error(e)
            if not self._begun:
                response = error_response(scope, error)
                headers = _headers("application/json", error.headers)
                await send({"type": "http.response.start", "status": error.status, "headers": headers})
                await send({"type": "http.response.body", "body": response.body})
                return
            scope["state"]["log"]["reason"] = str(error)
            await self._send(send, self.job.shape.failed(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            more = {"cache-control": "no-cache", "x-accel-buffering": "no", **self.extra}
            headers = _headers(self.job.shape.media_type, more)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._sending, self._sent = True, time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending = False

    async def _keep_alive(self, send: Send) -> None:
        if alive := self.job.shape.keep_alive:
            await self._send(send, alive)

    async def _watch(self, work: asyncio.Future[None], send: Send) -> None:
        """Sends a comment whenever a stream has had no event for some time."""
        options = self.front.options
        while True:
            await asyncio.sleep(min(1.0, options.keep_alive_seconds / 2))
            silent = not self._sending and time.monotonic() - self._sent > options.keep_alive_seconds
            if silent and self.job.streamed and not work.done():
                await self._keep_alive(send)


def _headers(kind: str, more: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in clean_headers({"content-type": kind, **more}).items()]


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
