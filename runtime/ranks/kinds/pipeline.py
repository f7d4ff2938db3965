"""Pipeline parallelism (Huang et al., GPipe, 2018): the steps are divided into consecutive stages.

The cuts are chosen so that little data is sent between stages, and each stage reads about as many bytes of weights. The
last stage has rank 0, which samples; the first stage has the last ranks. A stage has the caches of its own layers. As
many steps are in flight as there are stages; they belong to different requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...shared.contracts import CacheGroup
from ...shared.errors import RequestError
from ...shared.lowered_program import Affine, Buffer, LoweredProgram, Operand, Step
from ...shared.step_costs import StepSizes, step_costs
from .base import Arrivals, Place, Stage, StepKind
from .views import part_of, row_sizes, width_of

_CHEAP = frozenset({"rope_table", "elementwise", "copy", "reduce"})
_MOST_HANDED_ON = 8  # times the least that any cut hands on
_BYTES_COUNT = 0.05  # as much more to hand on as the least counts as being so far off, as a part of a stage's weights


class Pipeline(StepKind):
    """Divides layers into stages."""

    name = "pipeline"
    collectives = ("send", "receive")
    in_flight = True

    def stages(self, program: LoweredProgram, count: int) -> list[Stage]:
        return _stages(program, count)

    def receive(self, stage: Stage, place: Place) -> tuple[Step, list[Buffer]] | None:
        if not stage.received:
            return None
        links = [_link(stage, operand, place, place.stage - 1) for operand in stage.received]
        attrs: dict[str, Any] = {"first": place.first + place.count, "ranks": place.count}
        step = Step(
            op="receive", inputs=tuple(o for o, _ in links), outputs=stage.received, attrs=attrs, where=self.name
        )
        return step, [buffer for _, buffer in links]

    def send(self, stage: Stage, place: Place, cuts: Sequence[tuple[int, int]]) -> tuple[Step, list[Buffer]] | None:
        if not stage.sent:
            return None
        links = [_link(stage, operand, place, place.stage) for operand in stage.sent]
        inputs = tuple(part_of(o, 1, *columns) for o, columns in zip(stage.sent, cuts, strict=True))
        to = tuple(part_of(o, 1, *columns) for (o, _), columns in zip(links, cuts, strict=True))
        attrs: dict[str, Any] = {"first": place.first - place.count, "ranks": place.count}
        step = Step(op="send", inputs=inputs, outputs=to, attrs=attrs, where=self.name)
        return step, [buffer for _, buffer in links]

    def finish(self, program: LoweredProgram, programs: Sequence[LoweredProgram]) -> LoweredProgram:
        return _with_senders(program, programs)

    def arrivals(self, step: Step, ranks: range, rank: int, element: Callable[[Operand], float]) -> Arrivals | None:
        if step.op == "send":
            return None  # messages count where they arrive
        senders = range(int(step.attrs["first"]), int(step.attrs["first"]) + int(step.attrs["ranks"]))
        row = sum((width_of(o) * element(o) for o in step.outputs), 0.0)
        return Arrivals((senders[0], rank), {sender: row / len(senders) for sender in senders})


def _link(stage: Stage, operand: Operand, place: Place, at: int) -> tuple[Operand, Buffer]:
    """Returns the operand and the buffer of a value between stage ``at`` and the next."""
    name = f"{operand.name}.sent.{at}"
    size = next(b.size for b in stage.program.buffers if b.name == operand.name)
    return operand.model_copy(update={"name": name}), Buffer(name=name, size=size, region=place.stages + 1 + at)


def _stages(program: LoweredProgram, count: int) -> list[Stage]:
    """Divides the steps into ``count`` stages of even size that send little data. Raises RequestError."""
    if count == 1:
        return [Stage(program)]
    flow = _Flow(program)
    cuts = [0, *_stage_cuts(program, flow, count), len(program.steps)]
    stages: list[Stage] = []
    received: tuple[Operand, ...] = ()
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        steps = (*(program.steps[i] for i in flow.again(begin)), *program.steps[begin:end])
        last = number + 1 == count
        sent = () if last else tuple(_as_rows(name, program, flow.rows) for name in flow.handed_on(end))
        outputs = program.outputs if last else {}
        groups = _groups_of(program, steps)
        part = program.model_copy(update={"steps": steps, "outputs": outputs, "cache_groups": groups})
        stages.append(Stage(part, received, sent))
        received = sent
    return stages


def _groups_of(program: LoweredProgram, steps: Sequence[Step]) -> tuple[CacheGroup, ...]:
    """Returns all cache groups, each with only the layers that ``steps`` use."""
    used = {o.name for step in steps for o in step.inputs if o.kind == "cache"}
    return tuple(
        g.model_copy(update={"layers": tuple(layer for layer in g.layers if f"{g.name}/{layer}" in used)})
        for g in program.cache_groups
    )


class _Flow:
    """The data flow of a program: for each buffer, the steps that write it and the last step that reads it."""

    def __init__(self, program: LoweredProgram) -> None:
        self.program = program
        self.rows = row_sizes(program)
        self.sizes = {b.name: b.size for b in program.buffers}
        self.written: dict[str, tuple[int, int]] = {}
        self.read: dict[str, int] = {o.name: len(program.steps) for o in program.outputs.values()}
        self.cheap: set[str] = set()
        for index, step in enumerate(program.steps):
            alone = all(o.kind != "buffer" or o.name in self.cheap for o in step.inputs)
            for operand in step.outputs:
                if operand.name not in self.written and step.op in _CHEAP and alone:
                    self.cheap.add(operand.name)
                elif not (step.op in _CHEAP and alone):
                    self.cheap.discard(operand.name)
                self.written[operand.name] = self.written.get(operand.name, (index, index))[0], index
            for operand in step.inputs:
                if operand.kind == "buffer":
                    self.read[operand.name] = max(index, self.read.get(operand.name, 0))

    def handed_on(self, at: int) -> list[str]:
        """Returns the buffers that a stage which ends before step ``at`` sends: written before and read later.

        Buffers that the next stage computes again are left out.
        """
        names = [
            name
            for name, (first, _) in self.written.items()
            if first < at <= self.read.get(name, -1) and name not in self.cheap
        ]
        return sorted(names, key=lambda name: (not self.sizes[name].t, name))  # what every step has comes first

    def may_cut(self, names: Iterable[str], at: int) -> bool:
        """Returns True if all these buffers have rows, and no step from ``at`` on writes them."""
        return all(self.rows[name] is not None and self.written[name][1] < at for name in names)

    def again(self, at: int) -> list[int]:
        """Returns the cheap steps before ``at`` that a stage which begins there repeats, such as a table of rotations.

        Their results are needed later and depend on step inputs alone.
        """
        needed = {o.name for step in self.program.steps[at:] for o in step.inputs if o.name in self.cheap}
        indices = []
        for index in reversed(range(at)):
            step = self.program.steps[index]
            if any(o.name in needed for o in step.outputs):
                indices.append(index)
                needed.update(o.name for o in step.inputs if o.kind == "buffer")
        return indices[::-1]


def _stage_cuts(program: LoweredProgram, flow: _Flow, count: int) -> list[int]:
    """Returns the index of the first step of each stage except the first stage."""
    costs = step_costs(program, StepSizes((1,), (1,)))
    before = list(itertools.accumulate((float(cost.weights) for cost in costs), initial=0.0))
    caches: dict[str, tuple[int, int]] = {}
    for index, step in enumerate(program.steps):
        for operand in step.inputs:
            if operand.kind == "cache":
                caches[operand.name] = caches.get(operand.name, (index, index))[0], index
    inside = {at for first, last in caches.values() for at in range(first + 1, last + 1)}
    handed: dict[int, int] = {}  # bytes, if a stage begins with that step
    for at in range(1, len(program.steps)):
        names = flow.handed_on(at)
        if names and at not in inside and flow.may_cut(names, at):
            handed[at] = sum(flow.sizes[name].evaluate(1, 1, 1) for name in names)
    least = min(handed.values(), default=1)
    places = sorted(at for at, size in handed.items() if size <= _MOST_HANDED_ON * least)
    if len(places) < count - 1:
        raise RequestError(
            f"partition: {count} stages are more than there are places to cut the model at",
            hint=f"Use pipeline={len(places) + 1} or fewer.",
        )
    cuts: list[int] = []
    for number in range(1, count):
        target = before[-1] * number / count
        later = count - 1 - number
        left = [at for at in places if not cuts or at > cuts[-1]]
        left = left[: len(left) - later]
        cuts.append(
            min(left, key=lambda at: count * abs(before[at] - target) / before[-1] + handed[at] / least * _BYTES_COUNT)
        )
    return cuts


def _as_rows(name: str, program: LoweredProgram, rows: Mapping[str, int | None]) -> Operand:
    """Returns an operand [M, C] for the whole of a buffer."""
    like = next(o for step in program.steps for o in step.outputs if o.name == name)
    size = rows[name]
    assert size is not None
    return like.model_copy(
        update={
            "shape": (like.shape[0], Affine(size)),
            "strides": (like.strides[0], Affine(1)),
            "offset": Affine(),
        }
    )


def _with_senders(program: LoweredProgram, programs: Sequence[LoweredProgram]) -> LoweredProgram:
    """Returns the program with its receive step's ``cuts``: the columns that each rank of the previous stage sends."""
    step = program.steps[0]
    if step.op != "receive":
        return program
    first = int(step.attrs["first"])
    senders = programs[first : first + int(step.attrs["ranks"])]
    sent = zip(*(one.steps[-1].outputs for one in senders), strict=True)
    lists = [[0, *(o.offset.constant + o.shape[1].constant for o in operands)] for operands in sent]
    attrs = {**step.attrs, "cuts": ";".join(",".join(map(str, cuts)) for cuts in lists)}
    return program.model_copy(update={"steps": (step.model_copy(update={"attrs": attrs}), *program.steps[1:])})
