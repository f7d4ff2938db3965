"""Sends the load: in an open loop conversations begin at their times, in a closed loop each client waits for answers.

A request's times are measured from its scheduled time. If the server or this program delays the sending, the delay is
part of the time, as for a user. Omitting it is called "coordinated omission".
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from enginewright.optimizer.shared.resources import frozen_objects
from enginewright.runtime.shared.errors import EnginewrightError
from enginewright.runtime.shared.file_limit import raise_file_limit
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .client import Answer, Client, encode
from .options import LoadOptions
from .workload import Conversation, Turn, Workload

_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "embeddings": "/v1/embeddings"}
_OTHER_APIS = {
    "chat": "Or pass --api completions, or --embed for a model of embeddings.",
    "completions": "Or pass --api chat.",
    "embeddings": "Or leave --embed out for a model that writes text.",
}
"""API -> the hint for an error with which a server refuses it."""
_SHOWN_EVERY = 0.2


@dataclass(slots=True)
class Record:
    """The record of one request. Times are in seconds from the start of the test.

    Attributes:
        due, sent: the time at which it should have been sent, and the time at which it was.
        error: the kind of error; None if there is none.
        gaps: seconds between pieces of its answer.
        tokens: tokens of the answer by the server's count, or pieces if the server doesn't report tokens.
        texts: the number of texts that got a vector, in a request for embeddings.
        unfinished: True if it was abandoned when the test was interrupted.
    """

    conversation: int
    turn: int
    of_class: str
    due: float
    sent: float
    first: float | None = None
    last: float | None = None
    end: float = 0.0
    error: str | None = None
    message: str = ""
    left: bool = False
    unfinished: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int = 0
    pieces: int = 0
    texts: int = 0
    gaps: array[float] = field(default_factory=lambda: array("f"))

    @property
    def whole(self) -> bool:
        """Returns True if the client received the whole answer."""
        return self.error is None and not self.left and not self.unfinished

    @property
    def ttft(self) -> float | None:
        """The seconds from the time at which the request was due to the first text; None without text."""
        return None if self.first is None else self.first - self.due

    @property
    def tpot(self) -> float | None:
        """The mean seconds for each token after the first; None with fewer than two tokens, or if the answer isn't
        whole.
        """
        if self.first is None or self.last is None or self.tokens < 2 or not self.whole:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def end_to_end(self) -> float | None:
        """The seconds from the time at which the request was due to the end of the answer; None if the answer isn't
        whole.
        """
        return self.end - self.due if self.whole else None

    def to_json(self) -> dict[str, Any]:
        """Returns the request's line of the file of requests, as plain values."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "gaps"}
        return fields | {"ttft": self.ttft, "tpot": self.tpot, "end_to_end": self.end_to_end}


@dataclass(frozen=True)
class Run:
    """A load test that has ended. ``counted``: True if the server reported the number of tokens of its answers."""

    model: str
    records: tuple[Record, ...]
    seconds: float
    cpu_seconds: float
    counted: bool
    interrupted: bool


