"""The cost of each step of a program at some sizes, its time, and how near that is to this machine's limits.

The model is the roofline's (Williams, Waterman and Patterson, doi:10.1145/1498765.1498785): a step takes at least as
long as its bytes need at the memory's bandwidth, and at least as long as its multiply-adds need at the processor's
peak. Both are measured in the same run, before the steps are timed and after.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from enginewright.plugins.cpu.compile.machine import Machine, limit_seconds, measure_machine
from enginewright.plugins.cpu.compile.step_runner import StepRunner
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs
from enginewright.runtime.shared.targets import MEASURED

BATCH = 8
PROMPT = 512
_CONTEXTS = (512, 256, 128, 64, 32)
_MOST_KV_BYTES = 128 << 20
"""The most bytes of the caches that are made for measuring: the context is the longest of ``_CONTEXTS`` that fits."""

_MOST_RUNS = 25
_LEAST_PROMPT = 16


@dataclass(frozen=True)
class StepTime:
    """One step of the program: ``op`` of module ``where``, what it costs, and the median of its times in seconds."""

    op: str
    where: str
    cost: StepCost
    seconds: float | None = None


@dataclass(frozen=True)
class ShapeCosts:
    """A step of the program at some sizes.

    Attributes:
        name: for people.
        tokens, requests, context: T, B, and the tokens of each request's cache after the step.
        runs: that were timed; 0 if none.
        seconds: of all steps of the program together; None if not timed.
        omitted: why it was not timed.
        steps: as in the program.
    """

    name: str
    tokens: int
    requests: int
    context: int
    runs: int
    seconds: float | None
    omitted: str | None
    steps: list[StepTime]

    @property
    def cost(self) -> StepCost:
        """The cost of all steps together."""
        return sum((s.cost for s in self.steps), StepCost())

    @property
    def sizes(self) -> StepSizes:
        return StepSizes((self.tokens // self.requests,) * self.requests, (self.context,) * self.requests)


@dataclass(frozen=True)
class Roofline:
    """A target's steps against this machine.

    Attributes:
        target: its name.
        measured: "export" for times taken within an export, whose noise they have; "report" for later ones.
        machine: the limits; None where nothing was measured.
        shapes: a decode step of one request, of some, and a prompt.
    """

    target: str
    measured: str | None
    machine: Machine | None
    shapes: list[ShapeCosts] = field(default_factory=list)


def predict(bundle: Bundle, target: str = MEASURED) -> Roofline:
    """Bytes and multiply-adds of the usual shapes; nothing is run. Raises BundleError if the target isn't ready."""
    program = bundle.program(target)
    most = bundle.model.context_length
    context = _context(program, most)
    prompt = min(PROMPT, most)
    shapes = [
        _predicted(program, "decode, 1 request", StepSizes((1,), (context,))),
        _predicted(program, f"decode, {BATCH} requests", StepSizes((1,) * BATCH, (context,) * BATCH)),
        _predicted(program, f"prompt of {prompt}", StepSizes((prompt,), (prompt,))),
    ]
    return Roofline(target, None, None, shapes)


def measure(
    bundle: Bundle, *, seconds: float, measured: str, threads: int = 0, progress: Progress = silent
) -> Roofline:
    """``predict`` with times on this machine, for the target cpu.

    Args:
        bundle: opened.
        seconds: about how long it may take. A prompt that would take longer is shorter.
        measured: goes into the result.
        threads: 0 takes as many as there are cores.
        progress: called with the stage "roofline".

    Raises:
        BundleError, CapacityError: as for a program that is opened to be served.
    """
    predicted = predict(bundle)
    total = len(predicted.shapes)
    progress(ProgressEvent("roofline", 0, total, "bandwidth and peak"))
    runner = StepRunner(bundle, [shape.sizes for shape in predicted.shapes], threads=threads)
    runner.fill_caches()
    types = {kind for shape in predicted.shapes for kind in shape.cost.products}
    limits = runner.program.isa, runner.program.threads, types, predicted.shapes[0].cost.memory
    machine = measure_machine(*limits)
    shapes: list[ShapeCosts] = []
    for done, shape in enumerate(predicted.shapes):
        progress(ProgressEvent("roofline", done, total, shape.name))
        shapes.append(_timed(runner, shape, seconds / total, machine))
    machine = machine.at_best(measure_machine(*limits))
    progress(ProgressEvent("roofline", total, total))
    return Roofline(MEASURED, measured, machine, shapes)


def _context(program: LoweredProgram, most: int) -> int:
    """Tokens in each request's cache when a decode step is timed."""
    per_token = sum(cache_block_bytes(group) / group.block_size for group in program.cache_groups)
    for context in _CONTEXTS:
        if context <= most and BATCH * context * per_token <= _MOST_KV_BYTES:
            return context
    return min(_CONTEXTS[-1], most)


def _predicted(program: LoweredProgram, name: str, sizes: StepSizes) -> ShapeCosts:
    costs = step_costs(program, sizes)
    steps = [StepTime(step.op, step.where, cost) for step, cost in zip(program.steps, costs, strict=True)]
    return ShapeCosts(name, sum(sizes.lengths), len(sizes.lengths), sizes.contexts[0], 0, None, None, steps)


def _timed(runner: StepRunner, shape: ShapeCosts, seconds: float, machine: Machine) -> ShapeCosts:
    while shape.tokens > shape.requests and limit_seconds(shape.cost, machine) > seconds / 3:
        tokens = shape.tokens // 2
        if tokens < _LEAST_PROMPT:
            break
        shape = _predicted(runner.lowered, f"prompt of {tokens}", StepSizes((tokens,), (tokens,)))
    if (least := limit_seconds(shape.cost, machine)) > seconds:
        return replace(shape, omitted=f"it takes {least:.2g} s at least")
    step = runner.step(shape.sizes)
    start = time.perf_counter()
    runner.program.run(step)  # brings the weights into memory, and finds places for what is computed
    warm_up = time.perf_counter() - start
    times: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
    while not times or (len(times) < _MOST_RUNS and time.perf_counter() - start + warm_up < seconds):
        times.append(runner.program.profile(step)[1])
    medians = np.median(np.stack(times), axis=0)  # [steps]
    steps = [replace(s, seconds=float(m)) for s, m in zip(shape.steps, medians, strict=True)]
    return replace(shape, runs=len(times), seconds=float(medians.sum()), steps=steps)
