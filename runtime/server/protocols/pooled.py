"""Answers bodies that ask for embeddings, scores or classes of texts.

The texts of a body are tokenized and run in portions, so that a body with thousands of texts delays others by only a
portion or two. Tenants take turns on the threads that tokenize, and few portions of a body are in the engine at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...requests.outputs import RequestMetrics
from ...shared.errors import EnginewrightError, OverloadError, RequestError
from ..engines.engine_client import Model, ReplacedError
from ..engines.records import Ended
from ..http.front import Front
from ..http.routes import Endpoint, Routes
from ..http.tenants import Charge
from .pooled_bodies import POOLED, PooledBody, Sums, TextOrder
from .work import BodyJob, Work

_TEXTS, _CHARACTERS = 64, 1 << 16
"""The most texts of a portion, and their most characters unless a single text has more."""
_NUMBERS = 1 << 21
"""The most numbers in an answer. Only answers with numbers for each token can exceed it."""
_OPEN = 2
"""The most portions of a body in the engine: one that it computes, and the next one."""


class PooledJob(BodyJob):
    """The work for one body that asks for a result for each of its texts.

    Args:
        front, charge, model, request: as for `BodyJob`.
        body: the body.
        ignored: names of its fields that don't change the answer.
    """

    def __init__(
        self, front: Front, charge: Charge, model: Model, request: Request, body: PooledBody, ignored: list[str]
    ) -> None:
        super().__init__(front, charge, model, request)
        self.body, self._ignored = body, ignored
        self._began = time.monotonic()

    async def prepare(self) -> None:
        """Checks the body, on a thread. Nothing is tokenized yet. Raises RequestError naming the field."""
        self._options = self.tenant.ranked(self.body.request_options(self.tenant.name))
        self._order = await self.front.in_thread(self.tenant.name, self._checked, self.charge.size)

    def _checked(self) -> TextOrder:
        self._version, self.ignored = self.model.hash, [*self._ignored]
        pooling = self.model.model.pooling
        assert pooling is not None
        self._pooling = pooling
        order, most = self.body.order(pooling, self.ignored), self.front.options.max_texts
        if len(order.texts) > most:
            hint = f"Pass {most:,} at most, or several requests."
            name = [*order.names.values()][-1]
            raise RequestError(f"{name}: there are {len(order.texts):,} texts", hint=hint)
        return order

    def span_fields(self) -> tuple[str, dict[str, Any]]:
        """Returns the name of the operation, which has no further attributes."""
        return {"embed": "embeddings"}.get(self._pooling.task, self._pooling.task), {}

    async def whole(self) -> Any:
        """Returns the whole answer."""
        while True:
            try:
                return await self._whole()
            except ReplacedError:  # the bundle's tokens may be others now
                await self.prepare()

    async def _whole(self) -> Any:
        most = self.model.slots + self.front.options.max_waiting
        if self.model.running >= most:
            raise OverloadError(f"{self.model.running} requests run or wait already", retry_after=2.0)
        portions = list(self._portions())
        rows: list[Any] = []
        waiting: deque[asyncio.Future[Ended]] = deque()
        self.charge.tokens, self._numbers, waited = 0, 0, 0.0
        try:
            for i in range(len(portions) + _OPEN):
                if len(waiting) == _OPEN or (waiting and i >= len(portions)):
                    ended = await waiting[0]
                    waited = waited or ended.metrics.times[0]
                    rows += await self._rows(ended.result)
                    waiting.popleft()
                if i < len(portions):
                    waiting.append(asyncio.ensure_future(self._portion(portions[i], alone=len(portions) == 1)))
        except BaseException as e:
            for one in waiting:
                one.cancel()  # which aborts its requests
            await asyncio.gather(*waiting, return_exceptions=True)
            if not isinstance(e, (ReplacedError, RequestError)):
                self.aborted(self.charge.tokens, 0, e)
            raise
        metrics = RequestMetrics(self._began, started=self._began + waited, first_token=time.monotonic())
        self._count(texts=len(rows))
        self.ended(self.charge.tokens, 0, metrics, ["stop"])
        name = self.front.name(self.body.named, self.model)
        return self.body.response(rows, Sums(name, self.charge.tokens, metrics))

    async def _rows(self, results: Sequence[Any]) -> list[Any]:
        """Returns the rows of the answer for the results of a portion.

        Raises RequestError if the answer gets too many numbers. For classes of tokens, their number isn't known
        earlier.
        """
        labels = self._pooling.labels or [str(i) for i in range(self._pooling.dimensions)]

        def rows() -> list[Any]:
            return [self.body.row(one, labels) for one in results]

        if self._pooling.task != "token_classify":
            return rows()
        self._numbers += sum(one.size for one in results)
        if self._numbers > _NUMBERS:
            name = [*self._order.names.values()][-1]
            hint = "Send fewer texts at a time."
            raise RequestError(f"{name}: the scores of its tokens are more than {_NUMBERS:,} numbers", hint=hint)
        of_tokens: list[Any] = await self.front.in_thread(self.tenant.name, rows, self.charge.size)
        return of_tokens

    def _portions(self) -> Iterator[range]:
        """Yields the indices of the texts of each portion."""
        begin = size = 0
        texts = self._order.texts
        for index, text in enumerate(texts):
            length = sum(map(len, text)) if isinstance(text, tuple) else len(text)
            if index > begin and (size + length > _CHARACTERS or index - begin == _TEXTS):
                yield range(begin, index)
                begin, size = index, 0
            size += length
        if texts:
            yield range(begin, len(texts))

    async def _portion(self, portion: range, *, alone: bool) -> Ended:
        """Runs the texts of a portion.

        Bodies with several portions take turns by tenant; one with a single portion never waits.

        Args:
            portion: the indices of the texts.
            alone: True if it is the body's only portion.

        Raises the errors of the request, which name the text.
        """
        turns = contextlib.nullcontext() if alone else self.front.portions(self.model).turn(self.tenant.name)
        async with turns:
            if self._cancelled is not None:
                raise self._cancelled
            task = self._order.task(self._order.texts[portion.start : portion.stop])
            running = self.model.run(task, self._options, version=self._version)
            self._running.append(running)
            try:
                ended = await running.result()
            except EnginewrightError as e:
                if (named := self._named(e, portion)) is e:
                    raise
                raise named from e
            finally:
                self._running.remove(running)
            self.charge.tokens += ended.prompt_tokens
            return ended

    def _named(self, error: EnginewrightError, portion: range) -> EnginewrightError:
        """Returns an error in which the text has its name in the body, such as "input[7]", instead of that in the
        portion.

        An error that names no text is returned unchanged. ``portion``: the indices of the portion's texts.
        """
        names = self._order.names
        match = re.fullmatch(rf"({'|'.join(names)})(?:\[(\d+)\])?(:.*)", error.message, re.DOTALL)
        if match is None:
            return error
        place = names[match[1]]
        if match[2] is not None and len(self._order.texts) > 1:
            place += f"[{portion.start + int(match[2])}]"
        hint = None if error.hint is None else error.hint.replace("truncate=True", '"truncate": true')
        return error.reworded(place + match[3], hint=hint)


def add_pooled(routes: Routes, front: Front) -> None:
    """Adds the endpoints of ``POOLED`` to ``routes``; ``front`` has the models."""

    def endpoint(kind: type[PooledBody]) -> Endpoint:
        async def ask(request: Request) -> Response:
            body, ignored, charge = await front.body(request, kind)
            with charge:
                model = await front.ready(body.named, *kind.of_kinds)
                job = PooledJob(front, charge, model, request, body, ignored)
                await job.prepare()
                charge.handed_on = True
            return Work(front, job)

        ask.__doc__ = kind.summary
        return ask

    for path, kind in POOLED.items():
        routes.add(path, endpoint(kind), "POST")
