"""The interface of ``optimize plan``: the steps of a program, and the functions by which a target predicts their times.

Steps are counted by kind. As layers repeat, a program of some hundred steps has about a dozen kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from enginewright.runtime.shared.lowered_program import LoweredProgram, Operand, Step
from enginewright.runtime.shared.progress import Progress
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs
from enginewright.runtime.shared.weight_formats import FORMAT_OF, FORMATS


@dataclass(frozen=True)
class StepKind:
    """A kind of a program's steps: those with the same op, attributes and operand sizes.

    Attributes:
        step: the first of them.
        count: their number.
        key: equal for equal kinds, also in different programs.
    """

    step: Step
    count: int
    key: Hashable


class CountedSteps:
    """A program's kinds of steps, and the costs of steps.

    Attributes:
        program: the program.
        keys: the key of the kind of each of its steps.
        kinds: the kinds, in the order of their first steps.
        costs: a cached function from step sizes to the cost of one step of each kind.
        total: a cached function from step sizes to the cost of all steps together.
    """

    def __init__(self, program: LoweredProgram) -> None:
        self.program = program
        weights = {use.name: use for use in program.weights}
        groups = {group.name: group for group in program.cache_groups}

        def signature(operand: Operand) -> Hashable:
            of: Hashable = None
            if operand.kind == "weight":
                use = weights[operand.name]
                of = use.dtype, use.shape, use.layout
            elif operand.kind == "cache":
                g = groups[operand.name.rpartition("/")[0]]
                of = g.name, g.planes, g.window, g.dtype
            elif operand.kind == "input":
                of = operand.name
            return operand.kind, operand.dtype, operand.shape, operand.strides, of

        def key(step: Step) -> Hashable:
            operands = tuple(map(signature, step.inputs)), tuple(map(signature, step.outputs))
            return step.op, tuple(sorted(step.attrs.items())), operands

        self.keys = tuple(map(key, program.steps))
        counts, first = Counter(self.keys), dict(zip(reversed(self.keys), reversed(program.steps), strict=True))
        self.kinds = tuple(StepKind(first[k], n, k) for k, n in counts.items())
        self._once = program.model_copy(update={"steps": tuple(kind.step for kind in self.kinds), "taps": {}})
        self.costs = lru_cache(1024)(self._costs)
        self.total = lru_cache(1024)(self._total)

    def _costs(self, sizes: StepSizes) -> tuple[StepCost, ...]:
        """Returns the cost of one step of each kind, at these sizes."""
        return tuple(step_costs(self._once, sizes))

    def _total(self, sizes: StepSizes) -> StepCost:
        """Returns the cost of all steps of the program together, at these sizes."""
        pairs = zip(self.kinds, self.costs(sizes), strict=True)
        return sum((cost.times(kind.count) for kind, cost in pairs), StepCost())


@dataclass(frozen=True)
class Shares:
    """The shares of a GPU's stated figures that steps reach, and fixed costs in seconds; devices.toml has the sources.

    Attributes:
        bandwidth, compute: the shares of the peak memory bandwidth and of the peak operations.
        memory: the share of memory that may be used.
        kernel: the seconds of a program's step with hardly any work.
        narrow: the share of ``compute`` that products reach with weights of less than 16 bits, which are dequantized.
        latency: the seconds from memory to a multiprocessor, which limit the bytes in flight.
        between_steps: the seconds between steps in which the GPU waits for the engine.
    """

    bandwidth: float
    compute: float
    memory: float
    kernel: float
    between_steps: float
    narrow: float = 1.0
    latency: float = 0.0


@dataclass(frozen=True)
class Gpu:
    """A GPU's stated figures.

    Attributes:
        name, capability: its name and compute capability.
        memory, bandwidth: bytes, and bytes per second.
        peaks: type -> operations per second; a multiply-add is two.
        source: where the figures are from.
        multiprocessors: their number; 0 if it is unknown, and then effects that depend on it aren't planned.
    """

    name: str
    capability: str
    memory: float
    bandwidth: float
    peaks: Mapping[str, float]
    source: str
    multiprocessors: int = 0


@dataclass(frozen=True)
class Device:
    """The device that steps are planned for.

    Attributes:
        gpu: a GPU; None for this machine's CPU.
        shares: the shares of the GPU's figures that steps reach.
        threads: the threads of this machine; 0 means one for each core.
    """

    gpu: Gpu | None
    shares: Shares
    threads: int = 0


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of one step of the engine: of each step of its program, in order, and ``around`` for everything
    else.
    """

    steps: tuple[float, ...]
    around: float

    @property
    def total(self) -> float:
        """The seconds of the whole step of the engine."""
        return sum(self.steps) + self.around


class StepModel(Protocol):
    """Predicts the times of one program's steps on one device."""

    def seconds(self, sizes: StepSizes) -> float:
        """Returns the predicted seconds of a step of the engine."""

    def around(self, sizes: StepSizes) -> float:
        """Returns the predicted seconds of a step outside of kernels, in which the engine works between two steps."""

    def bound(self, sizes: StepSizes) -> str:
        """Returns the name of the resource that limits most of a step's time, such as "memory"."""


@dataclass(frozen=True)
class PlannedSteps:
    """A program whose times are predicted.

    Attributes:
        steps: the program's steps, with memory planned.
        own: True if it is the target's own program; False if it is another target's similar one.
        context_length: the model's context, in tokens: no step is longer.
        engine: returns the engine's seconds around a step on this machine, for a number of decoding requests.
    """

    steps: CountedSteps
    own: bool
    context_length: int
    engine: Callable[[int], float]


_NARROW = {dtype: name for dtype, name in FORMAT_OF.items() if FORMATS[name].least_gpu}


def stored_formats(program: LoweredProgram) -> frozenset[str]:
    """Returns the formats of a program's weights and caches for which not every GPU has instructions."""
    types = [use.dtype for use in program.weights] + [group.dtype for group in program.cache_groups]
    return frozenset(_NARROW[t] for t in types if t in _NARROW)


@dataclass(frozen=True)
class Planning:
    """The functions by which a target's programs are planned: ``PLANNING`` in its module ``compile.plan``.

    Attributes:
        gpus: True if its programs run on GPUs; False if they run on this machine's CPU.
        model: returns a model of the times of a program's steps on a device. It may measure, and then reports progress.
        timed: returns the seconds of a step of one size, faster than ``model``.
        formats: returns a program's formats that need special instructions of GPUs.
        scratch: returns the bytes that a step needs in addition to the program's arena; arguments: program, requests,
            tokens of each.
        meeting: measures the seconds of a barrier of this many ranks in shared memory; None if the target has no ranks.
    """

    gpus: bool
    model: Callable[[PlannedSteps, Device, Progress], StepModel]
    timed: Callable[[PlannedSteps, Device, StepSizes], StepSeconds]
    formats: Callable[[LoweredProgram], frozenset[str]] = stored_formats
    scratch: Callable[[LoweredProgram, int, int], int] = lambda program, requests, context: 0
    meeting: Callable[[int], float] | None = None
