"""The effect of each of a target's fusions on the time of a step: measured here, with and without it, on equal weights.

The whole list of fusions is compared with the list less one, so that a fusion isn't credited with another's effect. All
programs are timed alternately, in another order each round, and compared round by round: a slower machine slows all. A
program's place in memory changes its speed too, so the program with all fusions is timed twice: the difference between
these two is noise, and so is every difference that isn't larger.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from enginewright.optimizer.shared.export_records import FusionEffect, FusionEffects, Interval
from enginewright.passes.framework.base import Pass, PassContext
from enginewright.passes.framework.kv_options import CacheOptions
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.plugins.cpu.compile.step_runner import StepRunner
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.arena import plan_arena
from enginewright.runtime.shared.contracts import CacheGroup, StepInput
from enginewright.runtime.shared.errors import BundleError, CapacityError
from enginewright.runtime.shared.kv_formats import KV_FORMATS
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.memory import free_memory
from enginewright.runtime.shared.step_costs import StepSizes, stored_bytes
from enginewright.runtime.shared.targets import MEASURED

_CONTEXT = 64
"""Tokens in a request's cache at the measured decode step, where the model takes that many."""
_PREFILL = (256, 128, 64, 32)
"""Tokens of a prefill: the first of these that the time allows."""
_FEWEST, _MOST = 6, 100
"""Runs of each program; of fewer an interval can't be said."""
_BESIDE_WEIGHTS = 512 << 20
"""Bytes that the programs need together for what they compute, at most."""
_SHARE = 0.4
"""The share of the seconds that decode has; the rest is prefill's."""


_TWIN = "the same again"
"""Stands among the names of fusions for the program with all of them a second time."""


def fusion_effects(
    program: Program,
    passes: Sequence[Pass],
    matched: Mapping[str, int],
    bundle: Bundle,
    *,
    memory_budget: int | None = None,
    seconds: float = 1.5,
    shortest: float = 0.0,
    threads: int = 0,
) -> FusionEffects:
    """Measures the fusions of the cpu target.

    Args:
        program: as the target's passes get it; it is left as it is.
        passes: those of the target, less what the recipe turns off.
        matched: how many places each changed, by its name.
        bundle: with the target and its weights.
        memory_budget: bytes of memory that may be taken; None: what is free.
        seconds: about how long to measure. Where even a few steps take longer nothing is measured.
        shortest: seconds of a decode step below which nothing is measured, as it would be noise.
        threads: of the kernels; 0 takes as many as there are cores.
    """
    context = min(_CONTEXT, bundle.model.context_length)
    fusions = [p for p in passes if p.exact]  # the others decide what is stored, and run each time
    unmeasured = tuple(FusionEffect(p.name, matched.get(p.name, 0)) for p in fusions)

    def skipped(why: str) -> FusionEffects:
        return FusionEffects(MEASURED, context, 0, unmeasured, why)

    compared = [p for p in fusions if matched.get(p.name)]
    if not compared:
        return skipped("no fusion changed anything")
    whole = bundle.program(MEASURED)
    if sum(stored_bytes(use) for use in whole.weights) + _BESIDE_WEIGHTS > (
        free_memory() if memory_budget is None else memory_budget
    ):
        return skipped("there is no memory for it")
    decode = StepSizes(lengths=(1,), contexts=(context,))
    prefills = [_prefill(n) for n in _PREFILL if n <= bundle.model.context_length] or [_prefill(1)]

    def runner(lowered: LoweredProgram) -> StepRunner:
        step_runner = StepRunner(bundle, [decode, prefills[0]], threads=threads, lowered=lowered)
        step_runner.fill_caches()
        return step_runner

    try:
        runners = {"": runner(whole)}
        twin = runner(whole)
        step = runners[""].step(decode)
        if (least := min(_time(runners[""], step) for _ in range(_FEWEST))) < shortest:
            return skipped(f"a step takes {least * 1e6:.0f} microseconds: what a fusion changes would be lost in noise")
        for p in compared:
            lowered = _lowered(program, [q for q in passes if q is not p], whole.cache_groups)
            if set(lowered.weights) != set(whole.weights):
                return skipped(f"without {p.name} the program has other weights")
            runners[p.name] = runner(lowered)
        runners[_TWIN] = twin
    except (BundleError, CapacityError) as e:
        return skipped(f"the program can't run here: {e}")
    decoded = _paired(runners, decode, seconds * _SHARE)
    if not decoded:
        return skipped(f"a few steps take more than {seconds:g} seconds")
    tokens, prefilled = 0, _Times({})
    shortest_prefill = prefills[-1].lengths[0]
    once = _time(runners[""], runners[""].step(prefills[-1])) / shortest_prefill
    for sizes in prefills:
        tokens = sizes.lengths[0]
        if once * tokens * len(runners) * (_FEWEST + 1) <= seconds * (1 - _SHARE) or tokens == shortest_prefill:
            prefilled = _paired(runners, sizes, seconds * (1 - _SHARE))
            break
    effects = (
        FusionEffect(
            p.name,
            matched.get(p.name, 0),
            decoded.median(p.name),
            decoded.median("") if p in compared else None,
            prefilled.median(p.name),
            prefilled.median("") if p in compared else None,
            decoded.saves(p.name),
            prefilled.saves(p.name),
        )
        for p in fusions
    )
    return FusionEffects(
        MEASURED, context, tokens if prefilled else 0, tuple(effects), "", decoded.noise(), prefilled.noise()
    )


