"""Makes the program of each rank of a stage, step by step, as ``LayerCut`` plans it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..shared.arena import plan_region
from ..shared.contracts import CacheGroup
from ..shared.dtypes import stored_bytes
from ..shared.lowered_program import Affine, Buffer, LoweredProgram, Operand, Step
from .cut import LayerCut, StepPlan
from .kinds.base import Axis
from .kinds.views import flattened, part_of, width_of, with_operands


def programs_of(cut: LayerCut) -> tuple[LoweredProgram, ...]:
    """Returns the programs of a stage's ranks.

    Only the first rank computes the logits, unless another rank's program would then lack a step that writes its
    output. In that case all ranks compute them.
    """
    for asking in (1, cut.ranks):
        plans = cut.plans(asking)
        programs = [RankMaker(cut, plans, rank).program() for rank in range(cut.ranks)]
        if not any(map(_lacks_results, programs)):
            break
    return plan_region(programs, cut.place.region)


def _lacks_results(program: LoweredProgram) -> bool:
    written = {o.name for step in program.steps for o in step.outputs}
    return any(o.kind == "buffer" and o.name not in written for o in program.outputs.values())


class RankMaker(msgspec.Struct):
    """A builder of one rank's program.

    Attributes:
        cut: the division of the layers among the ranks of a stage.
        plans: the plan of each step of the whole program.
        rank: the rank's number within the stage.
        steps: the steps of the rank so far.
        shared: buffer name -> the buffers that ranks share, so far.
    """

    cut: LayerCut
    plans: Sequence[StepPlan]
    rank: int
    steps: list[Step] = msgspec.field(default_factory=list)
    shared: dict[str, Buffer] = msgspec.field(default_factory=dict)

    def program(self) -> LoweredProgram:
        whole = self.cut.program
        self._exchange(self.cut.step_kind.receive(self.cut.stage, self.cut.place))
        for step, axis, plan in zip(whole.steps, self.cut.axes, self.plans, strict=True):
            self._add(step, axis, plan)
        columns = [self.cut.sent_columns(operand)[self.rank] for operand in self.cut.stage.sent]
        self._exchange(self.cut.step_kind.send(self.cut.stage, self.cut.place, columns))
        used = dict.fromkeys(o.name for s in self.steps for o in s.inputs if o.kind == "weight")
        buffers = [self.shared.get(b.name, b) for b in whole.buffers]
        known = {b.name for b in whole.buffers}
        buffers += [b for name, b in self.shared.items() if name not in known]
        return whole.model_copy(
            update={
                "steps": tuple(self.steps),
                "buffers": tuple(buffers),
                "weights": tuple(self.cut.weights[name] for name in used),
                "cache_groups": tuple(map(self._group, whole.cache_groups)),
                "ranks": (self.cut.place.first, self.cut.ranks),
            }
        )

    def _group(self, group: CacheGroup) -> CacheGroup:
        for layer in group.layers:
            if (heads := self.cut.heads.get(f"{group.name}/{layer}")) is not None:
                first, end = heads.key_value[self.rank]
                return group.with_heads(end - first)
        return group

    def _exchange(self, exchange: tuple[Step, list[Buffer]] | None) -> None:
        """Adds a step that exchanges values with another stage, and the buffers that the two stages share.

        ``exchange``: the step and its buffers; None adds nothing.
        """
        if exchange is not None:
            self.steps.append(exchange[0])
            self.shared.update((buffer.name, buffer) for buffer in exchange[1])

    def _add(self, step: Step, axis: Axis | None, plan: StepPlan) -> None:
        moved = {o.name: self._moved(o) for o in step.outputs} if plan.gather else {}
        aimed = with_operands(step, step.inputs, [moved.get(o.name, o) for o in step.outputs]) if moved else step
        for lo, hi in self.cut.computed(step, axis, plan.ranges[self.rank]):
            self.steps.append(self.cut.piece(aimed, axis, lo, hi, self.rank, plan))
        if not plan.gather:
            return
        self._gather(aimed, axis, plan)
        for before, after in zip(step.outputs, aimed.outputs, strict=True):
            if before.name != after.name:
                self.steps.append(Step(op="copy", inputs=(after,), outputs=(before,), where=step.where))

    def _moved(self, operand: Operand) -> Operand:
        """Returns a gathered output in a shared buffer that no other step writes.

        It is the output's own buffer if no other step writes that one; otherwise a new buffer.
        """
        size = self.cut.rows[operand.name]
        alone = self.cut.writers[operand.name] == 1 and size is not None and self.cut.is_whole(operand)
        if alone:
            before = next(b for b in self.cut.program.buffers if b.name == operand.name)
            self.shared[operand.name] = before.model_copy(update={"region": self.cut.place.region, "offset": None})
            return operand
        name = f"{operand.name}.gathered.{operand.offset}"
        bytes_of_row = stored_bytes(operand.dtype, width_of(operand))
        self.shared[name] = Buffer(name=name, size=operand.shape[0] * bytes_of_row, region=self.cut.place.region)
        strides = [Affine(1)]
        for length in reversed(operand.shape[1:]):
            strides.insert(0, strides[0] * length)
        return operand.model_copy(update={"name": name, "offset": Affine(), "strides": tuple(strides)})

    def _gather(self, step: Step, axis: Axis | None, plan: StepPlan) -> None:
        attrs: dict[str, Any] = {"ranks": self.cut.ranks}
        if plan.experts:
            starts = step.inputs[1 if step.op == "grouped_linear" else 3]
            attrs["cuts"] = ",".join(map(str, plan.experts))
            one = Step(
                op="gather_experts",
                inputs=(step.outputs[0], starts),
                outputs=step.outputs,
                attrs=attrs,
                where=step.where,
            )
            self.steps.append(one)
            return
        assert axis is not None
        attrs["to"] = plan.to
        lists = []
        for operand, cut in zip(step.outputs, axis.outputs, strict=True):
            assert cut is not None
            ends = [self.cut.index_columns(operand, cut, *ranges[0])[1] for ranges in plan.ranges]
            lists.append(",".join(map(str, [0, *ends])))
        attrs["cuts"] = ";".join(lists)
        rows = tuple(map(flattened, step.outputs))
        parts = []
        for operand, cuts in zip(rows, lists, strict=True):
            ends = [int(c) for c in cuts.split(",")]
            parts.append(part_of(operand, 1, ends[self.rank], ends[self.rank + 1]))
        self.steps.append(Step(op="all_gather", inputs=tuple(parts), outputs=rows, attrs=attrs, where=step.where))
