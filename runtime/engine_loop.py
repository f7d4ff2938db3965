"""Runs the engine in a thread of its own, so that any number of threads and coroutines may use it.

The thread takes steps as long as there is work, and is idle otherwise. Requests and aborts reach it through an inbox
that it empties between steps; results leave through listeners, which it calls. A listener is never called again once
``abort`` has returned.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from enginewright.plugins.errors import CapacityError, EnginewrightError

from .engine import Engine
from .outputs import StreamPiece
from .request import Request

Listener = Callable[[StreamPiece | EnginewrightError], None]
"""Gets the pieces of a request, the last with its finish_reason; or an error, and then nothing more. Must be quick."""


class EngineLoop:
    """See the module. Every method may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()  # guards all below
        self._inbox: deque[Callable[[], None]] = deque()
        self._listeners: dict[Request, Listener] = {}
        self._running = False
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="enginewright-engine")

    def submit(self, request: Request, listener: Listener) -> None:
        """Starts a request. Raises CapacityError if it could never fit, EnginewrightError after ``close``."""
        self.engine.scheduler.check(request)
        with self._lock:
            if self._closed:
                raise EnginewrightError("this model was closed", hint="Open the bundle again with LLM(path).")
            self._listeners[request] = listener
            self._post(partial(self.engine.add_request, request))

    def abort(self, request: Request) -> None:
        """Ends a request before the next step; nothing happens if it has ended. Its listener isn't told."""
        with self._lock:
            if self._listeners.pop(request, None) is not None:
                self._post(partial(self.engine.abort, request))

    def close(self) -> None:
        """Ends every request (listeners get an error) and waits for the thread. May be called again."""
        with self._lock:
            self._closed = True
            self._tell_all(EnginewrightError("the model was closed", hint="Close it when no request is running."))
            if self._running:
                self._inbox.append(self.engine.abort_all)
        self._thread.shutdown()

    def _post(self, action: Callable[[], None]) -> None:
        """Has the thread do ``action`` between steps. The caller holds the lock, so no run ends before it has left."""
        self._inbox.append(action)
        if not self._running:
            self._thread.submit(self._run).add_done_callback(self._ended)
            self._running = True  # not before: a Ctrl-C in between must not leave it true with no run

    def _run(self) -> None:
        """Takes steps until there is no work."""
        while self._take_inbox():
            for request in self.engine.step():
                self._deliver(request)

    def _take_inbox(self) -> bool:
        """Does what was asked for between steps; False, and the loop is over, if there is nothing to do."""
        with self._lock:
            while self._inbox:
                self._inbox.popleft()()
            self._running = self.engine.has_work()
            return self._running

    def _deliver(self, request: Request) -> None:
        with self._lock:
            piece = request.take_piece()
            listener = self._listeners.get(request)
            if request.finished:
                self._listeners.pop(request, None)
            if listener is not None:
                listener(piece)

    def _ended(self, run: Future[None]) -> None:
        """The run is over (called by its thread). If that was by an error, every request ends with it."""
        if (cause := run.exception()) is None:
            return
        kind = CapacityError if isinstance(cause, CapacityError) else EnginewrightError
        error = kind(f"the engine failed: {cause!r}", hint="The requests that were running are lost.")
        error.__cause__ = cause
        with self._lock:
            self._running = False
            self._tell_all(error)
            self.engine.abort_all()

    def _tell_all(self, error: EnginewrightError) -> None:
        for listener in self._listeners.values():
            listener(error)
        self._listeners.clear()
        self._inbox.clear()