def _lowered(program: Program, passes: Sequence[Pass], caches: Sequence[CacheGroup]) -> LoweredProgram:
    copy = program.copy()
    cache = CacheOptions(dtype=KV_FORMATS[caches[0].dtype if caches else "f32"].name)
    PassManager(passes, PassContext(recipe=PassOptions(kv_cache=cache))).run(copy)
    return plan_arena(lower_program(copy).program)


def _prefill(tokens: int) -> StepSizes:
    return StepSizes(lengths=(tokens,), contexts=(tokens,))


@dataclass(frozen=True)
class _Times:
    """Seconds of each program by round; empty if nothing was measured."""

    by_name: Mapping[str, Sequence[float]]

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def median(self, name: str) -> float | None:
        """Computes the median, in microseconds."""
        return round(median(self.by_name[name]) * 1e6, 1) if name in self.by_name else None

    def noise(self) -> float | None:
        """The noise of the measurement: the largest distance from 0 in the interval between two equal programs."""
        interval = self._interval(_TWIN)
        return None if interval is None else max(abs(interval[0]), abs(interval[1]))

    def saves(self, name: str) -> Interval | None:
        """The interval of what the fusion saves, if all of it is beyond the noise."""
        interval, noise = self._interval(name), self.noise()
        if interval is None or noise is None or (interval[0] <= noise and interval[1] >= -noise):
            return None
        return interval

    def _interval(self, name: str) -> Interval | None:
        if name not in self.by_name:
            return None
        pairs = zip(self.by_name[name], self.by_name[""], strict=True)
        return median_interval([(without - all_of_them) / without for without, all_of_them in pairs])


def median_interval(values: Sequence[float]) -> Interval | None:
    """An interval that holds the median with a confidence of 95 % at least, whatever the values' distribution.

    From one order statistic to the one as far from the other end: the number of values below the median is binomial
    (Conover, Practical Nonparametric Statistics, 3.2). None for fewer than 6 values, which have no such interval.
    """
    count, ordered, below = len(values), sorted(values), 0.0
    interval = None
    for k in range((count + 1) // 2):
        below += math.comb(count, k) / 2**count  # that at most k values are below the median
        if 2 * below > 0.05:
            break
        interval = (ordered[k], ordered[count - 1 - k])
    return interval


def _paired(runners: Mapping[str, StepRunner], sizes: StepSizes, seconds: float) -> _Times:
    """Times of runners that alternate; empty if the seconds aren't enough for a few rounds."""
    steps = {name: runner.step(sizes) for name, runner in runners.items()}
    first = sum(_time(runners[name], step) for name, step in steps.items())  # warms up, and is not counted
    if first * _FEWEST > 4 * seconds:
        return _Times({})
    times: dict[str, list[float]] = {name: [] for name in runners}
    start = time.perf_counter()
    for done in range(_MOST):
        if done >= _FEWEST and time.perf_counter() - start > seconds:
            break
        names = list(steps)
        for name in names[done % len(names) :] + names[: done % len(names)]:
            times[name].append(_time(runners[name], steps[name]))
    return _Times(times)


def _time(runner: StepRunner, step: StepInput) -> float:
    start = time.perf_counter()
    runner.program.run(step)
    return time.perf_counter() - start
