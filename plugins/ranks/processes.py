"""Runs ranks as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import weakref

from enginewright.runtime.shared.errors import CapacityError

_LAST_BYTES, _LAST_LINES = 2000, 4


class ProcessPlaces:
    """Ranks as processes of this machine, each of which runs a module. Implements `others.Places`.

    Args:
        module: the module to run; its arguments are HOST:PORT and the rank's number.
        ranks: the number of ranks, rank 0 included.
    """

    def __init__(self, module: str, ranks: int) -> None:
        self._module = module
        self.machines = ("127.0.0.1",) * ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors = [errors_of(rank) for rank in range(1, ranks)]
        for descriptor in self._errors:
            weakref.finalize(self, os.close, descriptor)

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1, 2, ..."""
        return [process.pid for process in self._processes]

    def start(self, address: str) -> None:
        """Starts the processes. Raises CapacityError if one can't be started."""
        for rank, errors in enumerate(self._errors, 1):
            command = [sys.executable, "-m", self._module, address, str(rank)]
            try:
                # A Ctrl-C or Ctrl-Z is for rank 0 alone.
                one = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors, process_group=0)
            except OSError as e:
                raise CapacityError(
                    f"the process of a rank can't be started: {e}",
                    hint="End other processes, or raise the limit (ulimit -u).",
                ) from e
            self._processes.append(one)

    def ended(self, rank: int) -> str:
        """Returns how a rank has ended; "" while it runs."""
        process = self._processes[rank - 1]
        code = process.poll()
        if code is None:
            return ""
        return f"(process {process.pid}) {how_it_ended(code)}{last_lines(self._errors[rank - 1])}"

    def close(self) -> None:
        """Kills the processes, and waits for them."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.wait()


def errors_of(rank: int) -> int:
    """Returns a memory file for a rank's standard error, which is shown if the rank dies."""
    return os.memfd_create(f"enginewright-rank-{rank}", os.MFD_CLOEXEC)


def how_it_ended(code: int) -> str:
    """Returns a text on a process's end, from its exit code."""
    try:
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    except ValueError:  # a signal without a name
        return f"was killed by signal {-code}"


def last_lines(errors: int) -> str:
    """Returns the last lines of a memory file of ``errors_of``, in the form of a message's end."""
    size = os.fstat(errors).st_size
    written = os.pread(errors, _LAST_BYTES, max(0, size - _LAST_BYTES)).decode(errors="replace")
    lines = written.strip().splitlines()
    return f"; its last lines: {' | '.join(lines[-_LAST_LINES:])}" if lines else ""
