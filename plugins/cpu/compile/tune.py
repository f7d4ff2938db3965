"""Looks for choices of the cpu target that are faster than its own, one after the other, in paired runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from enginewright.runtime.bundle.reader import Bundle, tuning_path
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from ...native.threads import available_threads
from ...steps.timed_steps import STAGE, Case, cases_of, check_seconds, compare, mean, repeats_of, too_short, worth
from ..serve.tuning import TuningFile
from .row_seconds import CONTEXTS, row_seconds
from .step_runner import StepRunner

CANDIDATES: Mapping[str, tuple[int, ...]] = {
    "task_bytes": (1 << 15, 1 << 19),
    "thread_tasks": (4, 16),
    "task_rows": (48, 192),
    "small_work": (1 << 14, 1 << 18),
    "split_tiles": (4, 64),
    "spin_microseconds": (10, 250),
}
"""The values to try for each tunable besides the executor's own."""

_FEWEST, _MOST = 3, 25
"""Rounds of a comparison."""
_LAST = 2
"""The factor of rounds of the final comparison."""
_ROWS_SHARE = 0.2
"""The share of the time that steps of several rows of a request are timed for."""


@dataclass(frozen=True)
class Tried:
    """A choice, compared with the best so far.

    Attributes:
        name, value: the name and value of the tunable, or of threads.
        gain: the geometric mean over the cases of the time without it over the time with it.
        gains: gains by case, each the median over the rounds.
        faster: True if it became part of the best.
        kept: True if it is part of what is chosen: the best was faster in the last comparison too.
    """

    name: str
    value: int
    gain: float
    gains: dict[str, float]
    faster: bool
    kept: bool = False


@dataclass(frozen=True)
class TuneResult:
    """The result of `optimize tune`.

    Attributes:
        file: the choices that are kept, or would be.
        path: the file's path.
        written: True if the file was written.
        gain, gains: gains of all choices together, as in ``Tried``.
        candidates: the number of candidates; ``tried`` has those that there was time for.
        seconds: the time that it took.
        asked: the time that it was allowed, in seconds.
    """

    file: TuningFile
    path: Path
    written: bool
    gain: float
    gains: dict[str, float]
    tried: tuple[Tried, ...]
    candidates: int
    seconds: float
    asked: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": str(self.path),
            "written": self.written,
            "file": self.file.model_dump(),
            "gain": self.gain,
            "gains": self.gains,
            "tried": [asdict(t) for t in self.tried],
            "candidates": self.candidates,
            "seconds": self.seconds,
        }

    def table(self) -> list[str]:
        """Three tables: each choice beside the best so far, what is chosen beside the executor's own by kind of step,
        and what steps of several rows of a request take."""
        lines = [f"{'choice':<18}{'value':>10}{'speed':>9}"] if self.tried else []
        for tried in self.tried:
            verdict = "kept" if tried.kept else "faster, and not so in the last comparison" if tried.faster else ""
            lines.append(f"{tried.name:<18}{tried.value:>10,}{tried.gain:>8.3f}x  {verdict}".rstrip())
        lines += [""] if self.tried else []
        if self.file.choices or self.file.threads:
            lines.append(f"{'step':<28}{'speed':>9}")
            lines += [f"{name:<28}{gain:>8.3f}x" for name, gain in self.file.gains.items()]
            lines.append("")
        if self.file.row_seconds:
            shown = 1, 2, 4, 8, 16
            lines.append(f"{'milliseconds, rows':<28}" + "".join(f"{rows:>8}" for rows in shown))
            for context, seconds in self.file.row_seconds.items():
                times = "".join(f"{1e3 * seconds[rows - 1]:>8.2f}" for rows in shown)
                lines.append(f"{f'1 request at {context:,}':<28}{times}")
            lines.append("")
        return lines

    def summary(self) -> list[str]:
        """Returns the choices and the path of their file, as lines for people."""
        chosen = dict(self.file.choices) | ({"threads": self.file.threads} if self.file.threads else {})
        lines = []
        if chosen:
            lines.append("chosen: " + ", ".join(f"{name} {value:,}" for name, value in chosen.items()))
        elif self.tried:
            lines.append("nothing is faster here than the executor's own choices")
        lines += too_short(len(self.tried), self.candidates, self.asked)
        return [*lines, f"{self.path}{'' if self.written else ' was not written'}"]


