"""Runs the engine in a thread of its own, so that any number of threads and coroutines may use it.

The thread takes steps as long as there is work, and ends when there is none. Requests and aborts reach it through an
inbox that it empties between steps; results leave through listeners, which it calls. A listener is never called again
once ``abort`` has returned.

A process ends, or forks, at any moment:

1. At the interpreter's exit every loop stops after the step that runs. The thread is a daemon, for which Python
   doesn't wait, and one that came back from C++ into an interpreter that is gone would abort the process.
2. In a forked child the thread is missing, and the locks may be held by nobody. Each loop gets new locks, and its
   requests end with an error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from enginewright.plugins.shared.errors import (
    BundleError,
    CapacityError,
    EnginewrightError,
    OverloadError,
    RequestError,
)

from .engine import Engine
from .requests.outputs import StreamPiece
from .requests.request import Request

Listener = Callable[[StreamPiece | EnginewrightError], None]
"""Gets the pieces of a request, the last with its finish_reason; or an error, and then nothing more. Must be quick."""


Result = TypeVar("Result")


class EngineLoop:
    """See the module. Every method may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: deque[Callable[[], None]] = deque()
        self._listeners: dict[Request, Listener] = {}
        self._closed = self._forked = False
        self._new_locks()
        _loops.add(self)

    def _new_locks(self) -> None:
        # Guards all that is above. The garbage collector may close a stream anywhere, also where it is held.
        self._lock = threading.RLock()
        self._running = False  # a thread takes steps, or will soon
        self._stepping = threading.Lock()  # held by the thread that takes steps
        self._stepper = 0  # that thread

    def submit(self, request: Request, listener: Listener) -> None:
        """Starts a request. Raises CapacityError if it could never fit, EnginewrightError after ``close``."""
        self.engine.scheduler.check(request)
        with self._lock:
            if self._forked:
                raise _forked_error()
            if self._closed:
                raise EnginewrightError("this model was closed", hint="Open the bundle again with LLM(path).")
            self._listeners[request] = listener
            try:
                self._post(partial(self._add, request))
            except RuntimeError as e:
                del self._listeners[request]
                hint = "End other threads or processes, or raise the limit (ulimit -u)."
                raise CapacityError(f"the engine's thread can't be started: {e}", hint=hint) from e

    def abort(self, request: Request) -> None:
        """Ends a request before the next step; nothing happens if it has ended. Its listener isn't called."""
        with self._lock:
            if self._listeners.pop(request, None) is not None:
                self._post(partial(self.engine.abort, request))

    def call(self, action: Callable[[], Result]) -> Result:
        """What ``action`` returns or raises, called between two steps. Raises EnginewrightError after ``close``."""
        found: Future[Result] = Future()

        def run() -> None:
            try:
                found.set_result(action())
            except Exception as e:  # noqa: BLE001  the caller gets it
                found.set_exception(e)

        with self._lock:
            if self._forked:
                raise _forked_error()
            if self._closed:
                raise EnginewrightError("this model was closed", hint="Open the bundle again with LLM(path).")
            self._post(run)
        return found.result()

    def close(self) -> bool:
        """Ends every request (listeners get an error) and waits for the step that runs. May be called again.

        Returns whether the executor is idle: False in a forked child, and from within a step, where the garbage
        collector may call this.
        """
        with self._lock:
            self._closed = True
            self._tell_all(EnginewrightError("the model was closed", hint="Close it when no request is running."))
        return self.stop()

    def stop(self) -> bool:
        """``close``, but listeners aren't called."""
        with self._lock:
            self._closed = True
            self._listeners.clear()
            if self._running:
                self._inbox.append(self.engine.abort_all)
        if self._forked or self._stepper == threading.get_ident():
            return False
        with self._stepping:
            return True

    def after_fork(self) -> None:
        """In the child: see the module."""
        self._new_locks()
        self._forked = True
        self._tell_all(_forked_error())

    def _post(self, action: Callable[[], None]) -> None:
        """Has the thread do ``action`` between steps. The caller holds the lock, so no run ends before it has left."""
        if not self._running:
            threading.Thread(target=self._run, name="enginewright-engine", daemon=True).start()
            self._running = True  # not before: a Ctrl-C in between must not leave it true with no run
        self._inbox.append(action)

    def _run(self) -> None:
        """Takes steps until there is no work. If that ends by an error, every request ends with it."""
        with self._stepping:  # where a Ctrl-C hid that a run had begun, this is the second
            self._stepper = threading.get_ident()
            try:
                while self._take_inbox():
                    for request in self.engine.step():
                        self._deliver(request)
            except BaseException as e:  # noqa: BLE001  whoever waits for a request gets it; nobody is above this thread
                self._fail(e)
            finally:
                self._stepper = 0

    def _take_inbox(self) -> bool:
        """Does what was asked for between steps; False, and the loop is over, if there is nothing to do."""
        with self._lock:
            while self._inbox:
                self._inbox.popleft()()
            self._running = self.engine.has_work()
            return self._running

    def _add(self, request: Request) -> None:
        try:
            self.engine.add_request(request)
        except (OverloadError, RequestError) as e:  # the policy refuses it
            request.fail(e)
            self._deliver(request)

    def _deliver(self, request: Request) -> None:
        with self._lock:
            piece = request.take_piece()
            listener = self._listeners.get(request)
            if request.finished:
                self._listeners.pop(request, None)
            if listener is not None:
                listener(piece)

    def _fail(self, cause: BaseException) -> None:
        kind = CapacityError if isinstance(cause, CapacityError) else EnginewrightError
        error: EnginewrightError = kind(
            f"the engine failed: {cause!r}", hint="The requests that were running are lost."
        )
        if isinstance(cause, BundleError):  # a file of the bundle changed: its hint says what to do
            error = BundleError(f"{cause.message}; the requests that were running are lost", hint=cause.hint)
        error.__cause__ = cause
        with self._lock:
            self._running = False
            self._tell_all(error)
            self.engine.abort_all()

    def _tell_all(self, error: EnginewrightError) -> None:
        for listener in list(self._listeners.values()):
            listener(error)
        self._listeners.clear()
        self._inbox.clear()


_loops: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


def _forked_error() -> EnginewrightError:
    return EnginewrightError(
        "this process was forked from the one that opened the model, and a fork has none of its threads",
        hint="Open the bundle in this process with LLM(path), or start processes with multiprocessing's 'spawn'.",
    )


def _after_fork() -> None:
    for loop in list(_loops):
        loop.after_fork()


def _stop_all() -> None:
    try:
        for loop in list(_loops):
            loop.stop()
    except KeyboardInterrupt:  # a step is long: end at once, as Python does for a Ctrl-C that nobody handles
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_stop_all)
