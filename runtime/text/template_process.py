"""Starts and calls the process that renders chat templates (``template_sandbox``). One process renders all of them.

A rendering may take two seconds of processor time, ten seconds of time and 256 MB. If it takes more, or Ctrl-C
interrupts it, the process is killed and the next rendering starts another. The process ends when this one does,
because its input is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import marshal
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ..shared.errors import EnginewrightError

SECONDS = 10  # of a request, on a machine that others keep busy
MOST_BYTES = 32 << 20  # of a rendered text
_START_SECONDS = 60
_PROGRAM = "import sys; sys.path += sys.argv[3:]; from template_sandbox import serve; serve(*map(float, sys.argv[1:3]))"


class StoppedError(Exception):
    """A request that got no reply; says why."""


class TemplateProcess:
    """A process that renders templates.

    Its methods may be called from any thread, from a signal handler, and in a forked child, which starts its own
    process.

    Args:
        cpu_seconds: processor time limit of a request.
        memory: limit in bytes, besides the memory of Python and Jinja.
    """

    def __init__(self, cpu_seconds: float = 2, memory: int = 256 << 20) -> None:
        self._limits = (cpu_seconds, memory)
        self._child: _Child | None = None
        self.after_fork()
        os.register_at_fork(after_in_child=self.after_fork)

    def after_fork(self) -> None:
        """Drops the parent's process in a forked child, which starts its own at the next request."""
        self._lock, self._busy = threading.RLock(), False
        if self._child is not None:
            self._child.close()
            self._child = None

    def start(self) -> None:
        """Starts the process if there is none, and returns at once, for a caller that will need the process soon.

        If the start fails, the first request raises the error.
        """
        with self._lock, contextlib.suppress(EnginewrightError):
            if not self._busy:
                self._started()

    def ask(self, source: str, variables: dict[str, Any] | None) -> tuple[str, str]:
        """Returns the kind and the text of the reply to a request; ``template_sandbox`` documents both.

        Args:
            source: the template.
            variables: its variables; None only compiles the template.

        Raises:
            StoppedError: the request took too much time or memory, or the process died.
            EnginewrightError: the process can't be started.
        """
        try:
            request = marshal.dumps((source, variables))
        except ValueError as e:
            raise StoppedError("the messages are nested too deep") from e
        with self._lock:
            if self._busy:  # a signal handler has interrupted this thread while it asked
                return self._ask_another(request)
            self._busy = True
            try:
                return self._ask(request)
            finally:
                self._busy = False

    def _ask(self, request: bytes) -> tuple[str, str]:
        child = self._started()
        try:
            child.wait_until_ready()
            kind, text = child.exchange(request)
        except BaseException:
            self._child = None
            child.kill()
            raise
        if kind.islower():
            self._child = None
            child.kill()
        return kind.upper(), text

    def _ask_another(self, request: bytes) -> tuple[str, str]:
        """Asks a process that serves this request alone."""
        child = _Child(*self._limits)
        try:
            child.wait_until_ready()
            kind, text = child.exchange(request)
        finally:
            child.kill()
        return kind.upper(), text

    def _started(self) -> _Child:
        if self._child is not None and not self._child.is_alive():  # ended by somebody else
            self._child.close()
            self._child = None
        if self._child is None:
            self._child = _Child(*self._limits)
        return self._child


