"""Compiles kernels in several processes (``python -m`` of this module), which answer in JSON.

The result doesn't depend on the number of processes, since a kernel's code depends only on its specification.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from enginewright.runtime.shared import errors
from enginewright.runtime.shared.errors import CapacityError, EnginewrightError, TargetError

from .compile_ahead import (
    CompiledKernel,
    check_triton,
    compile_kernel,
    read_kernel,
    spec_document,
    spec_of,
    write_kernels,
)
from .specs import KernelSpec

_PR_SET_PDEATHSIG = 1

Item = TypeVar("Item")
Result = TypeVar("Result")


class KernelCompiler:
    """Compiles kernels in parallel, each specification once. It is a context manager, which kills the processes at its
    end.

    Args:
        workers: the most processes; they start when there is work. With 1, this process compiles.
        compiler: compiles a kernel in this process; None uses ``compile_kernel`` in the processes.

    Raises:
        MissingDependencyError: Triton isn't installed.
    """

    def __init__(self, workers: int, compiler: Callable[[KernelSpec], CompiledKernel] | None = None) -> None:
        if compiler is None:
            check_triton("compiling kernels")
        self._here = compile_kernel if compiler is None and workers == 1 else compiler
        self._compiling = ThreadPoolExecutor(1 if self._here else workers, thread_name_prefix="enginewright-compile")
        self._asking = ThreadPoolExecutor(thread_name_prefix="enginewright-ask")
        self._lock = threading.Lock()
        self._started: dict[KernelSpec, Future[CompiledKernel]] = {}
        self._own = threading.local()
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="enginewright-kernels-")
        self._closed = False

    def start(self, spec: KernelSpec) -> Future[CompiledKernel]:
        """Starts to compile a kernel, and returns a future of it, whose errors are those of ``compile_kernel``."""
        with self._lock:
            if spec not in self._started:
                self._started[spec] = self._compiling.submit(self._compile, spec)
            return self._started[spec]

    def compile(self, spec: KernelSpec) -> CompiledKernel:
        """Compiles a kernel and waits for it. Raises the errors of ``compile_kernel``."""
        return self.start(spec).result()

    def each(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Calls ``function``, which compiles kernels, for several items at a time. Yields the results in the order of
        the items.
        """
        return self._asking.map(function, items)

    def __enter__(self) -> KernelCompiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        self._compiling.shutdown(cancel_futures=True)
        self._asking.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._folder.cleanup()

    def _compile(self, spec: KernelSpec) -> CompiledKernel:
        if self._here is not None:
            return self._here(spec)
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is None:
            with self._lock:
                if self._closed:
                    raise CancelledError
                worker = self._own.worker = _Worker(Path(self._folder.name))
                self._workers.append(worker)
        return worker.compile(spec)


class _Worker:
    """A process that compiles one kernel at a time, and writes it to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said = folder / f"{id(self)}.log"
        with self._said.open("wb") as log:
            # A session of its own: the terminal's Ctrl-C comes to this process alone, and here the child is ended.
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def compile(self, spec: KernelSpec) -> CompiledKernel:
        """Compiles a kernel in the process. Raises the errors of ``compile_kernel``.

        It also raises TargetError if the process ends, and CapacityError if it is killed.
        """
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(spec_document(spec)).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and its exit status says how
        line = child.stdout.readline()
        if not line.endswith(b"\n"):  # nothing, or the half of an answer
            raise self._ended(spec)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            error: type[EnginewrightError] = getattr(errors, answer["error"])
            raise error(answer["message"], hint=answer["hint"])
        return read_kernel(self._folder, spec.stem)

    def kill(self) -> None:
        """Kills the process."""
        self._child.kill()

    def close(self) -> None:
        """Waits for the killed process to end, and closes its pipes."""
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it was asked, and died before it read
                    pipe.close()

    def _ended(self, spec: KernelSpec) -> EnginewrightError:
        """Returns the error for a process that ended without an answer."""
        status = self._child.wait()
        what = f"{spec.kernel} for compute capability {spec.capability}: the process that compiles it"
        if status == -signal.SIGKILL:
            return CapacityError(
                f"{what} was killed; most likely there was no memory",
                hint="Free memory, or compile on a machine with more.",
            )
        last = self._said.read_bytes()[-2000:].decode(errors="replace").strip()
        how = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        return TargetError(
            f"{what} {how}{': ' + last if last else ''}",
            hint="Is there memory enough? Else please report it, with the version of Triton.",
        )


def main(folder: Path) -> None:
    """Compiles the kernel of each line of stdin into ``folder``, and prints an answer for each, as the process's main
    function.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody waits for kernels without an export
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output is kept for answers
    for line in sys.stdin:
        answer: dict[str, str | None] = {}
        try:
            write_kernels(folder, [compile_kernel(spec_of(json.loads(line)))])
        except EnginewrightError as e:
            answer = {"error": type(e).__name__, "message": e.message, "hint": e.hint}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
