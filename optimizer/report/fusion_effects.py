"""Measures the effect of each fusion of a target on the time of a step, on equal weights.

The program with all fusions is compared with the programs that lack one, so that a fusion isn't credited with another's
effect. All programs are timed alternately, in another order each round, and compared round by round: a slower machine
slows all. A program's place in memory changes its speed too. So the program with all fusions is timed twice: the
difference between the two is noise, and so is any other difference that isn't larger.
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
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.errors import BundleError, CapacityError
from enginewright.runtime.shared.kv_formats import KV_FORMATS
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.memory import free_memory
from enginewright.runtime.shared.step_costs import StepSizes, stored_bytes
from enginewright.runtime.shared.targets import MEASURED

_CONTEXT = 64
"""The tokens in a request's cache at the timed decode step, if the model's context allows that many."""
_PREFILL = (256, 128, 64, 32)
"""Lengths of a prefill in tokens, the preferred one first. The first one for which there is enough time is timed."""
_FEWEST, _MOST = 6, 100
"""The fewest and the most runs of each program. With fewer there is no interval."""
_BESIDE_WEIGHTS = 512 << 20
"""The most bytes that the programs need together for the values that they compute."""
_SHARE = 0.4
"""The share of the time for decode steps; prefills get the rest."""


_TWIN = "the same again"
"""The name of the second program with all fusions, among the names of fusions."""


def fusion_effects(
    program: Program,
    passes: Sequence[Pass],
    matched: Mapping[str, int],
    bundle: Bundle,
    *,
    kv_cache: CacheOptions | None = None,
    memory_budget: int | None = None,
    seconds: float = 1.5,
    shortest: float = 0.0,
    threads: int = 0,
) -> FusionEffects:
    """Measures the time that each fusion of the cpu target saves.

    Args:
        program: the program before the target's passes; it isn't changed.
        passes: the target's passes, without those that the recipe turns off.
        matched: the number of places that each pass changed, by the pass's name.
        bundle: the bundle with the target and its weights.
        kv_cache: the formats of keys and values; None for one in all layers, as the bundle has it.
        memory_budget: bytes of memory that may be used; None for the free memory.
        seconds: the approximate duration of the measurement. If even a few steps take longer, nothing is measured.
        shortest: seconds of a decode step below which nothing is measured, since the result would be noise.
        threads: threads of the kernels; 0 for one per core.
    """
    context = min(_CONTEXT, bundle.model.context_length)
    fusions = [p for p in passes if p.exact]  # the others decide what is stored, and run each time
    compared = [p for p in fusions if matched.get(p.name)]
    whole_texts = bundle.model.pooling is not None  # a text in the place of a decode step
    decode = StepSizes(lengths=(context if whole_texts else 1,), contexts=(context,))
    prefills = [_prefill(n) for n in _PREFILL if n <= bundle.model.context_length] or [_prefill(1)]
    try:
        if not compared:
            raise _NotMeasuredError("no fusion changed anything")
        whole = bundle.program(MEASURED)
        free = free_memory() if memory_budget is None else memory_budget
        if sum(stored_bytes(use) for use in whole.weights) + _BESIDE_WEIGHTS > free:
            raise _NotMeasuredError("there is no memory for it")

        def runner(lowered: LoweredProgram) -> StepRunner:
            step_runner = StepRunner(bundle, [decode, prefills[0]], threads=threads, lowered=lowered)
            step_runner.fill_caches()
            return step_runner

        runners = {"": runner(whole)}
        twin = runner(whole)
        _check_duration(runners[""], decode, shortest)
        for p in compared:
            runners[p.name] = runner(_without(p, program, passes, whole, kv_cache))
        runners[_TWIN] = twin
        decoded = _paired(runners, decode, seconds * _SHARE)
        if not decoded:
            raise _NotMeasuredError(f"a few steps take more than {seconds:g} seconds")
        tokens, prefilled = _prefilled(runners, prefills, seconds * (1 - _SHARE))
    except (BundleError, CapacityError, _NotMeasuredError) as e:
        why = str(e) if isinstance(e, _NotMeasuredError) else f"the program can't run here: {e}"
        unmeasured = tuple(FusionEffect(p.name, matched.get(p.name, 0)) for p in fusions)
        return FusionEffects(MEASURED, context, 0, unmeasured, why)
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
    return FusionEffects(MEASURED, context, tokens, tuple(effects), "", decoded.noise(), prefilled.noise())


class _NotMeasuredError(Exception):
    """The effects of fusions aren't measured; the text says why."""


