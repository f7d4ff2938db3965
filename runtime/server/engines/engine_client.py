"""Runs a model's engine for the front end: starts its process, passes requests to it, and restarts it.

If an engine dies, its requests end with an error. An engine whose step takes much too long is killed. The engine is
restarted after a pause that doubles each time, up to a limit, without end: the bundle may be unavailable for a while. A
model whose bundle never could be opened fails instead. A request that was running at two deaths isn't run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import subprocess
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, Literal

import msgspec

from ...bundle import MANIFEST_PATH
from ...bundle.reader import Bundle
from ...engine.pulse import Pulse
from ...executors.open import exact_targets
from ...requests.request_options import RequestOptions
from ...shared.contracts import ModelInfo
from ...shared.errors import EnginewrightError, RequestError
from ...tasks.base import Task
from ...tasks.table import received_result
from ...text.tokenizer import Tokenizer
from .records import (
    LENGTH_BYTES,
    Abort,
    Answer,
    Ask,
    Beat,
    Close,
    Ended,
    Engine,
    Events,
    Failed,
    Opened,
    Piece,
    Submit,
    ToEngine,
    ToFrontEnd,
    digest,
    packed,
)

State = Literal["unloaded", "loading", "ready", "restarting", "failed", "closed"]

_LOG = logging.getLogger("enginewright.server")
_MOST_DEATHS = 2
_MOST_SUSPECTS = 4096
_FAILED_SECONDS = 60.0
"""The value of ``retry_after``, in seconds, for a model that failed.

Only a restart of the server helps such a model.
"""
_STABLE_SECONDS = 60.0
"""The time, in seconds, after which a running engine counts as stable: after its death, pauses are short again.

An engine that has finished a request counts as stable too.
"""


class EngineLostError(EnginewrightError):
    """The engine died, or was killed, while it ran a request."""


class ReplacedError(EnginewrightError):
    """No replica serves the bundle for which a request was prepared.

    The request is prepared again for the new bundle.
    """


class UnavailableError(EnginewrightError):
    """No engine can take a request now.

    Attributes:
        retry_after: seconds after which an engine may be there.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message, hint="Try again later.")
        self.retry_after = retry_after


class Running:
    """A running task of a client. ``events`` yields its output, and at last an ``Ended`` with the result."""

    def __init__(self, model: Model, number: int, digest: bytes, task: Task[Any]) -> None:
        self._model, self.number, self.digest, self.task = model, number, digest, task
        self._events: list[Piece | Ended | EnginewrightError] = []
        self._waiting: asyncio.Future[None] | None = None
        self.ended: Ended | None = None
        self.began = time.monotonic()

    def put(self, event: Piece | Ended | EnginewrightError) -> None:
        """Adds an event, which ``events`` yields."""
        self._events.append(event)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def events(self) -> AsyncGenerator[list[Piece] | Ended, None]:
        """Yields lists of pieces that arrived together, and at last the ``Ended`` of the task.

        Raises the task's error. Closing the generator before the end aborts the task.
        """
        try:
            while self.ended is None:
                if not self._events:
                    self._waiting = asyncio.get_running_loop().create_future()
                    await self._waiting
                events, self._events = self._events, []
                if pieces := [one for one in events if isinstance(one, Piece)]:
                    yield pieces
                last = events[-1]
                if isinstance(last, Ended):
                    self.ended = last
                    if last.problem is not None:
                        raise last.problem.error()
                    last.result = received_result(self.task, last.result)
                    yield last
                elif isinstance(last, EnginewrightError):
                    self.ended = Ended(self.number)
                    raise last
        finally:
            if self.ended is None:
                self._model.abort(self.number)

    async def result(self) -> Ended:
        """Waits for the end of the task, and returns it.

        Raises the task's error. Cancelling the caller aborts the task.
        """
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass
        assert self.ended is not None
        return self.ended


