"""Times the kernels of a program that needn't exist yet: its steps in order, on made-up weights and caches."""

from __future__ import annotations

import mmap
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.errors import CapacityError
from enginewright.runtime.shared.lowered_program import Affine, Buffer, LoweredProgram, Operand, Step, WeightUse
from enginewright.runtime.shared.step_costs import StepSizes, counted_as, stored_bytes

from ...native.executable import CpuProgram
from ...steps.planning import CountedSteps
from ...steps.timed_steps import random_step
from .step_runner import fill_caches

MOST_BYTES = 512 << 20
"""The bytes of made-up weights, or those of the largest weight if it is larger. They exceed most CPU caches, and fit
into the free memory of most machines.
"""

_ALIGNMENT = 64
_SECONDS, _LEAST_RUNS = 0.15, 2


@dataclass(frozen=True)
class Timed:
    """The seconds of a run.

    Attributes:
        kinds: the key of a kind of step -> seconds of one step of that kind.
        around: the seconds outside of kernels, divided by the number of steps.
    """

    kinds: Mapping[Hashable, float]
    around: float


class StepProbe:
    """A program with the same steps, but only as many layers as fit into ``MOST_BYTES`` of weights.

    Products of experts are omitted, because their time depends on which experts real tokens select.

    Args:
        steps: the program's steps, with memory planned.
        sizes: the sizes that will be timed.
        threads: the number of threads; 0 means one for each core.

    Raises:
        CapacityError: there is too little memory.
    """

    def __init__(self, steps: CountedSteps, sizes: Sequence[StepSizes], threads: int = 0) -> None:
        program = steps.program
        uses = {use.name: use for use in program.weights}
        self._kept = _first_of_each(steps, uses)
        if "logits" not in program.outputs:
            program, one = _with_logits(program)
            self._kept.append((one, None))
        weights = {o.name: uses[o.name] for step, _ in self._kept for o in step.inputs if o.kind == "weight"}
        caches = {o.name for step, _ in self._kept for o in step.inputs if o.kind == "cache"}
        layers = {g.name: tuple(n for n in g.layers if f"{g.name}/{n}" in caches) for g in program.cache_groups}
        groups = tuple(g.model_copy(update={"layers": layers[g.name]}) for g in program.cache_groups if layers[g.name])
        subset = {
            "cache_groups": groups,
            "weights": tuple(weights.values()),
            "steps": tuple(s for s, _ in self._kept),
            "taps": {},
        }
        self._groups, self._vocabulary = groups, _known_ids(program)
        self._program = CpuProgram(
            program.model_copy(update=subset),
            _made_up(weights.values()),
            blocks={g.name: max(len(s.contexts) * -(-max(s.contexts) // g.block_size) for s in sizes) for g in groups},
            threads=threads,
        )
        fill_caches(self._program)
        self.seconds(sizes[0])  # the first run of a process takes longer, whatever its size

    def seconds(self, sizes: StepSizes) -> Timed:
        """Runs a step of these sizes repeatedly, and returns median times."""
        step = random_step(self._groups, self._vocabulary, sizes, mixed_blocks=True, ports=self._program.lowered.ports)
        self._program.run(step)
        whole: list[float] = []
        kernels: list[npt.NDArray[np.float64]] = []
        while len(whole) < _LEAST_RUNS or sum(whole) < _SECONDS:
            start = time.perf_counter()
            kernels.append(self._program.profile(step)[1])
            whole.append(time.perf_counter() - start)
        middle = np.median(np.stack(kernels), axis=0)  # [steps]
        times_of_kinds: defaultdict[Hashable, list[float]] = defaultdict(list)
        for (_, key), seconds in zip(self._kept, middle.tolist(), strict=True):
            times_of_kinds[key].append(seconds)
        around = median(w - float(k.sum()) for w, k in zip(whole, kernels, strict=True))
        return Timed({key: sum(times) / len(times) for key, times in times_of_kinds.items()}, around / len(self._kept))


def _with_logits(program: LoweredProgram) -> tuple[LoweredProgram, Step]:
    """Adds a step to a program without logits, such as a pipeline's first stage: it makes one number for each sampled
    row.

    Returns the new program and the added step.
    """
    rows, one = Affine(r=1), Affine(1)
    logits = Operand(kind="buffer", name="made up", dtype="f32", shape=(rows, one), strides=(one, one))
    written = (o for s in program.steps for o in s.outputs)
    x = next(o for o in written if o.dtype == "f32" and len(o.shape) > 1 and o.shape[0] == Affine(t=1))
    x = x.model_copy(update={"shape": (x.shape[0], one), "strides": (x.strides[0], one)})
    which = Operand(kind="input", name="rows", dtype="i32", shape=(rows,), strides=(one,))
    buffer = Buffer(name=logits.name, size=rows * 4, offset=program.arena_bytes)
    of_stage = {"buffers": (*program.buffers, buffer), "arena_bytes": program.arena_bytes + rows * _ALIGNMENT}
    program_with_logits = program.model_copy(update={**of_stage, "outputs": {"logits": logits}})
    return program_with_logits, Step(op="take_rows", inputs=(x, which), outputs=(logits,))


def _known_ids(program: LoweredProgram) -> int:
    """Returns the number of valid token ids: the rows of the embedding table; 1 if this program has no such table."""
    tables = (s.inputs[1].shape[0].constant for s in program.steps if counted_as(s) == "table")
    return min(tables, default=1)


def _first_of_each(steps: CountedSteps, uses: Mapping[str, WeightUse]) -> list[tuple[Step, Hashable]]:
    """Returns the first steps of each kind that are kept, in the program's order, with the keys of their kinds.

    ``uses`` has the weights by name.
    """

    def nbytes(operands: Sequence[Operand]) -> int:
        return sum(stored_bytes(uses[o.name]) for o in operands if o.kind == "weight")

    repeated = sum(nbytes(kind.step.inputs) for kind in steps.kinds if kind.count > 1)
    most = max(1, MOST_BYTES // max(repeated, 1))
    seen: Counter[Hashable] = Counter()
    chosen = []
    for step, key in zip(steps.program.steps, steps.keys, strict=True):
        seen[key] += 1
        if seen[key] <= most and counted_as(step) != "experts":
            chosen.append((step, key))
    return chosen


def _made_up(uses: Iterable[WeightUse]) -> dict[str, npt.NDArray[np.uint8]]:
    """Returns memory for each weight by name: separate memory up to ``MOST_BYTES``, then memory that earlier weights
    have too.

    It is a mapped sparse file, which needs no disk space. The weights of bundles are mapped files too, whose pages
    differ from a process's own. All values are 0, because other numbers could make activations so large or small that
    CPUs slow down.
    """
    sizes = {use.name: stored_bytes(use) for use in uses}
    places = [-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in sizes.values()]
    whole = min(sum(places), max(MOST_BYTES, *places))
    try:
        with tempfile.TemporaryFile() as file:
            file.truncate(whole)
            array = np.frombuffer(mmap.mmap(file.fileno(), whole, access=mmap.ACCESS_READ), np.uint8)
    except OSError as e:
        raise CapacityError(
            f"no temporary file of {whole:,} bytes to measure kernels with: {e.strerror}",
            hint="Free some memory, or set TMPDIR to a folder on another disk.",
        ) from e
    array.max()  # brings all pages into memory
    arrays, at = {}, 0
    for (name, nbytes), place in zip(sizes.items(), places, strict=True):
        at = 0 if at + place > whole else at
        arrays[name] = array[at : at + nbytes]
        at += place
    return arrays
