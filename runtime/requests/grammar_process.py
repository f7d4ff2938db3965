"""A process that compiles grammars on trial, so that one that takes too much time or memory can be killed.

llguidance can't be interrupted, and some schemas take seconds or gigabytes. As a program, this module reads a tokenizer
once and forks a child for each grammar. The child compiles the grammar, follows a few random answers, and reports an
error and the memory used. So several grammars are tried at the same time, and killing one doesn't need a restart.

Messages are JSON: to the program with the length before each, from the program one per line, short enough for a pipe
to write at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NoReturn

from ..shared.errors import CapacityError, OverloadError
from ..shared.memory import return_freed_memory
from ..shared.shares import Shares

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MEMORY = 64 << 20
"""The most bytes of address space of a trial: twice what a compiled grammar may keep."""
MOST_COMPILED = 32 << 20
"""The most bytes of memory that a compiled grammar may keep."""
SHORT_SECONDS = 0.5
"""The processor time of a trial, in seconds, after which it is stopped if other trials wait."""
MASK_SECONDS = 0.25
"""The most processor time of computing one mask, in seconds, because all requests of a step wait for it."""
AT_ONCE = 2
START_SECONDS = 120.0
_PATIENCE = 12  # times its processor time, on a machine that others keep busy
_WALKS, _STEPS = 3, 16  # answers that a trial follows, and their tokens
_FAILURES = 1 << 20  # bytes of what is remembered of grammars that failed
_LEAST = 1 << 18  # bytes that the smallest grammar counts as
_LENGTH = 8
_MOST_SAID = 3000  # bytes of a problem: with the rest of its line fewer than a pipe takes whole
_LOOK_SECONDS = 0.05
_CLOCK = os.sysconf("SC_CLK_TCK")


def limits(times: int = 1) -> LLParserLimits:
    """Returns llguidance's limits of work for each step of a grammar: ``times`` times the limits of a trial.

    An answer gets higher limits than the trial, so that it never reaches them if the trial didn't.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000 * times,
        step_lexer_fuel=200_000 * times,
        step_max_items=50_000 * times,
        verbose_errors=False,
    )


@dataclass(frozen=True)
class _Failure:
    """The reason why a grammar was refused; ``stopped`` is True if its trial was only stopped because others waited."""

    problem: str
    stopped: bool = False


class _Trial:
    """The trial of a grammar: the id of its process once it has begun, and its result once it has ended."""

    pid: int | None = None
    problem: str | None = None
    bytes = 0
    ended = False


