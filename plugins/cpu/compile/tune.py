"""Searches for faster settings of the cpu target: other values of tunables and other numbers of threads, one at a
time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from enginewright.runtime.bundle.reader import Bundle, tuning_path
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent
from enginewright.runtime.shared.threads import available_threads

from ...steps.timed_steps import (
    STAGE,
    Case,
    Measured,
    Timed,
    Trial,
    cases_of,
    check_seconds,
    compare,
    mean,
    worth,
)
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
"""Tunable -> the values to try in addition to the executor's default."""

_FEWEST, _MOST = 3, 25
"""The least and the largest number of rounds of a comparison."""
_LAST = 2
"""The factor by which the final comparison has more rounds."""
_ROWS_SHARE = 0.2
"""The share of the time for measuring steps with several rows of a request."""


@dataclass(frozen=True)
class Tried(Trial):
    """A value of a tunable, or of the number of threads ("threads"), compared with the best settings so far.

    Attributes:
        kept: True if the value is in the file, because the best settings were also faster in the final comparison.
    """

    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class TuneResult(Measured[Tried]):
    """The result of `optimize tune` for the cpu target.

    Attributes:
        file: the choices that are in the file, or would be.
        path: the file's path.
        written: True if the file was written.
    """

    file: TuningFile
    path: Path
    written: bool

    def to_json(self) -> dict[str, Any]:
        """Returns the result as values that JSON has."""
        return {"path": str(self.path), "written": self.written, "file": self.file.model_dump(), **self.measured()}

    def table(self) -> list[str]:
        """Returns the lines of three tables.

        They compare each value with the best settings so far, and the final settings with the executor's defaults by
        kind of step. The third has the times of steps with several rows of a request.
        """
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
        """Returns lines of text with the chosen settings and the path of their file."""
        chosen = dict(self.file.choices) | ({"threads": self.file.threads} if self.file.threads else {})
        lines = []
        if chosen:
            lines.append("chosen: " + ", ".join(f"{name} {value:,}" for name, value in chosen.items()))
        elif self.tried:
            lines.append("nothing is faster here than the executor's own choices")
        lines += self.too_short()
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
    """Times steps with other values of the tunables of ``CANDIDATES`` and other numbers of threads.

    The best settings are written to a file next to the bundle. Each candidate runs interleaved with the best settings
    so far. At the end, the best settings run interleaved with the executor's defaults, and are stored if they are
    faster by ``LEAST_GAIN``; otherwise the file has none. A candidate is begun only if it and the final comparison will
    end within ``seconds``; if there is no time for any, no file is written. Finally, steps of several rows of a request
    are timed with the stored settings (``row_seconds``).

    Args:
        bundle: an open bundle, whose target cpu is ready.
        seconds: the maximum time of the measurement, without opening the program.
        threads: the number of threads. 0 tries one for each core and half as many.
        records: must be None: this target has no records.
        write: True writes the file.
        progress: called with the stage "tune".

    Raises:
        RequestError: ``seconds`` is out of range, or there are ``records``.
        BundleError: the target isn't ready, or the file can't be written.
        CapacityError: the program, or the KV cache of its steps, doesn't fit into the memory.
    """
    check_seconds(seconds)
    if records is not None:
        raise RequestError(
            "records: target cpu keeps none", hint="Leave --records out, or name a target that does: tvm."
        )
    search = _Search(bundle, threads, seconds, progress)
    search.run()
    gains, is_better = search.compare_with_default()
    chosen = search.best if is_better else search.default
    file = TuningFile.for_here(
        bundle,
        search.default.isa,
        threads=chosen.threads if not threads else 0,
        choices=chosen.choices,
        gains={name: round(gain, 4) for name, gain in gains.items()} if is_better else {},
        row_seconds=search.row_seconds(chosen),
    )
    path = tuning_path(bundle)
    written = write and bool(search.tried)
    if written:
        file.write(path)
    search.report(2)
    return TuneResult(
        file=file,
        path=path,
        written=written,
        gain=mean(gains.values()),
        gains=gains,
        tried=tuple(replace(t, kept=is_better and t.faster and _is_part(t, search.best)) for t in search.tried),
        candidates=len(search.plan),
        seconds=time.perf_counter() - search.began,
        most_seconds=seconds,
    )


