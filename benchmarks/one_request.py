"""Compares a decode step of a few requests with a loop that only reads the same weights, and traces its threads.

    python benchmarks/one_request.py BUNDLE ... [--requests 1] [--context 64] [--pairs 300] [--json FILE]

In one process a step of the engine (scheduling, the program, sampling; no text) alternates with a loop that reads the
weights of the program's linears with the same threads. Where steps are short, one has several runs, as with ``LLM``;
then its time is divided by them. The ratio is the median of the pairs' ratios, since the speed of
memory changes from second to second. On a busy machine ``--undisturbed`` keeps only pairs in which the process had a
core for each thread, by its own processor time. Then steps are traced: each thread's clock says when it did what.
Shares are percent of a step, for each thread the mean of all traced steps:

- products: in tasks of linears;
- attention: in tasks of attention;
- small ops: norms, rounding, rotation, activations and copies, which the calling thread computes alone;
- set-up: of calls that have tasks, before the first and behind the last of them;
- waits: without a task; of the calling thread at the end of a call, of others until they have tasks again;
- sampling, of the calling thread;
- Python: the engine around the program, and the checks of a step's inputs in C++.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.plugins.cpu import _cpu
from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.engine.info import RUNS_SECONDS
from enginewright.runtime.executors.open import make_executor
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.requests.request import Generation
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.scheduler.limits import SchedulerConfig

_TASKS_BEGIN, _TASKS_END, _REGION_END = -1, -2, -3
_OF_A_CORE = 0.85
"""The share of a core that a thread needs to be undisturbed: threads sleep while Python prepares a step."""

_NEW_TOKENS = 64
"""Tokens of a request, after which another one begins: so keys and values stay few beside the weights."""

Marks = npt.NDArray[np.int64]


class Running:
    """Requests of an engine that decode, each for some tokens, and then the next ones.

    Args:
        bundle: a bundle with a ready target cpu.
        requests: requests that decode together.
        context: tokens of a prompt.
        threads: 0 means one for each core.
    """

    def __init__(self, bundle: Bundle, requests: int, context: int, threads: int) -> None:
        length = context + _NEW_TOKENS + 1
        program = bundle.program("cpu")
        blocks = {group.name: requests * (-(-length // group.block_size) + 1) for group in program.cache_groups}
        executor = make_executor(bundle, "cpu", blocks, length, Placement(threads=threads))
        assert isinstance(executor, CpuExecutor)
        self.ops = [step.op for step in program.steps]
        self.inner: Any = executor.program._executor
        self._engine = Engine(executor, SchedulerConfig(requests, requests * context, runs_seconds=RUNS_SECONDS))
        self._running: list[Generation] = []
        self._requests, self._context, self._vocabulary = requests, context, bundle.model.vocab_size
        self._random = np.random.default_rng(0)

    def prepare(self) -> None:
        """Makes the next step one in which all requests decode."""
        if all(request.finished for request in self._running):
            self._running = []
            for _ in range(self._requests):
                prompt = self._random.integers(0, self._vocabulary, self._context).tolist()
                params = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True)
                self._running.append(Generation(prompt, params))
                self._engine.add_request(self._running[-1])
            self._engine.step()  # the prompts
            self._engine.step()

    def step(self) -> int:
        """Runs a step of the engine; returns the number of its runs."""
        before = self._running[0].output_length
        self._engine.step()
        return self._running[0].output_length - before

    def read(self) -> None:
        """Reads the weights."""
        _cpu.read_weights(self.inner)


def timed(call: Callable[[], int | None]) -> tuple[float, float]:
    """Returns the seconds of a call, divided by the runs that it returns, and how many cores the process had."""
    used, begin = time.process_time(), time.perf_counter()
    runs = call() or 1
    seconds = time.perf_counter() - begin
    return seconds / runs, (time.process_time() - used) / seconds


def pairs_of(running: Running, count: int, *, undisturbed: float = 0.0) -> list[tuple[float, float]]:
    """Returns the seconds of a step and of the loop, alternating, ``count`` times.

    ``undisturbed``: seconds of pairs to keep; a pair is kept only if each thread had a core.
    """
    pairs: list[tuple[float, float]] = []
    least = _OF_A_CORE * running.inner.threads if undisturbed else 0.0
    end = time.perf_counter() + undisturbed
    while len(pairs) < count and (not undisturbed or time.perf_counter() < end):
        running.prepare()
        running.read()
        (step, cores), (read, readers) = timed(running.step), timed(running.read)
        if min(cores, readers) >= least:
            pairs.append((step, read))
    return pairs


def kind_of(op: str) -> str:
    """Returns the part that tasks of an op are counted as."""
    return "products" if op.endswith("linear") else "attention" if op.endswith("attention") else "small ops"


def shares_of_caller(begin: int, end: int, marks: Marks, ops: Sequence[str]) -> Counter[str]:
    """Returns the nanoseconds of the calling thread between ``begin`` and ``end`` by part."""
    parts: Counter[str] = Counter()
    at, now, op = begin, "Python", ""
    events = marks.tolist()
    for (then, what), (_, following) in zip(events, [*events[1:], (0, 0)], strict=True):
        parts[now] += then - at
        at = then
        if what > len(ops):
            now = "Python"
        elif what == len(ops):
            now = "sampling"
        elif what >= 0:
            op = ops[what]
            now = "set-up" if following == _TASKS_BEGIN else kind_of(op)
        else:
            now = {_TASKS_BEGIN: kind_of(op), _TASKS_END: "waits", _REGION_END: "set-up"}[what]
    parts[now] += end - at
    return parts


def shares_of_worker(begin: int, end: int, marks: Marks, callers: Marks, ops: Sequence[str]) -> Counter[str]:
    """Returns the same of another thread. ``callers``: the marks of the calling thread, which say what step runs."""
    steps = callers[callers[:, 1] >= 0]
    parts: Counter[str] = Counter()
    begun = 0
    for then, what in marks.tolist():
        if what == _TASKS_BEGIN:
            begun = then
        elif what == _TASKS_END and begun:
            step = int(steps[np.searchsorted(steps[:, 0], begun, side="right") - 1, 1])
            parts[kind_of(ops[step]) if step < len(ops) else "sampling"] += then - begun
    parts["waits"] = end - begin - parts.total()
    return parts


def traced(running: Running, count: int) -> list[dict[str, float]]:
    """Returns by thread the percent of ``count`` steps that each part took."""
    sums: list[Counter[str]] = []
    whole = 0
    for _ in range(count):
        running.prepare()
        running.read()
        _cpu.trace(running.inner, True)
        begin = time.perf_counter_ns()
        running.step()
        end = time.perf_counter_ns()
        marks = _cpu.trace(running.inner, False)
        whole += end - begin
        threads = [shares_of_caller(begin, end, marks[0], running.ops)]
        threads += [shares_of_worker(begin, end, worker, marks[0], running.ops) for worker in marks[1:]]
        sums = [a + b for a, b in zip(sums, threads, strict=True)] if sums else threads
    return [
        {part: round(nanoseconds / whole * 100, 2) for part, nanoseconds in sorted(parts.items())} for parts in sums
    ]


def measure(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one bundle."""
    running = Running(Bundle.open(path), options.requests, options.context, options.threads)
    pairs_of(running, 20)
    pairs = pairs_of(running, options.pairs, undisturbed=options.undisturbed)
    if not pairs:
        raise SystemExit(f"{path}: no pair was undisturbed")
    ratios = sorted(read / step for step, read in pairs)
    return {
        "bundle": path.name,
        "requests": options.requests,
        "context": options.context,
        "threads": running.inner.threads,
        "isa": running.inner.isa,
        "pairs": len(pairs),
        "ratio": round(median(ratios), 4),
        "ratio_quartiles": [round(ratios[len(ratios) * i // 4], 4) for i in (1, 3)],
        "step_ms": round(median(step for step, _ in pairs) * 1e3, 4),
        "read_ms": round(median(read for _, read in pairs) * 1e3, 4),
        "percent_of_step_by_thread": traced(running, options.traced),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures each bundle, prints the figures, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--undisturbed", type=float, default=0.0, help="seconds to look for undisturbed pairs")
    parser.add_argument("--traced", type=int, default=100, help="steps")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args(arguments)
    results = [measure(path, options) for path in options.bundles]
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