class FairTurns:
    """Limits the number of threads that run at once, and chooses among waiting tenants fairly: a tenant without running
    threads goes first.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._free = at_once
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[object]] = OrderedDict()
        self._inside: dict[str, int] = {}
        self._chosen: set[object] = set()
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of threads that wait for a turn."""
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def turn(self, tenant: str) -> Iterator[None]:
        """Waits for a turn, which lasts until the end of the context. Raises CapacityError after ``close``."""
        mine = object()
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(mine)
            self._choose()
            self._changed.wait_for(lambda: self._closed or mine in self._chosen)
            if mine not in self._chosen:
                raise _closed()
            self._chosen.remove(mine)
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._inside[tenant] -= 1
                if not self._inside[tenant]:
                    del self._inside[tenant]
                self._choose()

    def close(self) -> None:
        """Ends the waiting of all threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _choose(self) -> None:
        while self._free and self._waiting:
            tenant = next((one for one in self._waiting if one not in self._inside), next(iter(self._waiting)))
            self._chosen.add(self._waiting[tenant].popleft())
            if self._waiting[tenant]:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            self._inside[tenant] = self._inside.get(tenant, 0) + 1
            self._free -= 1
        self._changed.notify_all()


class GrammarProcess:
    """Tries grammars in another process, which starts with the first grammar and is restarted if it has died.

    Any thread may call the methods.

    Args:
        tokenizer: the text of the model's tokenizer.json.
        vocab_size, end_tokens: as for ``structured.Grammars``.
        seconds: the limit of processor time for each grammar.

    Attributes:
        turns: limits the compilations that run at once, fairly among tenants.
    """

    def __init__(self, tokenizer: str, vocab_size: int, end_tokens: list[int], seconds: float) -> None:
        self._setting = {"tokenizer": tokenizer, "vocab_size": vocab_size, "end_tokens": end_tokens}
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._trials: dict[int, _Trial] = {}
        self._count = 0
        self._changed = threading.Condition(threading.RLock())
        self._failures: Shares[bytes, _Failure] = Shares(_FAILURES)
        self._owner = os.getpid()
        self._closed = False
        self.turns = FairTurns()

    def failure(self, source: str) -> str | None:
        """Returns the problem of a grammar that failed in an earlier trial; None if it hasn't failed.

        Raises OverloadError if the earlier trial was stopped because it was slow, and other threads wait for a turn.
        """
        failure = self._failures.get(_digest(source))
        if failure is None or (failure.stopped and not self.turns.waiting):
            return None
        if failure.stopped:
            raise OverloadError(failure.problem, retry_after=5.0)
        return failure.problem

    def attempt(self, source: str, tenant: str = "") -> tuple[str | None, int]:
        """Compiles a grammar in the process, while this thread has its turn.

        Returns (problem, bytes): a message if the grammar fails or exceeds the limits, otherwise None; and the memory
        that the compiled grammar needs. Raises OverloadError if compiling is slow and other threads wait for their
        turn.
        """
        with self._changed:
            process = self._started()
            number, self._count = self._count, self._count + 1
            trial = self._trials[number] = _Trial()
            _write(process.stdin, {"number": number, "source": source, "seconds": self._seconds})
        try:
            stopped = self._wait(process, trial)
        finally:
            with self._changed:
                self._trials.pop(number, None)
                if trial.pid is None and process is self._process:  # the process itself doesn't answer
                    self._kill()
                elif not trial.ended:
                    _write(process.stdin, {"number": number})
        if stopped:
            problem = "structured_outputs: it takes long to compile, and others wait for theirs"
            self._remember(source, _Failure(problem, stopped=True), tenant)
            raise OverloadError(problem, retry_after=5.0)
        failure = trial.problem if trial.ended else f"it takes more than {self._seconds:g} s to compile"
        if failure is not None:
            self._remember(source, _Failure(failure), tenant)
        return failure, trial.bytes

    def _remember(self, source: str, failure: _Failure, tenant: str) -> None:
        self._failures.put(_digest(source), failure, tenant, 256 + len(failure.problem))

    def _wait(self, process: subprocess.Popen[bytes], trial: _Trial) -> bool:
        """Waits until a trial has ended or its time is over.

        Returns True if it is to be stopped because other threads wait.
        """
        ends = time.monotonic() + self._seconds * _PATIENCE
        with self._changed:
            while not trial.ended and time.monotonic() < ends:
                if process is not self._process:
                    raise _closed() if self._closed else _ended()
                if self.turns.waiting and trial.pid is not None and _processor_time(trial.pid) > SHORT_SECONDS:
                    return True
                self._changed.wait(_LOOK_SECONDS)
        return False

    def close(self) -> None:
        """Kills the process and ends all waiting."""
        self._closed = True
        self.turns.close()
        with self._changed:
            self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed or self._owner != os.getpid():
            raise _closed()
        if self._process is None or self._process.poll() is not None:
            self._kill()
            program = [sys.executable, "-m", "enginewright.runtime.requests.grammar_process"]
            try:
                process = subprocess.Popen(
                    program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError as e:
                raise CapacityError(f"structured_outputs: its compiler can't be started: {e}") from e
            self._process = process
            _write(process.stdin, self._setting)
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
            if not ready or not process.stdout.readline():
                self._kill()
                raise CapacityError("structured_outputs: its compiler doesn't start", hint="Free memory.")
            threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        return self._process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Reads the process's messages until it ends, and stores results in their trials. It runs in its own
        thread.
        """
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # it was closed
            for line in process.stdout:
                message = json.loads(line)
                with self._changed:
                    trial = self._trials.get(message["number"])
                    if trial is None:
                        continue
                    if "pid" in message:
                        trial.pid = message["pid"]
                        continue
                    trial.ended = True
                    trial.bytes = message.get("bytes", 0)
                    trial.problem = message.get("problem") or None
                    if (killed_by := message.get("signal")) is not None:
                        trial.problem = (
                            f"it takes more than {self._seconds:g} s to compile"
                            if killed_by in (signal.SIGPROF, signal.SIGKILL)
                            else f"compiling it takes more than {MEMORY >> 20} MiB of memory, or ends the compiler"
                        )
                    self._changed.notify_all()
        with self._changed:
            if self._process is process:
                self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            self._process = None
            self._changed.notify_all()

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # else it dies with its input
            with self._changed:
                self._kill()


def _closed() -> CapacityError:
    return CapacityError("structured_outputs: this model was closed", hint="Open the bundle again.")


def _ended() -> CapacityError:
    return CapacityError("structured_outputs: its compiler has ended", hint="Ask again.")


