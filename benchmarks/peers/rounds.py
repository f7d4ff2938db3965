"""The rounds: in each, every engine runs once, and another begins."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from peers.engines import ENGINES, STORED
from peers.loading import BUILD
from peers.models import MODELS
from peers.prepare import Contender, Missing
from peers.processes import Command, WorkerError, run
from peers.workload import Report, Task, Workload

STARTS = 1
"""Cold starts that are timed in a round, behind one for the file cache."""


@dataclass
class Measured:
    """All runs of one contender.

    Attributes:
        rounds: figures of each round, by name; a figure that a round lacks is not in it.
        bytes: the most of any run.
    """

    contender: Contender
    engine: str = ""
    settings: str = ""
    rounds: list[dict[str, float]] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, index: int, task: Task, report: Report) -> None:
        """Takes a report of round ``index``."""
        self.rounds += [{} for _ in range(index + 1 - len(self.rounds))]
        self.rounds[index] |= report.figures
        self.engine = report.engine or self.engine
        self.settings = report.settings or self.settings
        if task == "speed":
            for name, size in report.bytes.items():
                self.bytes[name] = max(size, self.bytes.get(name, 0))


@dataclass(frozen=True)
class Job:
    """One process: a task of a contender in a round."""

    round: int
    task: Task
    contender: Contender


def plan(contenders: Sequence[Contender], rounds: int, tasks: Sequence[Task]) -> list[Job]:
    """All jobs in their order: by round, model, format and task; engines alternate, and another begins each time."""
    jobs = []
    groups = list(dict.fromkeys((c.model, c.format) for c in contenders))
    for index in range(rounds):
        for model, kind in groups:
            same_model = [c for c in contenders if (c.model, c.format) == (model, kind)]
            for task in tasks:
                if task == "long" and index >= MODELS[model].long_rounds:
                    continue
                if task in ("logits", "far") and index:
                    continue
                if task == "logits" and not MODELS[model].reference:
                    continue
                if task == "far" and kind not in (MODELS[model].formats[0], *STORED):
                    continue  # what decides there, attention and its cache, is the same in all
                able = [c for c in same_model if task not in ENGINES[c.engine].lacks]
                jobs += [Job(index, task, able[(index + i) % len(able)]) for i in range(len(able))]
    return jobs


class Progress:
    """A line for each job: how far, how long, what it gave."""

    def __init__(self, jobs: int) -> None:
        self._jobs, self._done, self._start = jobs, 0, time.monotonic()

    def tell(self, job: Job, said: str) -> None:
        """One more is done."""
        self._done += 1
        passed = time.monotonic() - self._start
        left = passed / self._done * (self._jobs - self._done)
        where = f"{job.contender.model} {job.contender.format} {job.contender.engine} {job.task}"
        print(f"[{self._done}/{self._jobs}, {passed:.0f} s, about {left:.0f} s left] {where}: {said}", file=sys.stderr)


def measure(
    jobs: Sequence[Job],
    work: Workload,
    measured: dict[Contender, Measured],
    missing: list[Missing],
    *,
    before: Callable[[], None],
) -> None:
    """Runs the jobs and fills ``measured``; ``before`` is called before each round.

    An engine that fails at a task is left out of what comes of it, with its reason in ``missing``; what was measured so
    far stays if this is interrupted.
    """
    progress = Progress(len(jobs))
    failed: set[tuple[Contender, Task]] = set()
    batches: dict[Contender, tuple[int, ...]] = {}
    last = -1
    for job in jobs:
        contender, task = job.contender, job.task
        if job.round != last:
            before()
            last = job.round
        if (contender, task) in failed:
            progress.tell(job, "left out")
            continue
        try:
            report = _report(job, work, batches, missing)
        except WorkerError as e:
            failed.add((contender, task))
            missing.append(Missing(contender.engine, contender.model, contender.format, f"{task}: {e}"))
            progress.tell(job, f"failed: {e}")
            continue
        measured.setdefault(contender, Measured(contender)).add(job.round, task, report)
        progress.tell(job, ", ".join(f"{name} {value:,.4g}" for name, value in report.figures.items()))


def _report(job: Job, work: Workload, batches: dict[Contender, tuple[int, ...]], missing: list[Missing]) -> Report:
    """Runs a job. An engine that fails at the largest batch is measured without that batch, from then on.

    ``batches`` has what is left of the batches of such engines; ``missing`` takes the reason. Raises WorkerError.
    """
    contender, reasons = job.contender, []
    while True:
        able = batches.get(contender, work.batches)
        try:
            report = run(command_of(job, replace(work, batches=able)))
        except WorkerError as e:
            if job.task != "speed" or not able:
                raise
            reasons.append(f"{able[0]} requests: {e}")
            batches[contender] = able[1:]
        else:
            missing += [Missing(contender.engine, contender.model, contender.format, reason) for reason in reasons]
            return report


def command_of(job: Job, work: Workload) -> list[str]:
    """The command of a job."""
    command, path = job.contender.command, job.contender.path
    work = replace(work_for(job.contender.model, work), seed=job.round)
    if job.task == "start":
        stopwatch = [sys.executable, "-m", "peers.processes", str(STARTS)]
        return [*command.prefix, *stopwatch, *command.bare("start", path, work)]
    if job.task == "logits":
        reference = BUILD / job.contender.model / "reference.npz"
        return command.line("logits", path, work, "--reference", str(reference))
    return command.line(job.task, path, work)


def work_for(model: str, work: Workload) -> Workload:
    """No more steps and no longer prompts than the model can do in a reasonable time."""
    most = MODELS[model]
    return replace(
        work,
        steps=min(work.steps, most.steps),
        short_prompt=min(work.short_prompt, most.short_prompt),
        long_prompt=min(work.long_prompt, most.long_prompt),
    )


def roofline(contender: Contender, work: Workload) -> Report:
    """Measures the machine's limits for our bundle. Raises WorkerError."""
    command = Command(Path(sys.executable), "roofline", contender.command.prefix)
    return run(command.line("roofline", contender.path, work))
