"""Pipeline parallelism (Huang et al., GPipe, 2018): the steps are cut into stages, one behind the other.

They are cut where least is handed on, and so that each stage reads about as many bytes of weights. The last stage has
rank 0, which samples; the first one has the last ranks. A stage has the caches of its own layers. As many steps are in
flight as there are stages, of different requests.
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
    """Returns where a value lies between stage ``at`` and the next, and the buffer that this is."""
    name = f"{operand.name}.sent.{at}"
    size = next(b.size for b in stage.program.buffers if b.name == operand.name)
    return operand.model_copy(update={"name": name}), Buffer(name=name, size=size, region=place.stages + 1 + at)


def _stages(program: LoweredProgram, count: int) -> list[Stage]:
    """Cuts the steps where the stages are even and hand on as little as possible. Raises RequestError."""
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
    """All cache groups, with the layers that these steps have."""
    used = {o.name for step in steps for o in step.inputs if o.kind == "cache"}
    return tuple(
        g.model_copy(update={"layers": tuple(layer for layer in g.layers if f"{g.name}/{layer}" in used)})
        for g in program.cache_groups
    )


class _Flow:
    """From which step to which one a program's buffers are needed."""

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
        """The buffers that steps before ``at`` write and others read, but for those that are computed again."""
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
        """The steps before ``at`` whose results are needed from there on and depend on step inputs alone, such as a
        table of rotations."""
        needed = {o.name for step in self.program.steps[at:] for o in step.inputs if o.name in self.cheap}
        indices = []
        for index in reversed(range(at)):
            step = self.program.steps[index]
            if any(o.name in needed for o in step.outputs):
                indices.append(index)
                needed.update(o.name for o in step.inputs if o.kind == "buffer")
        return indices[::-1]


def _stage_cuts(program: LoweredProgram, flow: _Flow, count: int) -> list[int]:
    """The step with which each stage but the first begins."""
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
    """All of a buffer as [M, C]."""
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
    """Fills in which columns the ranks of the previous stage send."""
    step = program.steps[0]
    if step.op != "receive":
        return program
    first = int(step.attrs["first"])
    senders = programs[first : first + int(step.attrs["ranks"])]
    sent = zip(*(one.steps[-1].outputs for one in senders), strict=True)
    lists = [[0, *(o.offset.constant + o.shape[1].constant for o in operands)] for operands in sent]
    attrs = {**step.attrs, "cuts": ";".join(",".join(map(str, cuts)) for cuts in lists)}
    return program.model_copy(update={"steps": (step.model_copy(update={"attrs": attrs}), *program.steps[1:])})