def _digest(source: str) -> bytes:
    return hashlib.blake2b(source.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _processor_time(pid: int) -> float:
    """Returns the seconds of processor time that a process has used; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _CLOCK


def _write(stream: IO[bytes] | None, value: Any) -> None:
    assert stream is not None
    data = json.dumps(value).encode()
    with contextlib.suppress(OSError, ValueError):  # it has died, as who waits for it sees
        stream.write(len(data).to_bytes(_LENGTH, "little") + data)
        stream.flush()


def _read_all(size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := os.read(0, size - len(data))):
        data += piece
    return data


def _read() -> Any:
    """Returns the next message from stdin; None at its end."""
    size = int.from_bytes(_read_all(_LENGTH), "little")
    return json.loads(_read_all(size)) if size else None


def _say(**said: Any) -> None:
    os.write(1, json.dumps(said).encode() + b"\n")


def main() -> None:
    """Tries the grammars that stdin has, each in a forked child, until stdin ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLTokenizer

    setting = _read()
    tokens = LLTokenizer(setting["tokenizer"], n_vocab=setting["vocab_size"], eos_token=setting["end_tokens"])
    base = _base(tokens)
    del setting
    os.nice(10)  # Only from here on: the start needs a third of a second once, and takes ten times that on busy cores
    return_freed_memory()
    wake, to_wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(to_wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    numbers: dict[int, int] = {}  # process id -> number of the trial
    _say(number=-1)
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            _reap(numbers)
        if 0 not in ready:
            continue
        message = _read()
        if message is None:
            break
        if "source" not in message:  # nobody waits for it any more
            for pid, number in numbers.items():
                if number == message["number"]:
                    os.kill(pid, signal.SIGKILL)
            continue
        pid = os.fork()
        if not pid:
            _child(tokens, message, base)
        numbers[pid] = message["number"]
        _say(number=message["number"], pid=pid)
    for pid in numbers:
        os.kill(pid, signal.SIGKILL)


def _reap(numbers: dict[int, int]) -> None:
    while numbers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        number = numbers.pop(pid)
        if status:
            _say(number=number, signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _base(tokens: LLTokenizer) -> int:
    """Returns the memory in bytes that the trial of a trivial grammar takes.

    It is subtracted from that of other trials.
    """
    simple = "start: /a/"
    _tried(tokens, simple, 0)
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(there, str(_tried(tokens, simple, 0)[1]).encode())
        os._exit(0)
    os.close(there)
    os.waitpid(pid, 0)
    size = int(os.read(here, 32) or b"0")
    os.close(here)
    return size


def _child(tokens: LLTokenizer, message: dict[str, Any], base: int) -> NoReturn:
    """Tries one grammar in a forked child with limits of time and memory, writes the result and exits."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
        memory = _memory()[0] + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        signal.setitimer(signal.ITIMER_PROF, max(message["seconds"], 1e-3))
        problem, size = _tried(tokens, message["source"], base)
        text = problem.encode("ascii", "backslashreplace")[:_MOST_SAID].decode()
        while len(json.dumps(text)) > _MOST_SAID:
            text = text[: len(text) // 2]
        _say(number=message["number"], problem=text, bytes=size)
        code = 0
    finally:
        os._exit(code)


def _tried(tokens: LLTokenizer, source: str, base: int) -> tuple[str, int]:
    """Compiles a grammar and follows random answers; returns the problem, "" if there is none, and the memory in bytes.

    The memory is the growth of this process's resident memory, less ``base``. It is valid only in a freshly forked
    process.
    """
    from llguidance import LLMatcher

    before = _memory()[1]
    matcher = LLMatcher(tokens, source, log_level=0, limits=limits())
    problem = matcher.get_error()
    rng = random.Random(len(source))
    for _ in range(_WALKS):
        problem = problem or _walked(matcher.deep_copy(), rng)
    size = max(_memory()[1] - before - base, len(source), _LEAST)
    if not problem and size > MOST_COMPILED:
        problem = f"compiled it takes {size >> 20} MiB of memory, and {MOST_COMPILED >> 20} are taken"
    return problem, size


def _walked(matcher: LLMatcher, rng: random.Random) -> str:
    """Follows one random answer of a grammar and returns the problem, "" if there is none."""
    for step in range(_STEPS):
        began = time.thread_time()
        mask = matcher.compute_bitmask()
        took = time.thread_time() - began
        problem = matcher.get_error()
        if step == 0:
            stuck = not any(mask) or (matcher.is_stopped() and not matcher.is_accepting())
            if problem.startswith("NoExtension") or (stuck and not problem):
                return "nothing can meet it"
        if problem:
            return problem
        if took > MASK_SECONDS:
            return f"a token of it takes {took:.1g} s of processor time, and {MASK_SECONDS:g} s are taken"
        if matcher.is_stopped():
            break
        allowed = int.from_bytes(mask, "little")
        if not allowed or not matcher.consume_token(_random_bit(allowed, rng)):
            return matcher.get_error()
        if matcher.is_stopped():
            break
    return ""


def _random_bit(bits: int, rng: random.Random) -> int:
    """Returns the index of a set bit of ``bits``, each with the same probability. It doesn't import numpy."""
    rank, place, size = rng.randrange(bits.bit_count()), 0, bits.bit_length()
    while size > 1:
        half = size // 2
        low = bits & ((1 << half) - 1)
        if rank < (count := low.bit_count()):
            bits, size = low, half
        else:
            rank, bits, place, size = rank - count, bits >> half, place + half, size - half
    return place


def _memory() -> tuple[int, int]:
    """Returns the bytes of this process's address space, and of its resident memory."""
    with open("/proc/self/statm", "rb") as file:
        total, resident = file.read().split()[:2]
    return int(total) * resource.getpagesize(), int(resident) * resource.getpagesize()


if __name__ == "__main__":
    main()
