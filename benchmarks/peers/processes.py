"""Runs workers, each in a process of its own, so that no engine's threads or memory are in another's way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.loading import BENCHMARKS
from peers.workload import FIRST_TOKEN, Report, Task, Workload

MOST_SECONDS = 600
REASON = 300
"""Characters of a reason."""


class WorkerError(Exception):
    """A worker that gave no report; says why."""


@dataclass(frozen=True)
class Command:
    """The way to start a worker: ``prefix`` (such as numactl with its arguments), the Python, the module."""

    python: Path
    worker: str
    prefix: tuple[str, ...] = ()

    def line(self, task: Task, model: Path, work: Workload, *more: str) -> list[str]:
        """The whole command."""
        return [*self.prefix, *self.bare(task, model, work, *more)]

    def bare(self, task: Task, model: Path, work: Workload, *more: str) -> list[str]:
        """Gives the command without the prefix."""
        return [str(self.python), "-m", f"peers.workers.{self.worker}", task, str(model), work.to_json(), *more]


def environment() -> dict[str, str]:
    """Ours, without what would tune the threads of one engine or another: each has its own defaults."""
    tuning = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "PYTHON")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(tuning)}
    return variables | {"PYTHONPATH": str(BENCHMARKS)}


def run(command: Sequence[str]) -> Report:
    """The report that the command prints last. Raises WorkerError, and ends what it started if it is interrupted."""
    text = output(command)
    try:
        return Report(**json.loads(text.splitlines()[-1]))
    except (IndexError, ValueError, TypeError) as e:
        raise WorkerError(f"it printed no report, but: {text[-REASON:]}") from e


def output(command: Sequence[str]) -> str:
    """Runs a command and returns its stdout. Raises WorkerError."""
    process = started(command, subprocess.PIPE)
    try:
        printed, errors = process.communicate(timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired as e:
        raise WorkerError(f"it took more than {MOST_SECONDS} s") from e
    finally:
        end(process)
    if process.returncode:
        raise WorkerError(reason(errors or printed, process.returncode))
    return printed


def started(command: Sequence[str], errors: int) -> subprocess.Popen[str]:
    """The command, in a session of its own: what it starts in turn can be ended with it."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment(),
        cwd=BENCHMARKS,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    """Ends a command that is still running, with all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def reason(errors: str, status: int) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    messages = [line for line in lines if "Error" in line or "error" in line] or lines
    return (messages[-1] if messages else f"it ended with {status}")[:REASON]


def seconds_to_first_token(command: Sequence[str]) -> float:
    """From the start of a process until it prints that it has its first token. Raises WorkerError."""
    start = time.perf_counter()
    process = started(command, subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == FIRST_TOKEN:
                return time.perf_counter() - start
    finally:
        end(process)
    raise WorkerError("it ended without a first token")


def main(arguments: Sequence[str]) -> int:
    """``python -m peers.processes TIMES COMMAND ...``: starts it so often, and once before that for the file cache;
    prints a report. A process of its own, so that it runs under the prefix as all others do."""
    times, command = int(arguments[0]), arguments[1:]
    seconds_to_first_token(command)
    seconds = sorted(seconds_to_first_token(command) for _ in range(times))
    figures: Mapping[str, float] = {"start": seconds[len(seconds) // 2]}
    print(json.dumps({"engine": "", "figures": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
