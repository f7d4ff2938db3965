"""Times steps of a target's program for ``optimize tune``, alternating between two sets of choices.

A target that can be tuned has a module ``compile.tune`` in its package, with a function ``tune`` (``Tune``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import CacheGroup, Int32Array, StepInput
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.progress import Progress
from enginewright.runtime.shared.step_costs import StepSizes
from enginewright.runtime.shared.step_schema import port_of

_SHORT, _LONG, _BATCH, _PROMPT = 128, 1024, 8, 128
_SECONDS = 0.02

STAGE = "tune"
LEAST_GAIN = 1.03
"""The least mean gain over all cases for which choices are stored. Two programs with the same choices differed by up to
1 %.
"""

WORST = 0.97
"""The least gain of a single case for which choices are stored."""

_SEED = 20261120


class Tuned(Protocol):
    """A result of tuning."""

    def to_json(self) -> dict[str, Any]:
        """Returns the result as values that JSON has."""

    def table(self) -> list[str]:
        """Returns the lines of a table with the choices that were tried and their gains."""

    def summary(self) -> list[str]:
        """Returns lines of text with the choices and the path of their file."""


class Tune(Protocol):
    """The signature of a target's ``tune``, which measures choices for a bundle and stores the faster ones."""

    def __call__(
        self,
        bundle: Bundle,
        *,
        seconds: float,
        threads: int,
        records: Path | None,
        write: bool,
        progress: Progress,
    ) -> Tuned:
        """Tunes a target of a bundle. Raises an EnginewrightError.

        Args:
            bundle: the opened bundle.
            seconds: the maximum time of the measurement.
            threads: the number of threads; 0 means one for each core.
            records: a file of choices from an earlier run, for targets that write one; then nothing is measured.
            write: True if the choices are stored.
            progress: called with the stage "tune".
        """


@dataclass(frozen=True)
class Trial:
    """A choice, compared with the best choices so far.

    Attributes:
        name, value: the tunable and its value.
        gain: the geometric mean of ``gains``.
        gains: the name of a case -> the time without the choice divided by the time with it, the median over the
            rounds.
        faster: True if it became part of the best choices.
    """

    name: str
    value: int
    gain: float
    gains: dict[str, float]
    faster: bool


T = TypeVar("T", bound=Trial)


@dataclass(frozen=True, kw_only=True)
class Measured(Generic[T]):
    """The fields that the results of all targets' tuning have.

    Attributes:
        gain, gains: the gains of all choices together, as in ``Trial``; 1 if nothing is faster, or nothing was
            compared.
        tried: the choices that were tried in time.
        candidates: the number of all choices.
        seconds: the duration of tuning.
        most_seconds: the maximum duration.
    """

    gain: float
    gains: dict[str, float]
    tried: tuple[T, ...]
    candidates: int
    seconds: float
    most_seconds: float

    def measured(self) -> dict[str, Any]:
        """Returns the gains and the trials as values that JSON has, for ``Tuned.to_json``."""
        return {
            "gain": self.gain,
            "gains": self.gains,
            "tried": [asdict(t) for t in self.tried],
            "candidates": self.candidates,
            "seconds": self.seconds,
        }

    def too_short(self) -> list[str]:
        """Returns a line for ``Tuned.summary`` if the time ended before all choices were tried; otherwise []."""
        missing = self.candidates - len(self.tried)
        if not missing:
            return []
        return [
            f"{self.most_seconds:g} seconds were too short for {missing} of {self.candidates} choices: pass a larger "
            "--seconds"
        ]


@dataclass(frozen=True)
class Case:
    """A step of fixed sizes that is timed, with its name in reports."""

    name: str
    sizes: StepSizes


