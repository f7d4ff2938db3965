"""A process that tries to compile grammars: what takes too long, or too much memory, is killed with it.

llguidance can't be interrupted, and some schemas take seconds or gigabytes. Run as a program, this reads a tokenizer
and then grammars from its input, JSON behind its length, and answers each with what is wrong, or "".
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from typing import IO, Any

from ..shared.errors import CapacityError

MEMORY = 4 << 30
"""Bytes of addresses that it may take."""
START_SECONDS = 120.0
_LENGTH = 8


class GrammarProcess:
    """Tries grammars, one at a time, in a process that is started when the first comes, and anew after each death.

    Args:
        tokenizer: the text of its tokenizer.json.
        vocab_size, end_tokens: see ``structured.Grammars``.
        seconds: for each grammar.
    """

    def __init__(self, tokenizer: str, vocab_size: int, end_tokens: list[int], seconds: float) -> None:
        self._setting = {"tokenizer": tokenizer, "vocab_size": vocab_size, "end_tokens": end_tokens}
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closed = False

    def problem(self, source: str) -> str | None:
        """What is wrong with a grammar, in one or more lines; None where it compiles within the limits."""
        with self._lock:
            process = self._started()
            _write(process.stdin, source)
            said = self._read(process, self._seconds)
            if said is None:
                took_long = process.poll() is None
                self._kill()
                if took_long:
                    return f"it takes more than {self._seconds:g} s to compile"
                return f"compiling it takes more than {MEMORY >> 30} GiB of memory, or ends the compiler"
            return said or None

    def close(self) -> None:
        """Ends the process."""
        self._closed = True
        self._kill()  # what waits for it finds it dead

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed or self._owner != os.getpid():
            raise CapacityError("structured_outputs: this model was closed", hint="Open the bundle again.")
        if self._process is None or self._process.poll() is not None:
            program = [sys.executable, "-m", "enginewright.runtime.requests.grammar_process"]
            try:
                self._process = subprocess.Popen(
                    program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            except OSError as e:
                raise CapacityError(f"structured_outputs: its compiler can't be started: {e}") from e
            _write(self._process.stdin, self._setting)
            if self._read(self._process, START_SECONDS) is None:
                self._kill()
                raise CapacityError("structured_outputs: its compiler doesn't start", hint="Free memory.")
        return self._process

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> str | None:
        """The next answer; None where there is none in time, or the process has ended."""
        assert process.stdout is not None
        data, ends = b"", time.monotonic() + seconds
        while len(data) < _LENGTH or len(data) < _LENGTH + int.from_bytes(data[:_LENGTH], "little"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, ends - time.monotonic()))
            if not ready or not (piece := os.read(process.stdout.fileno(), 1 << 16)):
                return None
            data += piece
        return str(json.loads(data[_LENGTH:]))

    def _kill(self) -> None:
        process = self._process
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            self._process = None

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():  # else it dies with its input
            self._kill()


def _write(stream: IO[bytes] | None, value: Any) -> None:
    assert stream is not None
    data = json.dumps(value).encode()
    with contextlib.suppress(OSError):  # it has died, as who reads sees
        stream.write(len(data).to_bytes(_LENGTH, "little") + data)
        stream.flush()


def _read(stream: IO[bytes]) -> Any:
    size = int.from_bytes(stream.read(_LENGTH), "little")
    return json.loads(stream.read(size)) if size else None


def main() -> None:
    """Answers until its input ends."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLMatcher, LLTokenizer

    setting = _read(sys.stdin.buffer)
    tokens = LLTokenizer(setting["tokenizer"], n_vocab=setting["vocab_size"], eos_token=setting["end_tokens"])
    _write(sys.stdout.buffer, "")
    while (source := _read(sys.stdin.buffer)) is not None:
        matcher = LLMatcher(tokens, source, log_level=0)
        problem = matcher.get_error()
        if not problem:  # the first mask is where the rest of the grammar is looked at
            mask = matcher.compute_bitmask()
            problem = matcher.get_error()
            stuck = not any(mask) or (matcher.is_stopped() and not matcher.is_accepting())
            if problem.startswith("NoExtension") or (stuck and not problem):
                problem = "nothing can meet it"
        _write(sys.stdout.buffer, problem)


if __name__ == "__main__":
    main()