class LoadRun:
    """One load test: ``run`` is called once."""

    def __init__(self, options: LoadOptions, workload: Workload, progress: Progress = silent) -> None:
        self._options, self._workload, self._progress = options, workload, progress
        self._client = Client(options.url, options.api_key, options.timeout)
        self._path = _PATHS[options.api]
        self._embeds = options.api == "embeddings"
        self._head: dict[str, Any] = (
            {"encoding_format": "base64"} if self._embeds else {"stream": True, "temperature": 0}
        )
        self._records: list[Record] = []
        self._running = 0
        self._counted = True
        self._start = 0.0
        self._stopped = asyncio.Event()
        self._done = 0

    async def run(self) -> Run:
        """Runs the load test until all requests have ended or Ctrl-C, and returns its records and figures.

        Raises EnginewrightError if the server can't be reached.
        """
        watch = asyncio.create_task(self._client.watch())
        try:
            model = await self._prepare()
            gc.collect()
            with frozen_objects(), _on_interrupt(self._stopped.set):
                cpu, self._start = time.process_time(), time.monotonic()
                show = asyncio.create_task(self._show())
                load = asyncio.create_task(self._open() if self._workload.is_open else self._closed())
                stop = asyncio.create_task(self._stopped.wait())
                await asyncio.wait((load, stop), return_when=asyncio.FIRST_COMPLETED)
                load.cancel()
                stop.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await load
            cpu, now = time.process_time() - cpu, time.monotonic()
            show.cancel()
            ends = [one.end for one in self._records if not one.unfinished]
            seconds = max(ends, default=0.0) if not self._stopped.is_set() else now - self._start
            records = tuple(sorted(self._records, key=lambda one: one.due))
            return Run(model, records, seconds, cpu, self._counted, self._stopped.is_set())
        finally:
            watch.cancel()
            self._client.close()

    async def _prepare(self) -> str:
        """Finds out the model's name and the fields that the server accepts, by a request that isn't counted."""
        options = self._options
        raise_file_limit()
        model = options.model
        if model is None:
            answer = Answer()
            await self._client.ask("GET", "/v1/models", b"", answer)
            try:
                if answer.error is None:
                    model = str(msgspec.json.decode(answer.document)["data"][0]["id"])
            except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
                answer.fail("not JSON", "no list of models")
            if model is None:
                raise _unusable(options, "/v1/models", answer, "Or name a --model.")
        self._head["model"] = model
        turn = Turn("Say one word", 3, 4)
        for options_too in (True, False):
            if options_too and not self._embeds:
                self._head["stream_options"] = {"include_usage": True}
            else:
                self._head.pop("stream_options", None)
            answer = Answer()
            await self._client.ask("POST", self._path, self._body(turn, {}, [turn.prompt], ""), answer)
            self._read(answer)
            if answer.status not in (400, 422):
                break
        if answer.error not in (None, "empty"):
            hint = _OTHER_APIS[options.api]
            raise _unusable(options, self._path, answer, hint)
        return model

    def _body(self, turn: Turn, more: Mapping[str, Any], said: list[Any], prefix: str) -> bytes:
        """Returns a request's body.

        Args:
            turn: the turn.
            more: further fields.
            said: the texts of user and model in turn; the last one is the user's.
            prefix: the text before the first prompt.
        """
        if self._embeds:
            texts = [turn.prompt] if isinstance(turn.prompt, str) else turn.prompt
            return encode({**self._head, "input": [f"{prefix} {one}" if prefix else one for one in texts], **more})
        body: dict[str, Any] = {**self._head, "max_tokens": turn.answer, **more}
        if self._options.api == "completions":
            body["prompt"] = " ".join([*([prefix] if prefix else []), *said])
            return encode(body)
        messages: list[Any] = [{"role": "system", "content": prefix}] if prefix else []
        for i, text in enumerate(said):
            if isinstance(text, str):
                messages.append({"role": "assistant" if i % 2 else "user", "content": text})
            else:
                messages += text
        body["messages"] = messages
        return encode(body)

    async def _open(self) -> None:
        async with asyncio.TaskGroup() as group:
            for conversation in self._workload:
                due = self._start + conversation.at
                if (wait := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._converse(conversation, due))

    async def _closed(self) -> None:
        conversations = iter(self._workload)
        end = self._start + (self._options.seconds or float("inf"))

        async def client() -> None:
            while time.monotonic() < end and (conversation := next(conversations, None)) is not None:
                await self._converse(conversation, time.monotonic())
                if self._options.think:
                    await asyncio.sleep(self._options.think)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._workload.clients):
                group.create_task(client())

    async def _converse(self, conversation: Conversation, due: float) -> None:
        await self._turns(conversation, due)
        self._done += 1

    async def _turns(self, conversation: Conversation, due: float) -> None:
        """Sends the turns of a conversation, each ``think`` seconds after the answer to the one before it.

        ``due``: the time of the first turn.
        """
        messages: list[Any] = []
        for number, turn in enumerate(conversation.turns):
            messages.append(turn.prompt)
            body = self._body(turn, conversation.of_class.body, messages, conversation.prefix)
            last = number + 1 == len(conversation.turns)
            answer = Answer(turn.leave_after, keep_text=not last)
            record = Record(conversation.index, number, conversation.of_class.name, due - self._start, 0.0)
            self._running += 1
            try:
                record.sent = time.monotonic() - self._start
                await self._client.ask("POST", self._path, body, answer)
            except asyncio.CancelledError:
                record.unfinished = True
                raise
            finally:
                self._running -= 1
                self._add(record, answer)
            if not record.whole:
                return
            messages.append(answer.text)
            if not last:
                due = self._start + record.end + self._options.think
                if (wait := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)

    def _add(self, record: Record, answer: Answer) -> None:
        self._read(answer)
        record.end = time.monotonic() - self._start
        record.first = None if answer.first is None else answer.first - self._start
        record.last = None if answer.last is None else answer.last - self._start
        record.error, record.message, record.left = answer.error, answer.message, answer.left
        if record.unfinished:
            record.error = None
        record.prompt_tokens, record.cached_tokens = answer.prompt_tokens, answer.cached_tokens
        record.tokens = answer.pieces if answer.tokens is None else answer.tokens
        if record.whole and answer.tokens is None:
            self._counted = False
        record.pieces, record.texts, record.gaps = answer.pieces, answer.vectors, answer.gaps
        self._records.append(record)

    def _read(self, answer: Answer) -> None:
        """Sets an error if an answer isn't of the requested kind."""
        if self._embeds:
            answer.read_vectors()
        else:
            answer.not_streamed()

    async def _show(self) -> None:
        """Reports the progress from time to time."""
        seconds, total = self._options.seconds, self._workload.total
        while True:
            await asyncio.sleep(_SHOWN_EVERY)
            passed = time.monotonic() - self._start
            failed = sum(one.error is not None for one in self._records)
            detail = f"{self._running} running, {len(self._records)} ended" + (f", {failed} failed" if failed else "")
            done, most = (self._done, total) if total is not None else (int(passed), int(seconds or 0))
            self._progress(ProgressEvent("load", min(done, most), most, detail))


def _unusable(options: LoadOptions, path: str, answer: Answer, hint: str) -> EnginewrightError:
    return EnginewrightError(
        f"{options.url}: {path}: {answer.error}: {answer.message}",
        hint=f"Is there a server with OpenAI's API at this address, and is the key right? {hint}",
    )


@contextlib.contextmanager
def _on_interrupt(call: Callable[[], None]) -> Iterator[None]:
    """Calls ``call`` on Ctrl-C within the block, except in a thread other than the main one, which gets no signals."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, call)
    except (RuntimeError, ValueError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
