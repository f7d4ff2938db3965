"""The interface of ``optimize plan``: the steps of a program, and the functions of a target that predict their time.

The steps are counted by kind: layers repeat, so that a program of some hundred steps has a dozen kinds.
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
    """Steps with the same op and operand sizes: the first of them, and their number.

    ``key``: equal for equal kinds, also in different programs.
    """

    step: Step
    count: int
    key: Hashable


class CountedSteps:
    """A program's kinds of steps, and the cost of each. ``keys``: the key of each step's kind."""

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
        """Computes the costs of one step of each kind."""
        return tuple(step_costs(self._once, sizes))

    def _total(self, sizes: StepSizes) -> StepCost:
        """Sums the costs of all steps of the program."""
        pairs = zip(self.kinds, self.costs(sizes), strict=True)
        return sum((cost.times(kind.count) for kind, cost in pairs), StepCost())


@dataclass(frozen=True)
class Shares:
    """The shares of a GPU's stated figures that steps reach, and fixed costs in seconds; devices.toml has the sources.

    Attributes:
        bandwidth, compute: shares of the peak of memory and cores.
        memory: the share of memory that may be used.
        kernel: seconds of a program's step with hardly any work.
        narrow: the share of ``compute`` that products reach with weights of fewer than 16 bits, which are dequantized.
        latency: seconds from memory to a multiprocessor, which limits the bytes in flight.
        between_steps: seconds between steps in which the GPU waits for the engine.
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
    """A GPU: bytes, bytes per second, and operations a second by type (a multiply-add is two), with their source.

    ``multiprocessors`` is 0 if it is unknown; then effects that depend on it aren't planned.
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
        gpu: a GPU; None for this machine's processor.
        shares: the shares of the GPU's figures that are reached.
        threads: threads of this machine; 0 means one for each core.
    """

    gpu: Gpu | None
    shares: Shares
    threads: int = 0


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step of the engine: of each step of its program, in their order, and of all ``around`` them."""

    steps: tuple[float, ...]
    around: float

    @property
    def total(self) -> float:
        """Returns the seconds of all steps and of the work around them."""
        return sum(self.steps) + self.around


class StepModel(Protocol):
    """A model of the time that steps of one program take on one device."""

    def seconds(self, sizes: StepSizes) -> float:
        """Predicts the seconds of a step of the engine."""

    def around(self, sizes: StepSizes) -> float:
        """Predicts the seconds of a step outside of kernels, in which the engine works between two steps."""

    def bound(self, sizes: StepSizes) -> str:
        """Returns the name of the limit that decides most of a step's time, such as "memory"."""


@dataclass(frozen=True)
class PlannedSteps:
    """A program whose times are predicted.

    Attributes:
        steps: the program's steps, with memory planned.
        own: True if it is the target's own program; False if it is another target's similar one.
        context_length: the model's context, in tokens: no step is longer.
        engine: returns the engine's seconds around a step on this machine, by the number of decoding requests.
    """

    steps: CountedSteps
    own: bool
    context_length: int
    engine: Callable[[int], float]


_NARROW = {dtype: name for dtype, name in FORMAT_OF.items() if FORMATS[name].least_gpu}


def stored_formats(program: LoweredProgram) -> frozenset[str]:
    """Lists the formats of a program's weights and caches that not every GPU has instructions for."""
    types = [use.dtype for use in program.weights] + [group.dtype for group in program.cache_groups]
    return frozenset(_NARROW[t] for t in types if t in _NARROW)


@dataclass(frozen=True)
class Planning:
    """The functions by which a target's programs are planned: ``PLANNING`` of its module ``compile.plan``.

    Attributes:
        gpus: True if its programs run on GPUs; False for this machine's processor.
        model: returns the times of a program's steps on a device; it may measure, and then reports progress.
        timed: returns the seconds of a step of one size, faster than ``model``.
        formats: returns a program's formats that need instructions of GPUs.
        scratch: returns the bytes of a step besides the program's arena; arguments: program, requests, tokens of each.
        meeting: measures the seconds of a barrier of a number of ranks in shared memory; None if there are no ranks.
    """

    gpus: bool
    model: Callable[[PlannedSteps, Device, Progress], StepModel]
    timed: Callable[[PlannedSteps, Device, StepSizes, Progress], StepSeconds]
    formats: Callable[[LoweredProgram], frozenset[str]] = stored_formats
    scratch: Callable[[LoweredProgram, int, int], int] = lambda program, requests, context: 0
    meeting: Callable[[int], float] | None = None
