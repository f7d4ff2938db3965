"""An engine's process: opens one bundle, runs the requests that arrive on a socket, and sends back their results.

``engine_client`` starts it with the number of an inherited socket. It has four threads: the engine's, which takes
steps; the main one, which reads; one that sends, all tokens of a step together; and one that reports the step's state
each second. When the socket is closed the process ends, so a dead front end leaves no engine running.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec

from ...engine.llm import LLM
from ...requests.outputs import StreamPiece, plain_logprobs
from ...shared.errors import CapacityError, EnginewrightError, RequestError, shown
from ...tasks.base import Prepared, Task
from ...tasks.table import received
from .live import Live
from .records import (
    LENGTH_BYTES,
    MOST_BYTES,
    Abort,
    Answer,
    Ask,
    Beat,
    Close,
    Ended,
    Events,
    Failed,
    Open,
    Opened,
    Piece,
    Problem,
    Submit,
    ToEngine,
    ToFrontEnd,
    packed,
)

BEAT_SECONDS = 1.0
_WAITING = 256
"""The number of threads for requests with a form.

Most of these threads wait: only a few grammars are compiled at a time, one tenant after the other.
"""


def main(number: int) -> None:
    """Serves a bundle until the socket is closed. ``number``: the socket's file descriptor."""
    for one in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # they are the front end's, which lets answers end
        signal.signal(one, signal.SIG_IGN)
    link = socket.socket(fileno=number)
    link.set_inheritable(False)
    decoder = msgspec.msgpack.Decoder(ToEngine)
    if not (body := _read(link)):  # the front end has ended before it was served
        return
    opening = decoder.decode(body)
    assert isinstance(opening, Open)
    try:
        llm = LLM(opening.path, **opening.options)
    except EnginewrightError as e:
        link.sendall(packed(Failed(Problem.from_error(e))))
        return
    engine = _Serving(llm, link)
    engine.send(Opened(llm.bundle_hash, llm.target, asdict(llm.model), llm.info(), os.getpid()))
    engine.start()
    while body := _read(link):
        message = decoder.decode(body)
        if isinstance(message, Close):
            break
        engine.take(message)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # without a front end nobody else ends a step that hangs
    engine.stop()


def _read(link: socket.socket) -> bytes:
    """Returns the next message; empty at the end of the socket."""
    header = _read_all(link, LENGTH_BYTES)
    size = int.from_bytes(header, "little")
    if len(header) < LENGTH_BYTES or size > MOST_BYTES:
        return b""
    body = _read_all(link, size)
    return body if len(body) == size else b""