def cases_of(context: int) -> tuple[Case, ...]:
    """Returns the cases to time: decode steps of 1 and of 8 requests, one at a long context, and a prompt.

    ``context``: the most tokens of a request, which limits the lengths.
    """
    short, long, prompt = (min(n, context) for n in (_SHORT, _LONG, _PROMPT))
    cases = [
        Case(f"decode, 1 request at {short}", StepSizes((1,), (short,))),
        Case(f"decode, {_BATCH} requests at {short}", StepSizes((1,) * _BATCH, (short,) * _BATCH)),
        Case(f"prompt of {prompt}", StepSizes((prompt,), (prompt,))),
    ]
    if long > short:
        cases.append(Case(f"decode, 1 request at {long}", StepSizes((1,), (long,))))
    return tuple(cases)


class Timed:
    """A program with some choices, whose steps are timed.

    Args:
        runs: for each case, a function that runs a step of it.
        seconds: the approximate duration of one measurement, for which short steps are repeated.
    """

    def __init__(self, runs: Sequence[Callable[[], object]], seconds: float = _SECONDS) -> None:
        self._runs = runs
        self.repeats = [repeats_of(run, seconds) for run in runs]

    def time(self, case: int) -> float:
        """Returns the seconds of a step of the case with this index: the mean of its repeats."""
        run, repeats = self._runs[case], self.repeats[case]
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats


def repeats_of(run: Callable[[], object], seconds: float = _SECONDS) -> int:
    """Returns how many times ``run``, which runs a step, fits into ``seconds``, at least 1."""
    run()  # brings the weights into memory, and finds places for what is computed
    start = time.perf_counter()
    run()
    return max(1, round(seconds / max(time.perf_counter() - start, 1e-6)))


def random_step(
    groups: Sequence[CacheGroup],
    vocabulary: int,
    sizes: StepSizes,
    *,
    mixed_blocks: bool = False,
    ports: Sequence[str] = (),
) -> StepInput:
    """Returns a step of random tokens at the end of each request's context, with logits for each request's last token.

    Args:
        groups: the program's cache groups.
        vocabulary: the number of token ids.
        sizes: the tokens and the context of each request.
        mixed_blocks: True if block tables are in a random order, as after some time of serving; otherwise ascending.
        ports: the names of further arrays of the program, which are 0.
    """
    random = np.random.default_rng(_SEED)
    requests, longest = len(sizes.lengths), max(sizes.contexts)
    tables: dict[str, Int32Array] = {}
    for group in groups:
        width = -(-longest // group.block_size)
        blocks = np.arange(requests * width, dtype=np.int32)
        tables[group.name] = (random.permutation(blocks) if mixed_blocks else blocks).reshape(requests, width)
    axes = (sum(sizes.lengths), requests, requests, 1)
    return StepInput.packed(
        more={name: np.zeros(port_of(name).sizes(*axes), np.int32) for name in ports},
        ids=random.integers(0, vocabulary, sum(sizes.lengths), dtype=np.int32),
        counts=sizes.lengths,
        kv_len=sizes.contexts,
        tables=tables,
        groups=groups,
        rows=np.cumsum(sizes.lengths) - 1,
    )


def check_seconds(seconds: float) -> None:
    """Raises RequestError unless the time for tuning is above 0 and at most a day."""
    if not 0 < seconds <= 86_400:
        raise RequestError(f"seconds: {seconds:g} is out of range", hint="It must be above 0, and a day at most.")


def compare(one: Timed, other: Timed, cases: Sequence[Case], rounds: int) -> dict[str, float]:
    """Returns, by case, the time of ``one`` divided by the time of ``other``, the median over ``rounds`` rounds.

    The two alternate, and take turns in being first.
    """
    ratios: dict[str, list[float]] = {case.name: [] for case in cases}
    for turn in range(rounds):
        for i, case in enumerate(cases):
            if turn % 2:
                second, first = other.time(i), one.time(i)
            else:
                first, second = one.time(i), other.time(i)
            ratios[case.name].append(first / second)
    return {name: median(values) for name, values in ratios.items()}


def worth(gains: Iterable[float]) -> bool:
    """Returns True if these gains are large enough on average, and none is too low."""
    values = list(gains)
    return mean(values) >= LEAST_GAIN and min(values) >= WORST


def mean(gains: Iterable[float]) -> float:
    """Returns the geometric mean."""
    values = list(gains)
    return math.exp(sum(map(math.log, values)) / len(values))