class Link(asyncio.Protocol):
    """A socket to an engine's process, or between a replica and a front end.

    Args:
        take: function that gets each message.
        kind: type of the messages.

    Attributes:
        closed: an event that is set when the socket is closed.
    """

    def __init__(self, take: Callable[[Any], None], kind: Any = ToFrontEnd) -> None:
        self._take = take
        self._data = bytearray()
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self.closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._data += data
        begin = 0
        while (body := begin + LENGTH_BYTES) <= len(self._data):
            end = body + int.from_bytes(self._data[begin:body], "little")
            if end > len(self._data):
                break
            self._take(self._decode(self._data[body:end]))
            begin = end
        del self._data[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


class Limits(msgspec.Struct, frozen=True):
    """The time limits of an engine, in seconds.

    Attributes:
        loading: time to open its bundle.
        step, step_times: the engine is killed if a step takes longer than ``step`` and longer than ``step_times`` times
            the expected time.
        silence: time without a beat.
        pause, longest_pause: the pause before the first restart, and the maximum of the doubled ones.
    """

    loading: float = 1800.0
    step: float = 60.0
    step_times: float = 20.0
    silence: float = 60.0
    pause: float = 0.5
    longest_pause: float = 10.0


class Pauses:
    """The pauses before new starts of an engine: each is twice the one before, up to a limit.

    Args:
        shortest, longest: seconds.
    """

    def __init__(self, shortest: float, longest: float) -> None:
        self._shortest, self._longest, self._next = shortest, longest, shortest

    def take(self) -> float:
        """Returns the pause before the next start, in seconds, and doubles the one after it."""
        pause = self._next
        self._next = min(2 * pause, self._longest)
        return pause

    def reset(self) -> None:
        """Makes the next pause the shortest one."""
        self._next = self._shortest


class Model:
    """A model of the server, with the process of its engine.

    Args:
        name: name of the model in requests.
        path: path of its bundle.
        options: arguments of ``LLM``.
        limits: the time limits of its engine.
        engine: the engine's process if it already runs; None: ``start`` starts it.

    Attributes:
        state: unloaded, loading, ready, restarting (after a death), failed (its bundle never could be opened), closed.
        error: the error of a failed model. It may contain paths, so it is for the log, not for clients.
        info: ``LLM.info`` when the bundle was opened.
        hash: hash of its bundle.
        exact_targets: its bundle's targets on which a request's tokens depend only on the request.
        recipe: name of the bundle's recipe.
        bytes: size of the bundle's files.
        modified: time at which the bundle was written.
        beat: the load that the engine reported last.
        starts: number of starts of an engine.
        deaths: number of engines that died or were killed.
        retried: number of requests that were run again by another replica.
        last_used: time at which a request last began or ended.
    """

    def __init__(
        self, name: str, path: str, options: dict[str, Any], limits: Limits = Limits(), engine: Engine | None = None
    ) -> None:
        self.name, self.path, self.options, self.limits = name, path, options, limits
        self._engine, self._fresh = engine, engine is not None
        self.starts = self.deaths = self.retried = 0
        self._look()  # so that what is wrong with it is said at the start
        self.target = options.get("target") or ""
        self.state: State = "unloaded"
        self.error: EnginewrightError | None = None
        self.info: dict[str, Any] = {}
        self.beat = Pulse()
        self.created = self.last_used = time.time()
        self._numbers = itertools.count()
        self._requests: dict[int, Running] = {}
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._suspects: OrderedDict[bytes, int] = OrderedDict()  # requests that were there at deaths, and at how many
        self._link: asyncio.WriteTransport | None = None
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._heard = 0.0
        self._pauses = Pauses(limits.pause, limits.longest_pause)
        self._opened_ever = False
        self._opened_at: float | None = None  # of the engine that runs
        self._refusal = ""  # why the bundle couldn't be opened by it
        self._next_start = 0.0

    def _look(self) -> None:
        """Reads the parts of the bundle that the front end needs."""
        bundle = Bundle.open(self.path, self.options.get("trust"))
        files = bundle.tokenizer_files()
        self.tokenizer = Tokenizer(files) if files.tokenizer_json else None
        self.model: ModelInfo = bundle.model
        self.hash = bundle.hash
        self.exact_targets = exact_targets(bundle)
        self.recipe = str(bundle.manifest.recipe.get("name") or "")
        self.bytes = sum(one.bytes for one in bundle.files.values())
        self.modified = (bundle.path / MANIFEST_PATH).stat().st_mtime

    @property
    def running(self) -> int:
        """The number of requests that haven't ended."""
        return len(self._requests)

    @property
    def slots(self) -> int:
        """Returns the number of requests that may run at a time."""
        return int(self.options.get("max_requests", 64))

    @property
    def replicas(self) -> int:
        """The number of engines that answer."""
        return int(self.state == "ready")

    @property
    def pid(self) -> int | None:
        """Returns the id of the engine's process; None if there is none."""
        return None if self._engine is None else self._engine.process.pid

    def start(self) -> None:
        """Starts the engine, and restarts it whenever it dies, until ``close``."""
        if self._task is None or self._task.done():
            self.state, self.error = "loading", None
            self._ready.clear()
            self._task = asyncio.create_task(self._supervise())

    async def wait_until_ready(self) -> None:
        """Waits until the model answers, through any number of starts.

        Raises the error of a bundle that can't be opened.
        """
        while self.state in ("loading", "restarting"):
            await self._ready.wait()
        if self.state == "failed" and self.error is not None:
            raise self.error
        self.check()

    async def wait_for_start(self) -> None:
        """Waits for the end of one start. Raises UnavailableError if the engine doesn't answer then."""
        if self.state == "loading":
            await self._ready.wait()
        self.check()

    def run(
        self, task: Task[Any], options: RequestOptions = RequestOptions(), *, whole: bool = True, version: str = ""
    ) -> Running:
        """Starts the requests of a task. The arguments are the fields of ``Submit``. Raises the errors of
        ``submit``.
        """
        submit = Submit(0, task, options, whole, version)
        return self.submit(submit, partial(Running, task=task))

    def submit(self, submit: Submit, kind: Callable[[Model, int, bytes], Running]) -> Running:
        """Starts the requests of a task under a new number, and returns the running task.

        Args:
            submit: the task. Its number is set here.
            kind: makes the running task from (this model, number, digest of the task).

        Raises UnavailableError, and RequestError for a task during which the engine has died several times.
        """
        self.check()
        key = digest(submit.task)
        if self._suspects.get(key, 0) >= _MOST_DEATHS:
            raise RequestError(
                f"the engine died {_MOST_DEATHS} times while this request was running, so it isn't run again",
                hint="Change the request, and look into the server's log.",
            )
        submit.number = next(self._numbers)
        running = kind(self, submit.number, key)
        self._requests[submit.number] = running
        self.last_used = time.time()
        self._send(submit)
        return running

    def abort(self, number: int) -> None:
        """Ends the request with this number. Its blocks are freed at the next step."""
        if self._requests.pop(number, None) is not None:
            self._send(Abort(number))

    async def ask(self, topic: str) -> dict[str, Any]:
        """Asks the engine's process a question, and returns the answer.

        ``topic`` is a key of ``engine_process.ANSWERS``.

        Raises the errors of ``check``, and TimeoutError after ``limits.silence``.
        """
        self.check()
        number = next(self._numbers)
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        self._send(Ask(number, topic))
        try:
            return await asyncio.wait_for(future, self.limits.silence)
        finally:
            self._questions.pop(number, None)

    async def replace(self, path: str) -> None:
        """Serves the bundle at ``path`` from now on, without losing a request.

        Raises RequestError for a model without replicas.
        """
        raise RequestError(f"model {self.name!r} has no replicas", hint="Start the server again.")

    async def close(self, unload: bool = False) -> None:
        """Ends the engine, which writes its cached prefixes. ``unload``: True if the model may be started again."""
        self.state = "unloaded" if unload else "closed"
        self._fail_all(EngineLostError("the server is stopping", hint="Try again."))
        self._send(Close())
        if (engine := self._engine) is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(engine.process.wait, 20)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._kill()

    def kill(self) -> None:
        """Kills the engine's process, which is then restarted."""
        if self._engine is not None:
            self._engine.kill()

    def describe(self) -> dict[str, Any]:
        """Returns the state of the model and its engine, for ``/props`` and the page."""
        beat = self.beat
        return {
            "state": self.state,
            "target": self.target,
            "bundle": self.hash,
            "requests": self.running,
            "waiting": beat.waiting,
            "deaths": self.deaths,
            "kv_cache_used": beat.blocks_used,
        }

    @property
    def overdue(self) -> bool:
        """Returns True if a step takes much longer than it should, or the engine has been silent for too long."""
        beat, limits = self.beat, self.limits
        if self.state != "ready":
            return False
        if time.monotonic() - self._heard > limits.silence:
            return True
        return beat.step_seconds > limits.step and beat.step_seconds > limits.step_times * beat.expected_seconds

    def check(self) -> None:
        """Raises UnavailableError if the model doesn't answer now."""
        if self.state == "failed":
            raise UnavailableError(f"model {self.name!r} can't be opened; the server's log says why", _FAILED_SECONDS)
        if self.state != "ready":
            pause = self._next_start - time.monotonic()
            raise UnavailableError(f"model {self.name!r} is {self.state}", max(1.0, pause + 1.0))

    def _send(self, message: ToEngine) -> None:
        if self._link is not None and not self._link.is_closing():
            self._link.write(packed(message))

    async def _supervise(self) -> None:
        while True:
            why = await self._serve()
            self._ready.set()
            if self.state in ("closed", "unloaded", "failed"):
                return
            if self._opened_at is not None and time.monotonic() - self._opened_at > _STABLE_SECONDS:
                self._pauses.reset()
            if not self._refusal:
                self.deaths += 1
                self._note_suspects()
            pause = self._pauses.take()
            _LOG.error("engine of %s: %s; it is started again in %.1f s", self.name, self._refusal or why, pause)
            self._fail_all(EngineLostError(f"the engine of model {self.name!r} was lost: {why}", hint="Try again."))
            self.state = "restarting"
            self._ready.clear()
            self._next_start = time.monotonic() + pause
            await asyncio.sleep(pause)

    async def _serve(self) -> str:
        """Runs one engine's process until it ends; returns the reason."""
        loop = asyncio.get_running_loop()
        self._opened_at, self._refusal = None, ""
        if self._engine is None or not self._fresh:
            try:
                self._engine = Engine(self.path, self.options)
            except OSError as e:  # too many processes or files, too little memory: it may pass
                self._refusal = f"its process can't be started: {e}"
                return "it can't be started"
        self._fresh = False
        self.starts += 1
        self._link, link = await loop.create_connection(lambda: Link(self._take), sock=self._engine.socket)
        self._heard = time.monotonic()
        watchdog = asyncio.create_task(self._watch())
        try:
            await link.closed.wait()
        finally:
            watchdog.cancel()
            self._link.close()
            self._link = None
            self._kill()
        code = self._engine.process.returncode
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _take(self, message: ToFrontEnd) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Events):
            for piece in message.pieces:
                if (running := self._requests.get(piece.number)) is not None:
                    running.put(piece)
            for ended in message.ended:
                if (running := self._requests.pop(ended.number, None)) is not None:
                    self.last_used = time.time()
                    if ended.problem is None:
                        self._pauses.reset()
                    running.put(ended)
        elif isinstance(message, Beat):
            self.beat = message.pulse
        elif isinstance(message, Answer):
            if (future := self._questions.pop(message.number, None)) is not None and not future.done():
                future.set_result(message.value)
        elif isinstance(message, Opened):
            self._opened(message)
        elif isinstance(message, Failed):
            error = message.problem.error()
            if self._opened_ever:  # it could be opened before, and may be again
                self._refusal = str(error)
            else:
                self.error, self.state = error, "failed"
                _LOG.error("%s: %s", self.name, error)

    def _opened(self, message: Opened) -> None:
        if message.hash != self.hash:
            _LOG.warning("%s: the bundle was replaced: it is %s now", self.name, message.hash)
            try:
                self._look()
                problem = "" if self.hash == message.hash else "it was replaced again while it was opened"
            except (EnginewrightError, OSError) as e:
                problem = str(e)
            if problem:  # the next engine and the front end then read the same bundle
                self._refusal = f"{self.path}: {problem}"
                self.kill()
                return
        self.info, self.target = message.info, message.target
        self.model = msgspec.convert(message.model, ModelInfo)
        self._opened_ever, self._opened_at = True, time.monotonic()
        self.state = "ready"
        self._ready.set()

    async def _watch(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self.limits.silence / 4, self.limits.loading / 4))
            loading = self.state in ("loading", "restarting") and time.monotonic() - began > self.limits.loading
            if loading or self.overdue:
                _LOG.error("engine of %s: %s; it is killed", self.name, "it didn't open" if loading else "a step hangs")
                self.kill()

    def _note_suspects(self) -> None:
        for running in self._requests.values():
            self._suspects[running.digest] = self._suspects.pop(running.digest, 0) + 1
        self._trim_suspects()

    def _trim_suspects(self) -> None:
        while len(self._suspects) > _MOST_SUSPECTS:
            self._suspects.popitem(last=False)

    def _fail_all(self, error: EnginewrightError) -> None:
        requests, self._requests = self._requests, {}
        for running in requests.values():
            running.put(error)
        questions, self._questions = self._questions, {}
        for future in questions.values():
            if not future.done():
                future.set_exception(error)

    def _kill(self) -> None:
        self.kill()
        if self._engine is not None:
            self._engine.process.wait()
