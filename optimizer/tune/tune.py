"""Looks for choices of the cpu target that are faster than its own, one after the other, in paired runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from enginewright.plugins.cpu.serve.tuning import TuningFile
from enginewright.plugins.cpu.threads import available_threads
from enginewright.runtime.bundle.reader import Bundle, tuning_path
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .cases import Case, Contender, Timed, cases_of
from .row_seconds import CONTEXTS, row_seconds

STAGE = "tune"
LEAST_GAIN = 1.03
"""Of the mean over the cases. Two programs with the same choices were up to 1 % apart: their memory lies elsewhere."""

WORST = 0.97
"""No case may lose more than this."""

CANDIDATES: Mapping[str, tuple[int, ...]] = {
    "task_bytes": (1 << 15, 1 << 19),
    "thread_tasks": (4, 16),
    "task_rows": (48, 192),
    "small_work": (1 << 14, 1 << 18),
    "split_tiles": (2, 8),
    "spin_microseconds": (10, 250),
}
"""Tunable -> what is tried beside the executor's own."""

_FEWEST, _MOST = 3, 25
"""Rounds of a comparison."""
_LAST = 2
"""Times as many rounds for what is said in the end."""
_ROWS_SHARE = 0.2
"""Of the time, for what steps of several rows of a request take."""


@dataclass(frozen=True)
class Tried:
    """A choice beside the best so far.

    Attributes:
        name, value: of the tunable, or threads.
        gain: the geometric mean over the cases of the time without it over the time with it.
        gains: by case: the median over the rounds.
        faster: whether it became part of the best.
        kept: whether it is part of what is chosen: the best was faster in the last comparison too.
    """

    name: str
    value: int
    gain: float
    gains: dict[str, float]
    faster: bool
    kept: bool = False


@dataclass(frozen=True)
class TuneResult:
    """What was found.

    Attributes:
        file: what is kept, or would be.
        path, written: where, and whether it was.
        gain, gains: of all choices together, as in ``Tried``.
        candidates: how many there are; ``tried`` has those that there was time for.
    """

    file: TuningFile
    path: Path
    written: bool
    gain: float
    gains: dict[str, float]
    tried: tuple[Tried, ...]
    candidates: int
    seconds: float

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


def tune(
    bundle: Bundle, *, seconds: float = 40.0, threads: int = 0, write: bool = True, progress: Progress = silent
) -> TuneResult:
    """Measures, and keeps what it found beside the bundle.

    Each candidate runs interleaved with the best so far. In the end the best runs interleaved with the executor's own
    choices, and is kept if it is faster by ``LEAST_GAIN``; else what is kept says that nothing is. No candidate is
    begun that would not end in time, the last comparison included; if there is no time for any, no file is written.
    Last comes what steps of several rows of a request take with what was chosen (``row_seconds``).

    Args:
        bundle: opened, with a ready target cpu.
        seconds: how long to measure, at most: opening the program, which comes first, may take longer.
        threads: 0 takes one for each core, and tries half as many.
        write: whether the file is written.
        progress: called with the stage "tune".

    Raises:
        RequestError: ``seconds`` is out of range.
        BundleError: the target isn't ready, or the file can't be written.
        CapacityError: as for a program that is opened to be served.
    """
    check_seconds(seconds)
    began = time.perf_counter()
    cases = cases_of(bundle.model.context_length)
    plan = [(name, value) for name, values in CANDIDATES.items() for value in values]
    plan += [] if threads else [("threads", n) for n in fewer_threads(available_threads())]
    own = best = Contender(bundle, cases, threads, {})
    opening = time.perf_counter() - began
    until = began + (1 - _ROWS_SHARE) * seconds - opening
    round_seconds = 2 * sum(own.time(i) * own.repeats[i] for i in range(len(cases)))
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
    gains = compare(own, best, cases, _LAST * rounds) if best is not own else {case.name: 1.0 for case in cases}
    kept = best is not own and worth(gains.values())
    chosen = best if kept else own
    rows: dict[int, tuple[float, ...]] = {}
    if tried:
        progress(ProgressEvent(STAGE, len(plan) + 1, len(plan) + 2, "rows of one request"))
        contexts = tuple(sorted({min(context, bundle.model.context_length) for context in CONTEXTS}))
        left = began + seconds - time.perf_counter() - opening
        rows = row_seconds(bundle, contexts, left, threads=chosen.threads, choices=chosen.choices)
    file = TuningFile.for_here(
        bundle,
        own.isa,
        threads=chosen.threads if not threads else 0,
        choices=chosen.choices,
        gains={name: round(gain, 4) for name, gain in gains.items()} if kept else {},
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
        tried=tuple(replace(t, kept=kept and t.faster and _is_part(t, best)) for t in tried),
        candidates=len(plan),
        seconds=time.perf_counter() - began,
    )


def _is_part(tried: Tried, best: Contender) -> bool:
    """A later value of the same tunable takes the place of an earlier one."""
    found = best.threads if tried.name == "threads" else best.choices.get(tried.name)
    return found == tried.value


def check_seconds(seconds: float) -> None:
    """Raises RequestError if it is out of range."""
    if not 0 < seconds <= 86_400:
        raise RequestError(f"seconds: {seconds:g} is out of range", hint="It must be above 0, and a day at most.")


def compare(one: Timed, other: Timed, cases: Sequence[Case], rounds: int) -> dict[str, float]:
    """Case -> time of ``one`` over that of ``other``: medians of rounds in which they alternate, and in who begins."""
    ratios: dict[str, list[float]] = {case.name: [] for case in cases}
    for turn in range(rounds):
        for i, case in enumerate(cases):
            if turn % 2:
                second, first = other.time(i), one.time(i)
            else:
                first, second = one.time(i), other.time(i)
            ratios[case.name].append(first / second)
    return {name: median(found) for name, found in ratios.items()}


def worth(gains: Iterable[float]) -> bool:
    """Whether a choice is faster on average, and nowhere much slower."""
    found = list(gains)
    return mean(found) >= LEAST_GAIN and min(found) >= WORST


def mean(gains: Iterable[float]) -> float:
    """Geometric."""
    found = list(gains)
    return math.exp(sum(map(math.log, found)) / len(found))


def fewer_threads(cores: int) -> list[int]:
    """What is tried beside one for each core: half as many, as where a core has two hardware threads."""
    return [cores // 2] if cores > 1 else []


def _with(bundle: Bundle, cases: Sequence[Case], best: Contender, name: str, value: int) -> Contender:
    if name == "threads":
        return Contender(bundle, cases, value, best.choices)
    return Contender(bundle, cases, best.threads, best.choices | {name: value})
