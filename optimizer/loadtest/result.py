"""The result of a load test: times, rates, goodput, errors by kind, and the load tool's own CPU time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginewright.optimizer.shared.files import write_output

from .options import Goals, LoadOptions
from .run import Record, Run
from .workload import Workload

_BUSY = 0.7
"""The share of a core from which on the load tool itself may limit the rate."""

_LATE = 0.01
"""The delay in sending requests, in seconds, from which on the result has a note about it."""


@dataclass(frozen=True)
class Spread:
    """The distribution of a time, in seconds, over requests or pieces of text: count, mean, percentiles and the
    largest.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Returns the distribution of the values that aren't None; None if there are none."""
        numbers = np.fromiter((value for value in values if value is not None), np.float64)
        if not numbers.size:
            return None
        p50, p90, p95, p99 = (float(value) for value in np.percentile(numbers, (50, 90, 95, 99)))
        return cls(int(numbers.size), float(numbers.mean()), p50, p90, p95, p99, float(numbers.max()))


@dataclass(frozen=True)
class Goodput:
    """The number and rate of requests that met all goals.

    Attributes:
        goals: the goals.
        asked: the number of requests whose clients stayed; failed ones missed the goals.
        met: the number of requests that met all goals.
        per_second: the rate of requests that met all goals.
    """

    goals: Goals
    asked: int
    met: int
    per_second: float

    @property
    def share(self) -> float:
        """The share of the requests that met all goals."""
        return self.met / self.asked if self.asked else 0.0