class _Child:
    """A started process, and the pipes to it. What it writes is not trusted."""

    def __init__(self, cpu_seconds: float, memory: int) -> None:
        self._cpu_seconds = cpu_seconds
        self._ready = self._ended = False
        try:
            self._pid, self._to, self._from = _spawn(cpu_seconds, memory)
        except (OSError, NotImplementedError, ValueError) as e:  # the last where Python doesn't know its path
            raise _not_started(str(e)) from e

    def wait_until_ready(self) -> None:
        if not self._ready:
            try:
                self._read_reply(_Deadline(_START_SECONDS))
            except StoppedError as e:
                raise _not_started(str(e)) from e
            self._ready = True

    def exchange(self, request: bytes) -> tuple[str, str]:
        """Returns the reply to a request. Raises StoppedError."""
        deadline = _Deadline(SECONDS)
        rest = memoryview(len(request).to_bytes(8, "little") + request)
        while rest:
            deadline.wait_for(self._to, select.POLLOUT)
            try:
                rest = rest[os.write(self._to, rest) :]
            except BrokenPipeError as e:
                raise StoppedError(self._how_it_ended()) from e
        return self._read_reply(deadline)

    def _read_reply(self, deadline: _Deadline) -> tuple[str, str]:
        size = int.from_bytes(self._read(8, deadline), "little")
        if not 1 <= size <= MOST_BYTES:
            raise StoppedError(f"its text is longer than {MOST_BYTES >> 20} MB")
        reply = self._read(size, deadline)
        return chr(reply[0]), reply[1:].decode("utf-8", "surrogatepass")

    def _read(self, size: int, deadline: _Deadline) -> bytearray:
        data = bytearray()
        while len(data) < size:
            deadline.wait_for(self._from, select.POLLIN)
            piece = os.read(self._from, min(size - len(data), 1 << 20))
            if not piece:
                raise StoppedError(self._how_it_ended())
            data += piece
        return data

    def _how_it_ended(self) -> str:
        code = self._wait(0)
        if code == -signal.SIGPROF:
            return f"it took more than {self._cpu_seconds:g} seconds of processor time"
        return "the process that renders it died" + (f" (exit code {code})" if code is not None else "")

    def _wait(self, options: int) -> int | None:
        """Returns the exit code; None while the process runs, or if other code has already waited for all children."""
        try:
            pid, status = os.waitpid(self._pid, options)
        except ChildProcessError:
            self._ended = True
            return None
        self._ended = pid != 0
        return os.waitstatus_to_exitcode(status) if pid else None

    def is_alive(self) -> bool:
        if not self._ended:
            self._wait(os.WNOHANG)
        return not self._ended

    def kill(self) -> None:
        """Kills the process."""
        self.close()
        if self.is_alive():
            os.kill(self._pid, signal.SIGKILL)
            self._wait(0)

    def close(self) -> None:
        """Closes the pipes, so that the process ends after its current reply."""
        os.close(self._to)
        os.close(self._from)


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def wait_for(self, fd: int, event: int) -> None:
        """Waits until ``fd`` can be read or written, as ``event`` says. Raises StoppedError at the deadline."""
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(self._end - time.monotonic(), 0) * 1000):
            raise StoppedError(f"it took more than {self._seconds:g} seconds")


def _spawn(cpu_seconds: float, memory: int) -> tuple[int, int, int]:
    """Starts the program. Returns its process id, and the pipes to it and from it. Ctrl-C doesn't reach it."""
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    folders = {str(Path(spec.origin).parent.parent) for spec in specs if spec is not None and spec.origin is not None}
    program = [sys.executable or "", "-I", "-S", "-c", _PROGRAM, str(cpu_seconds), str(memory)]
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        stdin, to = os.pipe()
        theirs.callback(os.close, stdin)
        ours.callback(os.close, to)
        from_, stdout = os.pipe()
        ours.callback(os.close, from_)
        theirs.callback(os.close, stdout)
        copies = []
        for file in (stdin, stdout, theirs.enter_context(open(os.devnull, "w"))):
            # Above 2: one that has a lower number already would be written over.
            copies.append(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3))
            theirs.callback(os.close, copies[-1])
        pid = os.posix_spawn(
            program[0],
            [*program, *sorted(folders), str(Path(__file__).parent)],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, i) for i, fd in enumerate(copies)],
            setsigmask=(signal.SIGINT, signal.SIGQUIT),
            setsigdef=(signal.SIGPROF, signal.SIGPIPE),
        )
        os.set_blocking(to, False)
        os.set_blocking(from_, False)
        ours.pop_all()
    return pid, to, from_


def _not_started(why: str) -> EnginewrightError:
    return EnginewrightError(
        f"chat: the process that renders chat templates can't be started: {why}",
        hint=f"See whether this works: {sys.executable or 'python'} -c 'import jinja2'. Prompts of generate need none.",
    )


template_process = TemplateProcess()
