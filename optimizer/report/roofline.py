"""The cost and the time of each step of a program at some sizes, compared with the limits of this machine.

The model is the roofline (Williams, Waterman and Patterson, doi:10.1145/1498765.1498785): a step takes at least the
time that its bytes need at the memory's bandwidth, and at least the time that its multiply-adds need at the processor's
peak. Both limits are measured in the same run, before and after the steps are timed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np

from enginewright.plugins.cpu.compile.machine import Machine, limit_seconds, measure_machine
from enginewright.plugins.cpu.compile.step_runner import StepRunner
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.kv_cache.kinds.table import token_bytes
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs
from enginewright.runtime.shared.targets import MEASURED

BATCH = 8
PROMPT = 512
TEXTS = (16, 128, 512)
"""The lengths in tokens of the texts that are timed, for a model that computes whole texts."""
_CONTEXTS = (512, 256, 128, 64, 32)
_MOST_KV_BYTES = 128 << 20
"""The most bytes of the caches for the measurement: the context is the longest of ``_CONTEXTS`` that fits."""

_MOST_RUNS = 25
_LEAST_PROMPT = 16


@dataclass(frozen=True)
class StepTime:
    """A step of the program: its op, its module, its cost, and the median of its times in seconds; None if it wasn't
    timed.
    """

    op: str
    where: str
    cost: StepCost
    seconds: float | None = None


@dataclass(frozen=True)
class ShapeCosts:
    """A step of the model at some sizes.

    Attributes:
        name: the name of the shape, for people.
        tokens, requests, context: T, B, and the tokens in each request's cache after the step.
        runs: the number of timed runs; 0 if it wasn't timed.
        seconds: the seconds of all steps of the program; None if they weren't timed.
        omitted: the reason why they weren't timed; None otherwise.
        steps: the steps of the program, in order.
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
        """The cost of all steps of the program together, at these sizes."""
        return sum((s.cost for s in self.steps), StepCost())

    @property
    def sizes(self) -> StepSizes:
        return StepSizes((self.tokens // self.requests,) * self.requests, (self.context,) * self.requests)


@dataclass(frozen=True)
class Roofline:
    """The steps of a target, compared with the limits of this machine.

    Attributes:
        target: the name of the target.
        measured: "export" for times within an export, which are noisy; "report" for later ones; None if nothing was
            timed.
        machine: the limits; None if they weren't measured.
        shapes: a decode step of one request, one of several requests, and a prompt.
    """

    target: str
    measured: str | None
    machine: Machine | None
    shapes: list[ShapeCosts] = field(default_factory=list)


def predict(bundle: Bundle, target: str = MEASURED) -> Roofline:
    """Returns the bytes and multiply-adds of the usual shapes, without running them. Raises BundleError if the target
    isn't ready.
    """
    program = bundle.program(target)
    most = bundle.model.context_length
    if bundle.model.pooling is not None:
        lengths = sorted({min(length, most) for length in TEXTS})
        texts = [_predicted(program, f"a text of {n}", StepSizes((n,), (n,))) for n in lengths]
        return Roofline(target, None, None, texts)
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
    """Returns the roofline of the target cpu, with times on this machine.

    Args:
        bundle: an open bundle.
        seconds: the approximate duration. A prompt that would take longer is shortened.
        measured: the field ``measured`` of the result.
        threads: threads of the kernels; 0 for one per core.
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
    """Returns the tokens in each request's cache in a timed decode step; ``most`` is the model's context."""
    per_token = token_bytes(program.cache_groups)
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
