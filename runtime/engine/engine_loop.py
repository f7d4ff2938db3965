"""Runs the engine in its own thread, so that any number of threads and coroutines can use it.

The thread runs steps while there is work, and ends soon after the last one: the next request needn't start a thread
then. Requests and aborts go into an inbox, which the thread empties between steps; results go to listeners, which the
thread calls. After ``abort`` has returned, the request's listener isn't called again.

The thread waits for no caller: it takes no lock that a caller may hold. A signal handler interrupts the main thread
anywhere, and may itself wait for a request. So callers and thread share only single operations on a dict and a deque.

An error in the work for one request ends only that request (``FailedRequestError``). Any other error, such as a failed
executor, ends all running requests. Neither ends the engine.

A process may exit or fork at any moment:

1. At the interpreter's exit, every loop stops after the current step. The thread is a daemon, and Python doesn't wait
   for daemons: one that returned from C++ after the interpreter was gone would abort the process.
2. A forked child doesn't have the thread, and locks may be held by threads that don't exist there. Each loop gets new
   locks, and its requests end with an error.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from ..requests.outputs import StreamPiece
from ..requests.request import FailedRequestError, Request
from ..shared.errors import BundleError, CapacityError, EnginewrightError, shown
from .engine import Engine

Listener = Callable[[StreamPiece | EnginewrightError], None]
"""Gets the pieces of a request, the last with its finish_reason; or an error, and then nothing more. Must be quick."""


Result = TypeVar("Result")


class EngineLoop:
    """The engine's thread with its inbox and listeners. Any thread or signal handler may call any method.

    Attributes:
        steps: the number of steps that have begun.
        step_began: the time at which the current step began, in seconds of ``time.monotonic()``; None between steps.
        after_step: called by the engine's thread after the listeners have received all results of a step.
        idle_seconds: the seconds that the thread waits for further requests before it ends.
    """

    idle_seconds = 0.02

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._counters = engine.scheduler.counters
        self._inbox: deque[Callable[[], None]] = deque()
        self._listeners: dict[Request, Listener] = {}
        self._ended: Callable[[], EnginewrightError] | None = None  # why nothing is taken any more
        self.steps = 0
        self.step_began: float | None = None
        self.after_step: Callable[[], None] = _nothing
        self._new_locks()
        _loops.add(self)

    def _new_locks(self) -> None:
        self._idle = False  # that thread waits for an action
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._running = False  # a thread takes steps, or looks at the inbox before it ends
        self._stepping = threading.Lock()  # held by the thread that takes steps
        self._stepper = 0  # that thread
        self._telling: Request | None = None  # whose listener it is about to call, or calls

    def submit(self, listener: Listener, *requests: Request) -> None:
        """Starts requests. All of them are queued before the next step, so that they run together from the start.

        Args:
            listener: called with each piece, or the error, of each request.
            requests: the requests; if an error is raised, none of them starts.

        Raises:
            CapacityError: a request could never fit, or the engine's thread can't be started.
            EnginewrightError: the loop was closed.
        """
        for request in requests:
            self.engine.scheduler.check(request)
        if self._ended is not None:
            raise self._ended()
        self._listeners.update(dict.fromkeys(requests, listener))
        try:
            self._post(partial(self._add, requests))
        except CapacityError:
            for request in requests:
                self._listeners.pop(request, None)
            raise

    def abort(self, request: Request) -> None:
        """Ends a request before the next step, without calling its listener; does nothing if it has ended."""
        if self._take_listener(request) is not None:
            self._post(partial(self.engine.abort, request))

    def call(self, action: Callable[[], Result]) -> Result:
        """Runs ``action`` in the engine's thread between two steps, and returns its result.

        Raises the error of ``action``, and EnginewrightError after ``close``.
        """
        future: Future[Result] = Future()

        def run() -> None:
            try:
                if self._ended is not None:
                    raise self._ended()
                future.set_result(action())
            except Exception as e:  # noqa: BLE001  the caller gets it
                future.set_exception(e)

        if self._ended is not None:
            raise self._ended()
        self._post(run)
        return future.result()

    def close(self) -> bool:
        """Ends every request with an error, and waits for the current step. It may be called again.

        Returns True if the executor is idle. Returns False in a forked child, and if it is called from within a step,
        as the garbage collector may do.
        """
        self._ended = self._ended or _closed_error
        self._tell_all(EnginewrightError("the model was closed", hint="Close it when no request is running."))
        return self.stop()

    def stop(self) -> bool:
        """Waits for the current step, and lets no other begin. Unlike ``close``, reports no error to listeners.

        Returns True if the executor is idle. Returns False in a forked child, and if it is called from within a step.
        """
        self._ended = self._ended or _closed_error
        self._listeners.clear()
        self._wakes.put(None)
        if self._ended is _forked_error or self._stepper == threading.get_ident():
            return False
        with self._stepping:  # its thread ends after the step that runs, and later ones take none
            return True

    def after_fork(self) -> None:
        """Ends the loop in a forked child, as the module's description says."""
        self._new_locks()
        self._ended = _forked_error
        self._inbox.clear()
        self._tell_all(_forked_error())

    def _post(self, action: Callable[[], None]) -> None:
        """Queues ``action`` for the engine's thread, and starts the thread if it has ended."""
        self._inbox.append(action)
        self.engine.interrupt()
        if self._running:
            if self._idle:
                self._wakes.put(None)
            return
        begun = _thread.allocate_lock()
        begun.acquire()
        try:  # threading.Thread.start takes a lock that a signal handler's call would wait for
            _thread.start_new_thread(self._run, (begun,))
        except RuntimeError as e:
            try:
                self._inbox.remove(action)
            except ValueError:  # another thread has done it
                return
            hint = "End other threads or processes, or raise the limit (ulimit -u)."
            raise CapacityError(f"the engine's thread can't be started: {e}", hint=hint) from e
        begun.acquire()  # so that the next call doesn't start another; one too many does no harm

    def _run(self, begun: _thread.LockType) -> None:
        """Runs steps until there is no work. This is the thread's main function; it releases ``begun`` when it has
        started.
        """
        self._running = True
        begun.release()
        with self._stepping:  # two may have been started: the second finds nothing to do
            self._stepper = threading.get_ident()
            try:
                while self._take_inbox():
                    self._step()
            finally:
                self._stepper = 0

    def _take_inbox(self) -> bool:
        """Runs the queued actions; returns False if the thread must end because there is no work."""
        while True:
            self._running = True
            try:
                while self._inbox:
                    self._inbox.popleft()()
                if self._ended is not None:
                    self._tell_all(self._ended())
                    self.engine.abort_all()
                self._counters.call("listener", "after_step", self.after_step, None)
                if self.engine.has_work():
                    return True
            except BaseException as e:  # noqa: BLE001  see _step
                self._fail(e)
            if self._ended is None and self._wait_for_more():
                continue
            self._running = False
            if not self._inbox:  # else it came after the look at it
                return False

    def _wait_for_more(self) -> bool:
        """Waits a moment for the next action, whose caller needn't start a thread then; returns False if none comes."""
        self._idle = True
        try:
            if not self._inbox:
                self._wakes.get(timeout=self.idle_seconds)
        except Exception:  # noqa: BLE001  nothing came, or there is no memory to wait
            return False
        finally:
            self._idle = False
        return True

    def _step(self) -> None:
        self.steps, self.step_began = self.steps + 1, time.monotonic()
        try:
            try:
                for request in self.engine.step():
                    self._deliver(request)
            except FailedRequestError as failure:
                for request in failure.requests:
                    self._end(request, failure.__cause__ or failure)
        except BaseException as e:  # noqa: BLE001  whoever waits for a request gets it; nobody is above this thread
            self._fail(e)
        finally:
            self.step_began = None

    def _add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request not in self._listeners:
                continue  # aborted meanwhile, or told that the engine failed
            if self._ended is not None:
                self._tell(request, self._ended())
                continue
            try:
                self.engine.add_request(request)
            except Exception as e:  # noqa: BLE001  the policy refuses it, or has failed: this one alone ends
                self._end(request, e)

    def _end(self, request: Request, cause: BaseException) -> None:
        """Ends one request with the error ``cause`` and tells its listener."""
        self._deliver(self.engine.fail(request, cause))

    def _deliver(self, request: Request) -> None:
        try:
            piece = request.take_piece()
        except Exception as e:  # noqa: BLE001  its text has failed, and the others go on
            request = self.engine.fail(request, e)
            piece = request.take_piece()
        self._tell(request, piece)

    def _tell(self, request: Request, event: StreamPiece | EnginewrightError) -> None:
        """Calls the listener of a request, if ``_take_listener`` hasn't removed it. A listener that raises ends its
        request.
        """
        self._telling = request
        try:
            if (listener := self._listeners.get(request)) is not None:
                if isinstance(event, EnginewrightError) or event.finish_reason is not None:
                    self._listeners.pop(request, None)
                listener(event)
        except Exception as e:  # noqa: BLE001  who doesn't listen gets no more
            self._counters.caught("listener", "a request's", e)
            self._listeners.pop(request, None)
            self.engine.abort(request)
        finally:
            self._telling = None

    def _take_listener(self, request: Request) -> Listener | None:
        """Removes and returns the listener of a request; waits if the engine's thread is calling it."""
        listener = self._listeners.pop(request, None)
        while self._telling is request and self._stepper != threading.get_ident():
            time.sleep(0)
        return listener

    def _fail(self, cause: BaseException) -> None:
        """Ends every request with an error made from ``cause``."""
        error = _engine_error(cause)
        self._tell_all(error)
        try:
            self.engine.abort_all()
        except Exception:  # noqa: BLE001  what it holds isn't known any more
            self._ended = partial(_engine_error, cause)

    def _tell_all(self, error: EnginewrightError) -> None:
        for request in list(self._listeners):
            if (listener := self._take_listener(request)) is not None:
                self._counters.call("listener", "a request's", partial(listener, error), None)


_loops: weakref.WeakSet[EngineLoop] = weakref.WeakSet()


def _nothing() -> None:
    """Does nothing."""


def _engine_error(cause: BaseException) -> EnginewrightError:
    hint = "The requests that were running are lost."
    kind = CapacityError if isinstance(cause, CapacityError) else EnginewrightError
    reason = cause.message if isinstance(cause, EnginewrightError) else shown(cause, 1000)
    error: EnginewrightError = kind(f"the engine failed: {reason}", hint=hint)
    if isinstance(cause, BundleError):  # a file of the bundle changed: its hint says what to do
        error = BundleError(f"{cause.message}; the requests that were running are lost", hint=cause.hint)
    error.__cause__ = cause
    return error


def _closed_error() -> EnginewrightError:
    return EnginewrightError("this model was closed", hint="Open the bundle again with LLM(path).")


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