def tune(
    bundle: Bundle,
    *,
    seconds: float = 40.0,
    threads: int = 0,
    records: Path | None = None,
    write: bool = True,
    progress: Progress = silent,
) -> TuneResult:
    """Measures choices, and writes the best to a file next to the bundle.

    Each candidate runs interleaved with the best so far. In the end the best runs interleaved with the executor's own
    choices, and is kept if it is faster by ``LEAST_GAIN``; else what is kept says that nothing is. No candidate is
    begun that would not end in time, the last comparison included; if there is no time for any, no file is written.
    Last comes what steps of several rows of a request take with what was chosen (``row_seconds``).

    Args:
        bundle: opened, with a ready target cpu.
        seconds: the most time to measure, in seconds: opening the program, which comes first, may take longer.
        threads: 0 takes one for each core, and tries half as many.
        records: must be None: this target keeps none.
        write: True if the file is written.
        progress: a function called with the stage "tune".

    Raises:
        RequestError: ``seconds`` is out of range, or there are ``records``.
        BundleError: the target isn't ready, or the file can't be written.
        CapacityError: as for a program that is opened to be served.
    """
    check_seconds(seconds)
    if records is not None:
        raise RequestError(
            "records: target cpu keeps none", hint="Leave --records out, or name a target that does: tvm."
        )
    began = time.perf_counter()
    cases = cases_of(bundle.model.context_length)
    plan = [(name, value) for name, values in CANDIDATES.items() for value in values]
    plan += [] if threads else [("threads", n) for n in fewer_threads(available_threads())]
    default = best = Contender(bundle, cases, threads, {})
    opening = time.perf_counter() - began
    until = began + (1 - _ROWS_SHARE) * seconds - opening
    round_seconds = 2 * sum(default.time(i) * default.repeats[i] for i in range(len(cases)))
    left = until - time.perf_counter() - opening * len(plan)
    rounds = min(max(int(left / (round_seconds * (len(plan) + _LAST))), _FEWEST), _MOST)
    needed = opening + round_seconds * rounds * (1 + _LAST)
    tried: list[Tried] = []
    for done, (name, value) in enumerate(plan):
        if time.perf_counter() + needed > until:
            break
        progress(ProgressEvent(STAGE, done, len(plan) + 2, f"{name} {value:,}"))
        other = _with(bundle, cases, best, name, value)
        gains = compare(best, other, cases, rounds)
        faster = worth(gains.values())
        tried.append(Tried(name, value, mean(gains.values()), gains, faster))
        best = other if faster else best
    progress(ProgressEvent(STAGE, len(plan), len(plan) + 2, "the best beside the executor's own"))
    gains = compare(default, best, cases, _LAST * rounds) if best is not default else {case.name: 1.0 for case in cases}
    is_better = best is not default and worth(gains.values())
    chosen = best if is_better else default
    rows: dict[int, tuple[float, ...]] = {}
    if tried:
        progress(ProgressEvent(STAGE, len(plan) + 1, len(plan) + 2, "rows of one request"))
        contexts = tuple(sorted({min(context, bundle.model.context_length) for context in CONTEXTS}))
        left = began + seconds - time.perf_counter() - opening
        rows = row_seconds(bundle, contexts, left, threads=chosen.threads, choices=chosen.choices)
    file = TuningFile.for_here(
        bundle,
        default.isa,
        threads=chosen.threads if not threads else 0,
        choices=chosen.choices,
        gains={name: round(gain, 4) for name, gain in gains.items()} if is_better else {},
        row_seconds=rows,
    )
    path = tuning_path(bundle)
    if write and tried:
        file.write(path)
    progress(ProgressEvent(STAGE, len(plan) + 2, len(plan) + 2))
    return TuneResult(
        file=file,
        path=path,
        written=write and bool(tried),
        gain=mean(gains.values()),
        gains=gains,
        tried=tuple(replace(t, kept=is_better and t.faster and _is_part(t, best)) for t in tried),
        candidates=len(plan),
        seconds=time.perf_counter() - began,
        asked=seconds,
    )


class Contender:
    """A program with some choices, ready to run.

    Args:
        bundle: opened, with a ready target cpu.
        cases: the cases that will be run.
        threads: 0 takes one for each core.
        choices: see ``CpuProgram``.
    """

    def __init__(self, bundle: Bundle, cases: Sequence[Case], threads: int, choices: Mapping[str, int]) -> None:
        self.threads, self.choices = threads, dict(choices)
        self._runner = StepRunner(bundle, [case.sizes for case in cases], threads=threads, tuning=choices)
        self._runner.fill_caches()
        self._steps: list[StepInput] = [self._runner.step(case.sizes) for case in cases]
        self.repeats = [repeats_of(partial(self._runner.program.run, step)) for step in self._steps]

    @property
    def isa(self) -> str:
        return self._runner.program.isa

    def time(self, case: int) -> float:
        """Seconds of a step of a case: the mean of some."""
        step, repeats, run = self._steps[case], self.repeats[case], self._runner.program.run
        start = time.perf_counter()
        for _ in range(repeats):
            run(step)
        return (time.perf_counter() - start) / repeats


def _is_part(tried: Tried, best: Contender) -> bool:
    """A later value of the same tunable takes the place of an earlier one."""
    value = best.threads if tried.name == "threads" else best.choices.get(tried.name)
    return value == tried.value


def fewer_threads(cores: int) -> list[int]:
    """Returns the numbers of threads to try besides one per core: half as many, for cores of two hardware threads."""
    return [cores // 2] if cores > 1 else []


def _with(bundle: Bundle, cases: Sequence[Case], best: Contender, name: str, value: int) -> Contender:
    if name == "threads":
        return Contender(bundle, cases, value, best.choices)
    return Contender(bundle, cases, best.threads, best.choices | {name: value})