def _check_duration(runner: StepRunner, sizes: StepSizes, shortest: float) -> None:
    """Raises _NotMeasuredError if a step of these sizes takes less than ``shortest`` seconds."""
    step = runner.step(sizes)
    least = min(_time(runner, step) for _ in range(_FEWEST))
    if least < shortest:
        raise _NotMeasuredError(
            f"a step takes {least * 1e6:.0f} microseconds: what a fusion changes would be lost in noise"
        )


def _without(
    fusion: Pass, program: Program, passes: Sequence[Pass], whole: LoweredProgram, kv_cache: CacheOptions | None
) -> LoweredProgram:
    """Returns the lowered program that all passes but one make.

    Args:
        fusion: the pass that is left out.
        program: the program before the passes.
        passes: all passes.
        whole: the lowered program that all passes make. Raises _NotMeasuredError if that has other weights.
        kv_cache: the formats of keys and values; None for that of the first cache.
    """
    copy, caches = program.copy(), whole.cache_groups
    rest = [one for one in passes if one is not fusion]
    cache = kv_cache if kv_cache is not None and kv_cache.overrides else None
    cache = cache or CacheOptions(dtype=KV_FORMATS[caches[0].dtype if caches else "f32"].name)
    PassManager(rest, PassContext(recipe=PassOptions(kv_cache=cache))).run(copy)
    lowered = plan_arena(lower_program(copy).program)
    if set(lowered.weights) != set(whole.weights):
        raise _NotMeasuredError(f"without {fusion.name} the program has other weights")
    return lowered


def _prefilled(runners: Mapping[str, StepRunner], prefills: Sequence[StepSizes], seconds: float) -> tuple[int, _Times]:
    """Returns the tokens and the times of the longest prefill that these seconds allow; 0 and no times without any."""
    shortest = prefills[-1].lengths[0]
    per_token = _time(runners[""], runners[""].step(prefills[-1])) / shortest
    for sizes in prefills:
        tokens = sizes.lengths[0]
        if per_token * tokens * len(runners) * (_FEWEST + 1) <= seconds or tokens == shortest:
            break
    times = _paired(runners, sizes, seconds)
    return tokens if times else 0, times


def _prefill(tokens: int) -> StepSizes:
    return StepSizes(lengths=(tokens,), contexts=(tokens,))


@dataclass(frozen=True)
class _Times:
    """The seconds of each program in each round; empty if nothing was measured."""

    by_name: Mapping[str, Sequence[float]]

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def median(self, name: str) -> float | None:
        """Returns the median of a program's times, in microseconds; None if it wasn't measured."""
        return round(median(self.by_name[name]) * 1e6, 1) if name in self.by_name else None

    def noise(self) -> float | None:
        """Returns the largest distance from 0 in the interval of the difference of two equal programs.

        Returns None if nothing was measured.
        """
        interval = self._interval(_TWIN)
        return None if interval is None else max(abs(interval[0]), abs(interval[1]))

    def saves(self, name: str) -> Interval | None:
        """Returns the interval of the share of time that a fusion saves. None if part of it is within the noise."""
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
    """Returns an interval that contains the median with a confidence of at least 95 %, for any distribution.

    The ends are two order statistics with the same distance from the least and the largest value: the number of values
    below the median is binomial (Conover, Practical Nonparametric Statistics, 3.2). Fewer than 6 values have no such
    interval: then it returns None.
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
    """Returns the times of runners that alternate; empty if the seconds aren't enough for a few rounds."""
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