@dataclass(frozen=True)
class Figures:
    """The figures of all requests, or of a class.

    Attributes:
        name: the name of the class; "" for all requests.
        finished, left, failed, unfinished: the number of requests that were answered, that their clients left, that
            failed, and that had no end when the test was interrupted.
        errors: kind -> the number of errors, and the first message.
        prompt_tokens, cached_tokens: as the server counts them; None if it doesn't report them.
        tokens: tokens of all answers.
        texts: texts of requests for embeddings, with a vector each.
        tokens_per_second, texts_per_second, requests_per_second: the rates of tokens, of texts, and of finished
            requests.
        ttft, tpot, gap, end_to_end: times to the first text, for each further token, between pieces, to the end.
        goodput: the requests that met all goals; None without goals.
    """

    name: str
    finished: int
    left: int
    failed: int
    unfinished: int
    errors: dict[str, tuple[int, str]]
    prompt_tokens: int | None
    cached_tokens: int | None
    tokens: int
    texts: int
    tokens_per_second: float
    texts_per_second: float
    requests_per_second: float
    ttft: Spread | None
    tpot: Spread | None
    gap: Spread | None
    end_to_end: Spread | None
    goodput: Goodput | None

    @classmethod
    def of(cls, name: str, records: Sequence[Record], seconds: float, goals: Goals) -> Figures:
        """Returns the figures of a set of requests.

        Args:
            name: the class of the requests; "" for all.
            records: the requests.
            seconds: the duration of the test.
            goals: the goals of goodput.
        """
        gaps = np.concatenate([np.frombuffer(one.gaps, np.float32) for one in records] or [np.zeros(0, np.float32)])
        errors = _errors(records)
        tokens, finished = sum(one.tokens for one in records), sum(one.whole for one in records)
        texts = sum(one.texts for one in records)
        return cls(
            name=name,
            finished=finished,
            left=sum(one.left for one in records),
            failed=sum(count for count, _ in errors.values()),
            unfinished=sum(one.unfinished for one in records),
            errors=errors,
            prompt_tokens=_total(one.prompt_tokens for one in records),
            cached_tokens=_total(one.cached_tokens for one in records),
            tokens=tokens,
            texts=texts,
            tokens_per_second=_rate(tokens, seconds),
            texts_per_second=_rate(texts, seconds),
            requests_per_second=_rate(finished, seconds),
            ttft=Spread.of(one.ttft for one in records),
            tpot=Spread.of(one.tpot for one in records),
            gap=Spread.of(gaps.tolist()),
            end_to_end=Spread.of(one.end_to_end for one in records),
            goodput=_goodput(records, seconds, goals) if goals.some else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        fields = {name: vars(value) if isinstance(value, Spread) else value for name, value in vars(self).items()}
        fields["errors"] = {
            kind: {"count": count, "example": example} for kind, (count, example) in self.errors.items()
        }
        if self.goodput is not None:
            fields["goodput"] = vars(self.goodput) | {"goals": vars(self.goodput.goals), "share": self.goodput.share}
        return fields


def _errors(records: Sequence[Record]) -> dict[str, tuple[int, str]]:
    """Returns the number of errors and the first message of each kind, the most frequent kind first."""
    failed = [(one.error, one.message) for one in records if one.error is not None]
    examples = dict(reversed(failed))
    return {kind: (count, examples[kind]) for kind, count in Counter(kind for kind, _ in failed).most_common()}


def _total(counts: Iterable[int | None]) -> int | None:
    """Returns the sum of the known counts; None if none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def met(record: Record, goals: Goals) -> bool:
    """Returns True if a request met all goals. An answer of one token has no time per further token, and meets any."""
    if not record.whole:
        return False
    times = ((goals.ttft, record.ttft), (goals.tpot, record.tpot), (goals.end_to_end, record.end_to_end))
    return all(goal is None or time is None or time <= goal for goal, time in times)


def _goodput(records: Sequence[Record], seconds: float, goals: Goals) -> Goodput:
    stayed = [one for one in records if not one.left and not one.unfinished]
    good = sum(met(one, goals) for one in stayed)
    return Goodput(goals, len(stayed), good, _rate(good, seconds))


@dataclass(frozen=True)
class LoadResult:
    """A load test's result.

    Attributes:
        url, api, model: the server, its API, and the model's name.
        workload: the load, as ``Workload.describe`` returns it.
        seconds: the time from the first request to the last end.
        counted: True if the server counted the tokens; False if they are pieces of text.
        interrupted: True if the test was interrupted.
        figures: the figures of all requests.
        classes: the figures of each class; empty if there is only one.
        late: the delay with which requests were sent.
        cpu_seconds: the load tool's own CPU time.
        records: the requests, in the order of their times.
    """

    url: str
    api: str
    model: str
    workload: dict[str, Any]
    seconds: float
    counted: bool
    interrupted: bool
    figures: Figures
    classes: tuple[Figures, ...]
    late: Spread | None
    cpu_seconds: float
    records: tuple[Record, ...]

    @property
    def cpu_share(self) -> float:
        """The share of a core that the load tool used."""
        return self.cpu_seconds / self.seconds if self.seconds else 0.0

    def notes(self) -> list[str]:
        """Returns warnings about the measurement itself, such as a load tool that limits the rate."""
        lines = []
        if not self.counted:
            lines.append("the server didn't say how many tokens its answers have: pieces of text were counted instead")
        if self.cpu_share > _BUSY:
            lines.append(f"the load tool took {self.cpu_share:.0%} of a core: it may be the limit, not the server")
        if self.late is not None and self.late.p99 > _LATE:
            lines.append(f"1 % of the requests were sent {self.late.p99 * 1e3:.0f} ms late or more; times count that")
        if self.interrupted:
            lines.append(f"interrupted: {self.figures.unfinished} requests were given up, and aren't counted")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Returns the result without the single requests, as plain values."""
        tokens = self.figures.tokens
        return {
            "format_version": 1,
            "url": self.url,
            "api": self.api,
            "model": self.model,
            "workload": self.workload,
            "seconds": self.seconds,
            "interrupted": self.interrupted,
            "tokens_counted_by": "server" if self.counted else "pieces",
            **{name: value for name, value in self.figures.to_json().items() if name != "name"},
            "classes": {one.name: one.to_json() for one in self.classes},
            "load_tool": {
                "cpu_seconds": self.cpu_seconds,
                "cpu_share": self.cpu_share,
                "cpu_microseconds_per_token": self.cpu_seconds / tokens * 1e6 if tokens else None,
                "sent_late": None if self.late is None else vars(self.late),
            },
            "notes": self.notes(),
        }

    def write_records(self, path: Path) -> None:
        """Writes a line of JSON for each request to a file. Raises BundleError if it can't be written."""
        write_output(path, "".join(json.dumps(one.to_json()) + "\n" for one in self.records))


def result_of(run: Run, options: LoadOptions, workload: Workload) -> LoadResult:
    """Returns the result of a run.

    Args:
        run: the measured requests.
        options: of the test.
        workload: the load that was sent.
    """
    by_class = {one.name: one.goals for one in options.classes}
    several = len(by_class) > 1
    groups = {name: [one for one in run.records if one.of_class == name] for name in by_class}
    classes = tuple(Figures.of(name, groups[name], run.seconds, goals) for name, goals in by_class.items())
    goals = next(iter(by_class.values())) if len(set(by_class.values())) == 1 else Goals()
    return LoadResult(
        url=options.url,
        api=options.api,
        model=run.model,
        workload=workload.describe(),
        seconds=run.seconds,
        counted=run.counted,
        interrupted=run.interrupted,
        figures=Figures.of("", run.records, run.seconds, goals),
        classes=classes if several else (),
        late=Spread.of(max(0.0, one.sent - one.due) for one in run.records),
        cpu_seconds=run.cpu_seconds,
        records=run.records,
    )
