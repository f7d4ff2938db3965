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
"""The share of a core from which on the load tool may itself be the limit."""

_LATE = 0.01
"""Seconds that sending may lag behind: more is told."""


@dataclass(frozen=True)
class Spread:
    """Seconds of many requests or pieces."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """None where there are no values."""
        numbers = np.fromiter((value for value in values if value is not None), np.float64)
        if not numbers.size:
            return None
        p50, p90, p95, p99 = (float(value) for value in np.percentile(numbers, (50, 90, 95, 99)))
        return cls(int(numbers.size), float(numbers.mean()), p50, p90, p95, p99, float(numbers.max()))


@dataclass(frozen=True)
class Goodput:
    """Requests that met all goals: of those whose clients stayed, failed ones counted as late."""

    goals: Goals
    asked: int
    met: int
    per_second: float

    @property
    def share(self) -> float:
        """The share of those that were asked."""
        return self.met / self.asked if self.asked else 0.0


@dataclass(frozen=True)
class Figures:
    """The figures of all requests, or of a class.

    Attributes:
        finished, left, failed, unfinished: what became of the requests.
        errors: kind -> how many, and an example of the server's words.
        prompt_tokens, cached_tokens: as far as the server says; None where it doesn't.
        ttft, tpot, gap, end_to_end: times to the first text, for each further token, between pieces, to the end.
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
    tokens_per_second: float
    requests_per_second: float
    ttft: Spread | None
    tpot: Spread | None
    gap: Spread | None
    end_to_end: Spread | None
    goodput: Goodput | None

    @classmethod
    def of(cls, name: str, records: Sequence[Record], seconds: float, goals: Goals) -> Figures:
        """Computes the figures of some records over ``seconds``."""
        errors = Counter(one.error for one in records if one.error is not None)
        examples = {one.error: one.message for one in reversed(records) if one.error is not None}
        prompts = [one.prompt_tokens for one in records if one.prompt_tokens is not None]
        cached = [one.cached_tokens for one in records if one.cached_tokens is not None]
        tokens, whole = sum(one.tokens for one in records), sum(one.whole for one in records)
        gaps = np.concatenate([np.frombuffer(one.gaps, np.float32) for one in records] or [np.zeros(0, np.float32)])
        return cls(
            name=name,
            finished=whole,
            left=sum(one.left for one in records),
            failed=sum(errors.values()),
            unfinished=sum(one.unfinished for one in records),
            errors={kind: (count, examples[kind]) for kind, count in errors.most_common()},
            prompt_tokens=sum(prompts) if prompts else None,
            cached_tokens=sum(cached) if cached else None,
            tokens=tokens,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            requests_per_second=whole / seconds if seconds else 0.0,
            ttft=Spread.of(one.ttft for one in records),
            tpot=Spread.of(one.tpot for one in records),
            gap=Spread.of(gaps.tolist()),
            end_to_end=Spread.of(one.end_to_end for one in records),
            goodput=_goodput(records, seconds, goals) if goals.some else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Gives plain values."""
        fields = {name: vars(value) if isinstance(value, Spread) else value for name, value in vars(self).items()}
        fields["errors"] = {
            kind: {"count": count, "example": example} for kind, (count, example) in self.errors.items()
        }
        if self.goodput is not None:
            fields["goodput"] = vars(self.goodput) | {"goals": vars(self.goodput.goals), "share": self.goodput.share}
        return fields


def met(record: Record, goals: Goals) -> bool:
    """Returns True if a request met all goals. An answer of one token has no time per further token, and meets any."""
    if not record.whole:
        return False
    times = ((goals.ttft, record.ttft), (goals.tpot, record.tpot), (goals.end_to_end, record.end_to_end))
    return all(goal is None or time is None or time <= goal for goal, time in times)


def _goodput(records: Sequence[Record], seconds: float, goals: Goals) -> Goodput:
    stayed = [one for one in records if not one.left and not one.unfinished]
    good = sum(met(one, goals) for one in stayed)
    return Goodput(goals, len(stayed), good, good / seconds if seconds else 0.0)


@dataclass(frozen=True)
class LoadResult:
    """A load test's result.

    Attributes:
        url, api, model: what was asked.
        workload: what was sent (``Workload.describe``).
        seconds: from the first request to the last end.
        counted: whether tokens are as the server counts them; else they are pieces of text.
        figures: of all; ``classes``: of each, where there are several.
        late: how long after its time each request was sent.
        cpu_seconds: that the load tool took.
        records: of the requests, in the order of their times.
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
        """The share of a core that the load tool took."""
        return self.cpu_seconds / self.seconds if self.seconds else 0.0

    def notes(self) -> list[str]:
        """Warnings that a reader needs to judge the figures."""
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
        """Everything but the single requests."""
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
        """Writes a line of JSON a request. Raises BundleError if it can't be written."""
        write_output(path, "".join(json.dumps(one.to_json()) + "\n" for one in self.records))


def result_of(run: Run, options: LoadOptions, workload: Workload) -> LoadResult:
    """Counts and sorts what was measured."""
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