def _read_all(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            piece = link.recv(min(size - len(data), 1 << 20))
        except OSError:
            break
        if not piece:
            break
        data += piece
    return bytes(data)


class _Serving:
    """Runs the requests of a front end, under the front end's numbers."""

    def __init__(self, llm: LLM, link: socket.socket) -> None:
        self._llm, self._link = llm, link
        self._out: queue.SimpleQueue[ToFrontEnd | None] = queue.SimpleQueue()
        self._news = Events()  # of the step that was just taken
        self._prepared: dict[int, Prepared[Any]] = {}
        self._unfinished: dict[int, int] = {}  # of a request's answers
        self._submitting = threading.Lock()
        self._compiling: set[int] = set()  # requests whose grammars are being compiled
        self._compilers = ThreadPoolExecutor(_WAITING, "compiling")
        self._live = Live(llm)
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        llm.after_step(self._send_news)

    def start(self) -> None:
        self._sender.start()
        threading.Thread(target=self._beat, daemon=True).start()

    def stop(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._llm.close()
        self._send_news()
        self._out.put(None)
        self._sender.join(5)

    def send(self, message: ToFrontEnd) -> None:
        self._out.put(message)

    def take(self, message: ToEngine) -> None:
        """Acts on a message of the front end."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            with self._submitting:
                self._compiling.discard(message.number)
                prepared = self._forget(message.number)
            if prepared is not None:
                self._llm.abort(prepared)
        elif isinstance(message, Ask):
            threading.Thread(target=self._answer, args=(message,), daemon=True).start()

    def _submit(self, message: Submit) -> None:
        with self._reporting(message.number):
            task = received(message.task)
            if task.slow:
                self._compiling.add(message.number)
                self._compilers.submit(self._start_slow, message, task)
            else:
                self._start(message, task)

    def _start_slow(self, message: Submit, task: Task[Any]) -> None:
        with self._reporting(message.number):
            self._start(message, task)

    @contextmanager
    def _reporting(self, number: int) -> Iterator[None]:
        """Sends an exception of the block as the end of request ``number``.

        It is for threads that nothing waits for.
        """
        try:
            yield
        except Exception as e:  # noqa: BLE001
            self._compiling.discard(number)
            self._forget(number)
            self.send(Events(ended=[Ended(number, problem=_problem(e))]))

    def _start(self, message: Submit, task: Task[Any]) -> None:
        prepared = self._llm.prepare(task, **msgspec.structs.asdict(message.options))
        if not prepared.requests:
            raise RequestError("texts: there are none", hint="Pass one or more.")
        prepared.limit(MOST_BYTES)
        whole = message.whole or not prepared.streams
        with self._submitting:
            if task.slow:
                if message.number not in self._compiling:  # its client has left
                    return
                self._compiling.discard(message.number)
            self._prepared[message.number] = prepared
            self._unfinished[message.number] = len(prepared.requests)
            self._llm.submit(prepared, partial(self._heard, message.number, whole))

    def _heard(self, number: int, whole: bool, event: StreamPiece | EnginewrightError) -> None:
        """Adds a piece of request ``number``, or its error, to the results of the step. The engine's thread calls it.

        ``whole``: True if the client gets the result alone, without pieces.
        """
        if isinstance(event, EnginewrightError):
            if self._forget(number) is not None:
                self._news.ended.append(Ended(number, problem=Problem.from_error(event)))
            return
        prepared = self._prepared.get(number)
        if prepared is None:
            return
        if not whole:
            logprobs = plain_logprobs(event.logprobs)
            piece = Piece(number, event.index, event.token_ids, event.text, event.finish_reason, logprobs)
            self._news.pieces.append(piece)
        if event.finish_reason is not None:
            self._unfinished[number] -= 1
            if not self._unfinished[number]:
                self._forget(number)
                ended = _ended(number, prepared, whole)
                if prepared.streams:
                    self._news.ended.append(ended)
                else:  # arrays may be large: each has a message of its own
                    self.send(Events(ended=[ended]))

    def _send_news(self) -> None:
        """Sends all results of a step in one message. The engine's thread calls it."""
        if self._news.pieces or self._news.ended:
            news, self._news = self._news, Events()
            self._out.put(news)

    def _forget(self, number: int) -> Prepared[Any] | None:
        self._unfinished.pop(number, None)
        prepared = self._prepared.pop(number, None)
        if prepared is not None:
            self._live.left(prepared)
        return prepared

    def _answer(self, question: Ask) -> None:
        self.send(Answer(question.number, ANSWERS[question.topic](self)))

    def live(self) -> dict[str, Any]:
        """Returns the figures of the page's live view."""
        return self._live.now(list(self._prepared.values()))

    def _send_all(self) -> None:
        """Sends queued messages until the end, on a thread of its own. So no step waits for a slow front end."""
        while (message := self._out.get()) is not None:
            try:
                self._link.sendall(packed(message))
            except OSError:  # the front end is gone, as the thread that reads sees too
                return

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            if self._llm.lost:  # the requests have been told; the front end starts another process
                print(f"the engine ends: {self._llm.lost}", file=sys.stderr, flush=True)
                self._out.put(None)
                self._sender.join(5)
                with suppress(OSError):  # giving memory of a GPU back may take long: the front end hears of it now
                    self._link.shutdown(socket.SHUT_RDWR)
                os._exit(1)
            self.send(Beat(self._llm.pulse()))


ANSWERS: Mapping[str, Callable[[_Serving], dict[str, Any]]] = {"live": _Serving.live}
"""Topic of an ``Ask`` -> the method that answers it, on a thread of its own."""


def _ended(number: int, prepared: Prepared[Any], whole: bool) -> Ended:
    metrics, tokens = prepared.requests[0].metrics, sum(request.prompt_length for request in prepared.requests)
    try:
        if prepared.error is not None:
            raise prepared.error
        result = prepared.sent(whole)
        if (size := getattr(result, "nbytes", 0)) > MOST_BYTES:
            raise CapacityError(
                f"the result has {size:,} bytes, and a message {MOST_BYTES:,} at most", hint="Shorten the prompt."
            )
    except Exception as e:  # noqa: BLE001  a type of task may be another package's
        return Ended(number, problem=_problem(e), metrics=metrics)
    return Ended(number, result, metrics=metrics, prompt_tokens=tokens)


def _problem(error: Exception) -> Problem:
    """Returns the record of an error. An error that isn't an EnginewrightError becomes one that names the engine."""
    if not isinstance(error, EnginewrightError):
        hint = "Please report it."
        error = EnginewrightError(f"the request failed in the engine: {shown(error, 300)}", hint=hint)
    return Problem.from_error(error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