class _Search:
    """Compares one candidate after the other with the best settings so far, until the time is over.

    Args:
        bundle: an open bundle with a ready target cpu.
        threads: the number of threads; 0 means one for each core, and also tries half as many.
        seconds: the maximum time of the measurement, without opening the program.
        progress: called with the stage "tune".

    Attributes:
        began: the time at which the search began, of ``time.perf_counter``.
        plan: the candidates, (name of a tunable or "threads", value).
        tried: the candidates tried so far, with their times.
        default: the program with the executor's defaults.
        best: the program with the best settings so far.
    """

    def __init__(self, bundle: Bundle, threads: int, seconds: float, progress: Progress) -> None:
        self.began = time.perf_counter()
        self._bundle, self._seconds, self._progress = bundle, seconds, progress
        self._cases = cases_of(bundle.model.context_length)
        self.plan = [(name, value) for name, values in CANDIDATES.items() for value in values]
        self.plan += [] if threads else [("threads", n) for n in fewer_threads(available_threads())]
        self.tried: list[Tried] = []
        self.default = self.best = Contender(bundle, self._cases, threads, {})
        self._opening = time.perf_counter() - self.began
        self._until = self.began + (1 - _ROWS_SHARE) * seconds - self._opening
        self._round_seconds = 2 * sum(n * self.default.time(i) for i, n in enumerate(self.default.repeats))
        left = self._until - time.perf_counter() - self._opening * len(self.plan)
        self._rounds = min(max(int(left / (self._round_seconds * (len(self.plan) + _LAST))), _FEWEST), _MOST)

    def run(self) -> None:
        """Tries candidates, as long as there is time for one more and for the final comparison."""
        needed = self._opening + self._round_seconds * self._rounds * (1 + _LAST)
        for done, (name, value) in enumerate(self.plan):
            if time.perf_counter() + needed > self._until:
                break
            self._progress(ProgressEvent(STAGE, done, len(self.plan) + 2, f"{name} {value:,}"))
            other = _with(self._bundle, self._cases, self.best, name, value)
            gains = compare(self.best, other, self._cases, self._rounds)
            faster = worth(gains.values())
            self.tried.append(Tried(name, value, mean(gains.values()), gains, faster))
            self.best = other if faster else self.best

    def compare_with_default(self) -> tuple[dict[str, float], bool]:
        """Compares the best settings with the executor's defaults. Returns the gains by case, and True if they are
        worth storing.
        """
        self.report(0, "the best beside the executor's own")
        if self.best is self.default:
            return {case.name: 1.0 for case in self._cases}, False
        gains = compare(self.default, self.best, self._cases, _LAST * self._rounds)
        return gains, worth(gains.values())

    def row_seconds(self, chosen: Contender) -> dict[int, tuple[float, ...]]:
        """Returns the seconds of steps with several rows of a request, by context; {} if nothing was tried."""
        if not self.tried:
            return {}
        self.report(1, "rows of one request")
        contexts = tuple(sorted({min(context, self._bundle.model.context_length) for context in CONTEXTS}))
        left = self.began + self._seconds - time.perf_counter() - self._opening
        return row_seconds(self._bundle, contexts, left, threads=chosen.threads, choices=chosen.choices)

    def report(self, phase: int, what: str = "") -> None:
        """Reports the progress after the candidates: ``phase`` is 0 for the final comparison, 1 for rows, 2 at the end.

        ``what`` is shown as the current work.
        """
        self._progress(ProgressEvent(STAGE, len(self.plan) + phase, len(self.plan) + 2, what))


class Contender(Timed):
    """A program with some settings, ready to run the cases of a comparison.

    Args:
        bundle: an open bundle with a ready target cpu.
        cases: the cases that will be run.
        threads: the number of threads; 0 means one for each core.
        choices: the values of tunables; see ``CpuProgram``.
    """

    def __init__(self, bundle: Bundle, cases: Sequence[Case], threads: int, choices: Mapping[str, int]) -> None:
        self.threads, self.choices = threads, dict(choices)
        self._runner = StepRunner(bundle, [case.sizes for case in cases], threads=threads, tuning=choices)
        self._runner.fill_caches()
        super().__init__([partial(self._runner.program.run, self._runner.step(case.sizes)) for case in cases])

    @property
    def isa(self) -> str:
        return self._runner.program.isa


def _is_part(tried: Tried, best: Contender) -> bool:
    """Returns True if ``best`` has the value that was tried. A later value of the same tunable may have replaced it."""
    value = best.threads if tried.name == "threads" else best.choices.get(tried.name)
    return value == tried.value


def fewer_threads(cores: int) -> list[int]:
    """Returns the numbers of threads to try in addition to one per core: half as many, in case cores have two hardware
    threads.
    """
    return [cores // 2] if cores > 1 else []


def _with(bundle: Bundle, cases: Sequence[Case], best: Contender, name: str, value: int) -> Contender:
    if name == "threads":
        return Contender(bundle, cases, value, best.choices)
    return Contender(bundle, cases, best.threads, best.choices | {name: value})
