"""Predicts the time of a step on this machine's CPU, from measurements that take some seconds.

The program's steps are run in order on made-up weights and caches (``step_probe``), at a few sizes: 1 to 32 requests at
128 tokens, 1 and 8 at 1,024, 1 at 4,096, prompts of 64 and 512 tokens, and the second half of one of 1,024. There are
about a dozen kinds of step (``step_kinds``). The times of each kind at other sizes are interpolated or extrapolated
linearly: by rows, or for attention by requests and context. The engine's work around a run and the sampler are timed
separately. Products of experts aren't timed; their predicted time is the machine's limit (``report/machine.py``).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from enginewright.runtime.requests.logit_rules import sampling_batch
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.lowered_program import Step
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, counted_as
from enginewright.runtime.shared.threads import available_threads

from ...native.executable import isas
from ...native.sampling import RowSampler
from ...steps.planning import CountedSteps, Device, PlannedSteps, Planning, StepKind, StepSeconds
from .machine import Machine, limit_seconds, measure_machine
from .meeting import meeting_seconds
from .step_probe import StepProbe, Timed

STAGE = "kernels"
_ROWS, _PROMPTS = (1, 2, 3, 5, 7, 9, 13, 18, 24, 32), (64, 512)
_CONTEXTS = {1: (128, 1024, 4096), 8: (128, 1024)}
"""The number of requests -> the contexts at which their attention is timed."""

Point = tuple[float, float]


def decode(requests: int, context: int) -> StepSizes:
    """Returns the sizes of a decode step with one token for each of ``requests`` requests, at this context."""
    return StepSizes((1,) * requests, (context,) * requests)


def prompt(tokens: int) -> StepSizes:
    """Returns the sizes of a step with one prompt of ``tokens`` tokens."""
    return StepSizes((tokens,), (tokens,))


@dataclass(frozen=True)
class Line:
    """A time in seconds as a piecewise linear function of a size. Beyond the outermost points it continues their
    segments.
    """

    points: tuple[Point, ...]

    @classmethod
    def through(cls, points: Sequence[Point]) -> Line:
        """Returns the line through these points, in any order. Of several points at one size, the first counts."""
        return cls(tuple(sorted({x: (x, y) for x, y in reversed(points)}.values())))

    def at(self, size: float) -> float:
        """Returns the interpolated or extrapolated value at ``size``, at least 0."""
        if len(self.points) == 1:
            return self.points[0][1]
        i = min(max(bisect_left(self.points, (size,)), 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[i - 1], self.points[i]
        return max(0.0, y0 + (size - x0) * (y1 - y0) / (x1 - x0))


@dataclass(frozen=True)
class Grid:
    """The sizes at which kernels are timed, for a model with some context length.

    Attributes:
        rows: decode steps, for kernels other than attention.
        attention: the number of requests -> decode steps at some contexts.
        chunks: two prompts, and the second half of a longer one.
    """

    rows: tuple[StepSizes, ...]
    attention: dict[int, tuple[StepSizes, ...]]
    chunks: tuple[StepSizes, ...]

    @classmethod
    def within(cls, context_length: int) -> Grid:
        """Returns a grid whose contexts and prompts aren't longer than ``context_length``."""
        half = max(1, context_length // 2)
        short, long = min(_CONTEXTS[1][0], half), min(_CONTEXTS[1][1], context_length)
        chunks = prompt(min(_PROMPTS[0], half)), prompt(min(_PROMPTS[1], context_length))
        rest = StepSizes((max(1, long // 2),), (long,))
        attention = {
            n: tuple(decode(n, c) for c in dict.fromkeys((short, *(min(c, context_length) for c in contexts[1:]))))
            for n, contexts in _CONTEXTS.items()
        }
        return cls(tuple(decode(n, short) for n in _ROWS), attention, (*chunks, rest))

    @property
    def prompts(self) -> tuple[StepSizes, ...]:
        """The two of ``chunks`` that are whole prompts."""
        return self.chunks[:2]

    @property
    def sizes(self) -> list[StepSizes]:
        """All sizes, each once."""
        return list(dict.fromkeys([*self.rows, *(s for row in self.attention.values() for s in row), *self.chunks]))


@dataclass(frozen=True)
class AttentionTimes:
    """The times of one layer's attention, in seconds.

    Attributes:
        decodes: (number of requests, time of a decode step by context), ascending.
        chunk: a, b and c of a + b tokens + c multiply-adds, the time for chunks of prompts.
    """

    decodes: tuple[tuple[int, Line], ...]
    chunk: tuple[float, float, float]

    def decode(self, requests: int, context: float) -> float:
        """Returns the predicted seconds for ``requests`` requests with one new token and ``context`` tokens each."""
        if not requests:
            return 0.0
        return Line.through([(n, line.at(context)) for n, line in self.decodes]).at(requests)

    def prompts(self, tokens: int, multiply_adds: int) -> float:
        """Returns the predicted seconds for chunks of prompts with these tokens and multiply-adds."""
        a, b, c = self.chunk
        return max(0.0, a + b * tokens + c * multiply_adds) if tokens else 0.0


@dataclass(frozen=True)
class RowTimes:
    """The times of one step of a kind other than attention.

    Attributes:
        rows: seconds by the number of elements that it writes, at the context of ``Grid.rows``.
        colder: additional seconds by the bytes of keys and values that the whole program reads. These displace other
            data from the CPU's caches.
    """

    rows: Line
    colder: Line

    def at(self, size: int, kv: int, kv_at_rows: int) -> float:
        """Returns the predicted seconds of a step.

        Args:
            size: the elements that it writes.
            kv: the bytes of keys and values that the whole program reads.
            kv_at_rows: the same bytes for as many requests at the context of ``Grid.rows``.
        """
        most = self.colder.points[-1][0]
        return max(0.0, self.rows.at(size) + self.colder.at(min(kv, most)) - self.colder.at(min(kv_at_rows, most)))


KindTimes = RowTimes | AttentionTimes | None
"""The times of one kind of step. None for kinds that aren't timed, whose predicted time is the machine's limit."""


@dataclass(frozen=True)
class Overhead:
    """The seconds of a step of the engine outside of kernels, by the number of requests: of the run, the engine and the
    sampler.
    """

    run: Line
    engine: Line
    sampler: Line

    def at(self, requests: int) -> float:
        """Returns the seconds outside of kernels for this number of requests."""
        return self.run.at(requests) + self.engine.at(requests) + self.sampler.at(requests)


class CpuModel:
    """Predicts the times of one program on this machine. ``context`` is the context of ``Grid.rows``."""

    def __init__(
        self,
        steps: CountedSteps,
        times: Mapping[Hashable, KindTimes],
        overhead: Overhead,
        machine: Machine,
        context: int,
    ) -> None:
        self._steps, self._times, self._overhead, self._machine = steps, times, overhead, machine
        self._context = context

    def seconds(self, sizes: StepSizes) -> float:
        """Returns the predicted seconds of a step of the engine."""
        pairs = zip(self._steps.kinds, self._steps.costs(sizes), strict=True)
        kernels = sum(kind.count * self._of_kind(kind, cost, sizes) for kind, cost in pairs)
        return self._overhead.at(len(sizes.lengths)) + kernels

    def around(self, sizes: StepSizes) -> float:
        """Returns the predicted seconds of a step outside of its kernels."""
        return self._overhead.at(len(sizes.lengths))

    def bound(self, sizes: StepSizes) -> str:
        """Returns the resource that limits most of a step's kernel time: "memory" or "products"."""
        spent = {"memory": 0.0, "products": 0.0}
        for kind, cost in zip(self._steps.kinds, self._steps.costs(sizes), strict=True):
            memory = cost.memory / self._machine.bandwidth
            products = sum(n / self._machine.peaks[t] for t, n in cost.products.items())
            spent["memory" if memory >= products else "products"] += kind.count * max(memory, products)
        return max(spent, key=lambda name: spent[name])

    def _of_kind(self, kind: StepKind, cost: StepCost, sizes: StepSizes) -> float:
        times = self._times[kind.key]
        if times is None:
            return limit_seconds(cost, self._machine)
        if isinstance(times, RowTimes):
            near = self._steps.total(decode(len(sizes.lengths), self._context)).kv_read
            return times.at(elements(kind.step, sizes), self._steps.total(sizes).kv_read, near)
        decoding = [c for n, c in zip(sizes.lengths, sizes.contexts, strict=True) if n == 1]
        chunks = [(n, c) for n, c in zip(sizes.lengths, sizes.contexts, strict=True) if n > 1]
        seconds = times.decode(len(decoding), sum(decoding) / max(len(decoding), 1))
        if chunks:
            lengths, contexts = zip(*chunks, strict=True)
            index = self._steps.kinds.index(kind)
            products = self._steps.costs(StepSizes(lengths, contexts))[index].multiply_adds
            seconds += times.prompts(sum(lengths), products)
        return seconds


def elements(step: Step, sizes: StepSizes) -> int:
    """Returns the number of elements that a program's step writes, or reads if it writes to a cache. Its time grows
    with them.
    """
    operands = step.outputs or [o for o in step.inputs if o.kind == "buffer"]
    return sum(int(np.prod([sizes.at(size) for size in o.shape])) for o in operands)


def measure(
    steps: CountedSteps,
    context_length: int,
    engine: Callable[[int], float],
    threads: int = 0,
    progress: Progress = silent,
) -> CpuModel:
    """Measures a program on this machine, which takes some seconds. Returns the model that predicts its times.

    Args:
        steps: the program's steps, with memory planned.
        context_length: the model's context, in tokens: no size is longer.
        engine: returns the engine's seconds around a run, for a number of decoding requests.
        threads: the number of threads of the kernels; 0 means one for each core.
        progress: called with the stage "kernels".

    Raises:
        CapacityError: there is too little memory.
    """
    grid, threads = Grid.within(context_length), threads or available_threads()
    types = {kind for cost in steps.costs(decode(1, 1)) for kind in cost.products}
    probe = StepProbe(steps, grid.sizes, threads)
    timed = {}
    for done, sizes in enumerate(grid.sizes):
        progress(ProgressEvent(STAGE, done, len(grid.sizes), "on made-up weights"))
        timed[sizes] = probe.seconds(sizes)
    progress(ProgressEvent(STAGE, len(grid.sizes), len(grid.sizes)))
    logits = steps.program.outputs.get("logits")  # a stage of layers may have none
    overhead = Overhead(
        Line.through([(len(s.lengths), timed[s].around * len(steps.keys)) for s in grid.rows]),
        Line.through([(requests, engine(requests)) for requests in (2, 32)]),
        sampler_seconds(logits.shape[-1].constant, (1, 8), threads) if logits is not None else Line(((1, 0.0),)),
    )
    machine = measure_machine(isas()[0], threads, types, steps.total(decode(1, 1)).weights)
    times = {kind.key: _times(kind, steps, grid, timed) for kind in steps.kinds}
    return CpuModel(steps, times, overhead, machine, grid.rows[0].contexts[0])


def _times(kind: StepKind, steps: CountedSteps, grid: Grid, timed: Mapping[StepSizes, Timed]) -> KindTimes:
    def points(sizes: Sequence[StepSizes], of: Callable[[StepSizes], float]) -> Line:
        return Line.through([(of(s), timed[s].kinds[kind.key]) for s in sizes])

    if counted_as(kind.step) == "experts":
        return None
    if kind.step.op != "paged_attention":
        by_kv = points(grid.attention[1], lambda s: steps.total(s).kv_read).points
        colder = [(x, max(y for _, y in by_kv[: i + 1]) - by_kv[0][1]) for i, (x, _) in enumerate(by_kv)]
        return RowTimes(points([*grid.rows, *grid.prompts], lambda s: elements(kind.step, s)), Line(tuple(colder)))
    decodes = tuple((n, points(row, lambda s: s.contexts[0])) for n, row in grid.attention.items())
    place = steps.kinds.index(kind)
    features = [[1, sum(s.lengths), steps.costs(s)[place].multiply_adds] for s in grid.chunks]
    seconds = [timed[s].kinds[kind.key] for s in grid.chunks]
    a, b, c = np.linalg.lstsq(np.array(features, float), np.array(seconds), rcond=None)[0]
    return AttentionTimes(decodes, (float(a), float(b), float(c)))


_SAMPLES = 40


def sampler_seconds(vocabulary: int, rows: Sequence[int], threads: int) -> Line:
    """Measures greedy sampling on ``threads`` threads, from as many rows of logits [vocabulary] as each of ``rows``
    says.

    Returns the seconds as a line through these points: the time by the number of rows.
    """
    sampler = RowSampler(threads)
    random = np.random.default_rng(0)

    def seconds(count: int) -> float:
        logits = random.standard_normal((count, vocabulary), np.float32)
        batch = sampling_batch([(SamplingParams(), 0, 0)] * count)
        return _median(partial(sampler.sample, logits, batch), _SAMPLES)

    return Line.through([(n, seconds(n)) for n in rows])


def _median(call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _model(planned: PlannedSteps, device: Device, progress: Progress) -> CpuModel:
    return measure(planned.steps, planned.context_length, planned.engine, device.threads, progress)


def _timed(planned: PlannedSteps, device: Device, sizes: StepSizes) -> StepSeconds:
    """Measures a step of one size, which takes about a second. Products of experts aren't run."""
    steps, threads, requests = planned.steps, device.threads or available_threads(), len(sizes.lengths)
    timed = StepProbe(steps, [sizes], threads).seconds(sizes)
    of_kind = dict(timed.kinds)
    costs = dict(zip((kind.key for kind in steps.kinds), steps.costs(sizes), strict=True))
    if left := costs.keys() - of_kind.keys():
        types = {kind for key in left for kind in costs[key].products}
        machine = measure_machine(isas()[0], threads, types, steps.total(sizes).weights)
        of_kind |= {key: limit_seconds(costs[key], machine) for key in left}
    around = timed.around * len(steps.keys) + planned.engine(requests)
    if (logits := steps.program.outputs.get("logits")) is not None:
        around += sampler_seconds(logits.shape[-1].constant, (requests,), threads).at(requests)
    return StepSeconds(tuple(of_kind[key] for key in steps.keys), around)


PLANNING = Planning(gpus=False, model=_model, timed=_timed, meeting=meeting_seconds)
