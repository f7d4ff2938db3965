"""Divides the steps of a stage among its ranks, by the rules of a ``LayerKind``.

A rank's step is the same op on views of some columns, and operands keep the offsets that they have in the whole
program. A gathered value is in one buffer that all ranks of a machine share: each rank writes its own columns, so that
gathering only means to wait for the other ranks. All other buffers belong to one rank.

The plan is made from the last step to the first: for each step, it collects which columns of the outputs each rank
needs. An example with 2 ranks, ``tensor``, and an attention with 8 query heads over 2 key/value heads of 64 numbers:

    value             columns that a rank needs                           columns that a rank computes
    o_proj's result   all columns, on all ranks (a norm sums over them)   each rank computes half, then all_gather
    attention         the heads that this rank's o_proj reads: all 8      each rank computes 4 heads, then all_gather
    q                 of the 4 heads that this rank attends with          rows 0-255 of the weight, or 256-511
    k and v           of the key/value head that these read               rows 0-63 or 64-127, and a cache of 1 head
    the norm before   all columns                                         each rank computes them for itself

The kind defines along which axis a step can be cut (its ``rules``), which heads a rank's cache has, and the op of its
attention. A step without a rule is computed by every rank: the result is right, but the work isn't divided.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from ..shared.arena import ALIGNMENT
from ..shared.dtypes import stored_bytes
from ..shared.errors import RequestError
from ..shared.lowered_program import Affine, Operand, Step
from ..shared.panel_layouts import PANEL
from .kinds.base import Axis, Heads, LayerKind, Place, Stage, StepKind
from .kinds.tensor import GROUPED, LINEAR, expert_cuts
from .kinds.views import (
    Ranges,
    Slice,
    columns_of,
    columns_of_index,
    exceeds,
    is_by_row,
    is_dense,
    overlap,
    pairs,
    part_of,
    row_sizes,
    touched,
    union,
    width_of,
    with_operands,
)

_FOLLOWS = frozenset({"gated_activation", "quantize_activation", "cast_bf16", "take_rows", "elementwise", "copy"})
"""Ops that are divided as their inputs are: each rank computes its own part, and results are gathered instead of
inputs.
"""

_BY_ROW = frozenset({"gated_activation", "quantize_activation", "cast_bf16", "elementwise", "copy"})
"""Ops in which each row of the result depends only on the same row of the inputs."""


class Share(msgspec.Struct, frozen=True):
    """The division of a buffer's columns among ranks: at the columns ``cuts``; at multiples of ``grain`` if that is
    ().
    """

    grain: int
    cuts: tuple[int, ...] = ()


class StepPlan(msgspec.Struct):
    """A plan for one step: the part that each rank computes, and whether the ranks gather the outputs afterwards.

    Attributes:
        ranges: the ranges of the axis's indices that each rank computes.
        gather: True if the ranks gather the outputs.
        to: the only rank that needs the gathered outputs; -1 if all do.
        experts: the first expert of each rank, then the number of experts; empty if the step isn't cut by experts.
    """

    ranges: list[Ranges]
    gather: bool = False
    to: int = -1
    experts: tuple[int, ...] = ()


class LayerCut:
    """A plan for the division of one stage's steps among its ranks.

    Args:
        kind: the kind that divides each layer among the ranks.
        steps: the kind that divided the model into stages.
    """

    def __init__(self, stage: Stage, place: Place, kind: LayerKind, steps: StepKind) -> None:
        self.stage, self.place, self.ranks, self.kind, self.step_kind = stage, place, place.count, kind, steps
        program = self.program = stage.program
        self.weights = {use.name: use for use in program.weights}
        self.sizes = {b.name: b.size for b in self.program.buffers}
        self.groups = {g.name: g for g in program.cache_groups}
        self.rows = row_sizes(self.program)
        self.readers: Counter[str] = Counter()
        self.writers: Counter[str] = Counter()
        for step in self.program.steps:
            self.readers.update({o.name for o in step.inputs if o.kind == "buffer"})
            self.writers.update({o.name for o in step.outputs if o.kind == "buffer"})
        self.readers.update(o.name for o in (*program.outputs.values(), *stage.sent))
        self.writers.update(o.name for o in stage.received)
        self.heads = self._cut_heads()
        self.axes = [self._axis(step) for step in self.program.steps]
        self.shares = self._follow()
        self.whole = self._read_whole()

    def _cut_heads(self) -> dict[str, Heads]:
        """Returns each rank's heads, by the name of the cache operand.

        Raises RequestError if two layers of a cache group would have different key/value heads on a rank.
        """
        heads_by_cache: dict[str, Heads] = {}
        of_group: dict[str, tuple[tuple[int, int], ...]] = {}
        for step in self.program.steps:
            if step.op != "paged_attention":
                continue
            for cache in (operand.name for operand in step.inputs if operand.kind == "cache"):
                name = cache.rpartition("/")[0]
                have = self.groups[name].planes[0].heads
                heads = heads_by_cache[cache] = self.kind.heads(step, have, self.ranks)
                if of_group.setdefault(name, heads.key_value) != heads.key_value:
                    raise RequestError(
                        f"ranks: layers of cache group {name} have different numbers of query heads",
                        hint=f"Use a number of ranks that divides {have}.",
                    )
        return heads_by_cache

    def _axis(self, step: Step) -> Axis | None:
        if any(o.kind == "buffer" and self.rows[o.name] is None for o in step.outputs):
            return None
        rule = self.kind.rules.get(step.op)
        return None if rule is None else rule(step)

    def _read_whole(self) -> frozenset[str]:
        """Returns the weights that at least one step needs whole, such as an embedding table that is also the output
        projection.
        """
        whole: set[str] = set()
        for step, axis in zip(self.program.steps, self.axes, strict=True):
            if step.op not in GROUPED:
                cuts = axis.inputs if axis is not None else (None,) * len(step.inputs)
                weights = zip(step.inputs, cuts, strict=False)  # a gated activation is given two inputs for its one
                whole.update(o.name for o, cut in weights if o.kind == "weight" and cut is None)
        return frozenset(whole)

    def is_whole(self, operand: Operand) -> bool:
        """Returns True if a view has every element of its buffer's rows, in their order."""
        size = self.rows.get(operand.name) if operand.kind == "buffer" else None
        return size is not None and self._columns(operand) == ((0, size),) and is_dense(operand)

    # Where what is cut stays cut

    def _follow(self) -> dict[str, Share]:
        """Returns the division of each buffer that ranks compute in shares: results of products, of attention and of
        ops after them.
        """
        shares: dict[str, Share] = {}
        for step, axis in zip(self.program.steps, self.axes, strict=True):
            if axis is None or not all(self.is_whole(o) for o in step.outputs):
                continue
            if step.op in LINEAR:
                share: Share | None = Share(PANEL)
            elif step.op == "paged_attention":
                size = step.outputs[0].shape[2].constant
                share = Share(1, tuple(h * size for h in self.heads[step.inputs[1].name].query))
            elif step.op in _FOLLOWS:
                share = self._followed(step, axis, shares)
            else:
                share = None
            if share is None:
                continue
            index_cuts = self._index_cuts(step, axis, share)
            first = axis.outputs[0]
            assert first is not None
            for operand, cut in zip(step.outputs, axis.outputs, strict=True):
                width = self.rows[operand.name]
                assert cut is not None and width is not None
                if index_cuts is not None:
                    columns = columns_of_index(operand, cut)
                    cuts = tuple(min(i * columns, width) for i in index_cuts) if share.cuts else ()
                    grain = max(1, share.grain * columns // columns_of_index(step.outputs[0], first))
                    shares[operand.name] = Share(grain, cuts)
        return shares

    def _followed(self, step: Step, axis: Axis, shares: Mapping[str, Share]) -> Share | None:
        """Returns the division of a step's outputs that follows from its divided inputs, in columns of the first
        output.

        Returns None if no input is divided for this step alone, or if two inputs are divided differently.
        """
        grain, cuts = 1, set()
        from_share = False
        for operand, cut in zip(step.inputs, axis.inputs, strict=False):
            share = shares.get(operand.name) if operand.kind == "buffer" else None
            if share is None or cut is None or self.readers[operand.name] != 1 or not self.is_whole(operand):
                continue
            from_share = True
            if step.op == "gated_activation":  # its halves are cut alike, wherever that is
                grain = math.lcm(grain, PANEL)
                continue
            grain = math.lcm(grain, share.grain)
            if share.cuts:
                cuts.add(share.cuts)
        if not from_share or len(cuts) > 1:
            return None
        return Share(grain, cuts.pop() if cuts else ())

    def _index_cuts(self, step: Step, axis: Axis, share: Share) -> tuple[int, ...] | None:
        """Returns the indices of the axis at which to cut, so that the first output is divided as ``share`` says.

        Returns None if that isn't possible.
        """
        cut = axis.outputs[0]
        assert cut is not None
        unit = columns_of_index(step.outputs[0], cut)
        if share.cuts:
            if any(c % unit for c in share.cuts[:-1]):
                return None
            return (*(c // unit for c in share.cuts[:-1]), axis.count)
        grain = math.lcm(share.grain, unit * axis.unit) // unit
        pieces = -(-axis.count // grain)
        if pieces < self.ranks:
            return None
        return tuple(min(pieces * r // self.ranks * grain, axis.count) for r in range(self.ranks + 1))

    # What each rank needs

    def plans(self, asking: int) -> list[StepPlan]:
        """Returns a plan for each step, for the ranks of the stage.

        It goes from the last step to the first, and collects which columns of each buffer's rows each rank needs.
        ``asking``: the number of ranks, from the first on, that need the logits.
        """
        needs: list[dict[str, Ranges]] = [{} for _ in range(self.ranks)]
        for operand in self.program.outputs.values():
            for need in needs[:asking]:
                self._need(need, operand)
        for operand in self.stage.sent:
            for need, (lo, hi) in zip(needs, self.sent_columns(operand), strict=True):
                self._need(need, part_of(operand, 1, lo, hi))
        all_rows = self._rows_of_all()
        plans: list[StepPlan] = []
        for index in reversed(range(len(self.program.steps))):
            step, axis = self.program.steps[index], self.axes[index]
            plan = self._plan(step, axis, needs, all_rows)
            plans.append(plan)
            for rank, ranges in enumerate(plan.ranges):
                for lo, hi in self.computed(step, axis, ranges):
                    for operand in self.piece(step, axis, lo, hi, rank, plan).inputs:
                        self._need(needs[rank], operand)
        return plans[::-1]

    def sent_columns(self, operand: Operand) -> list[tuple[int, int]]:
        """Returns the range of columns of ``operand`` that each rank sends to the next stage.

        A rank sends the columns that it computes; of a value that all ranks compute whole, each sends an equal part.
        """
        share = self.shares.get(operand.name, Share(1))
        if share.cuts:
            return pairs(share.cuts)
        size = operand.shape[1].constant
        pieces = -(-size // share.grain)
        cuts = [min(pieces * r // self.ranks * share.grain, size) for r in range(self.ranks + 1)]
        return pairs(cuts)

    def _plan(
        self, step: Step, axis: Axis | None, needs: Sequence[Mapping[str, Ranges]], all_rows: frozenset[str]
    ) -> StepPlan:
        if step.op in GROUPED:
            return self._plan_of_experts(step, needs, all_rows)
        if step.op == "kv_write":
            return StepPlan([((0, 1),)] * self.ranks)
        needed = [self._wanted(step, axis, need) for need in needs]
        if axis is None or (self.ranks == 1 and step.op not in ("paged_attention", "rope_kv_write")):
            return StepPlan(needed)
        whole = [ranges == ((0, axis.count),) for ranges in needed]
        to = 0 if whole[0] and not any(needed[1:]) else -1
        if step.op in self.kind.repeated:
            return StepPlan([((0, axis.count),)] * self.ranks)
        if step.op in ("paged_attention", "rope_kv_write"):
            cuts = self.heads[step.inputs[1 if step.op == "paged_attention" else 5].name].query
            by_rank: list[Ranges] = [((lo, hi),) for lo, hi in pairs(cuts)]
            more = any(exceeds(ranges, mine) for ranges, mine in zip(needed, by_rank, strict=True))
            return StepPlan(by_rank, more, to)
        share = self.shares.get(step.outputs[0].name)
        cuts_or_none = self._index_cuts(step, axis, share) if share is not None else None
        if cuts_or_none is None or not any(whole):
            return StepPlan(needed)
        return StepPlan([((lo, hi),) for lo, hi in pairs(cuts_or_none)], True, to)

    def _wanted(self, step: Step, axis: Axis | None, need: Mapping[str, Ranges]) -> Ranges:
        """Returns the indices of a step's axis that a rank needs for the columns ``need`` of the outputs.

        For a step without an axis: ((0, 1),) if the rank needs any of it, otherwise ().
        """
        ranges: list[tuple[int, int]] = []
        for i, operand in enumerate(step.outputs):
            columns = need.get(operand.name, ())
            if axis is None:
                ranges += [(0, 1)] * bool(overlap(columns, self._columns(operand)))
            elif (cut := axis.outputs[i]) is not None:
                ranges += touched(operand, cut, axis.count, columns)
        return union(ranges)

    def _need(self, need: dict[str, Ranges], operand: Operand) -> None:
        if operand.kind == "buffer":
            need[operand.name] = union([*need.get(operand.name, ()), *self._columns(operand)])

    def _columns(self, operand: Operand) -> Ranges:
        """Returns the ranges of columns, in the buffer's rows, that a view touches. Gaps may be filled.

        For a view without rows it returns ((0, 1),).
        """
        if self.rows.get(operand.name) is None:
            return ((0, 1),)
        return columns_of(operand)

    def computed(self, step: Step, axis: Axis | None, ranges: Ranges) -> Ranges:
        """Returns the indices that a rank computes to get ``ranges``: rounded outwards to whole panels of weights."""
        if axis is None or axis.unit == 1:
            return ranges
        unit = axis.unit
        return union((lo // unit * unit, min(-(-hi // unit) * unit, axis.count)) for lo, hi in ranges)

    # Experts

    def _rows_of_all(self) -> frozenset[str]:
        """Returns the buffers from which a rank also needs the rows of experts that other ranks compute."""
        buffers: set[str] = set()
        for step in reversed(self.program.steps):
            rows_alone = step.op in GROUPED or (
                step.op in _BY_ROW and is_by_row(step) and not any(o.name in buffers for o in step.outputs)
            )
            names = [o.name for o in step.inputs if o.kind == "buffer"]
            buffers.update(() if rows_alone else names)
        buffers.update(o.name for o in self.program.outputs.values())
        return frozenset(buffers)

    def _plan_of_experts(self, step: Step, needs: Sequence[Mapping[str, Ranges]], all_rows: frozenset[str]) -> StepPlan:
        starts = step.inputs[1 if step.op == "grouped_linear" else 3]
        experts = starts.shape[0].constant - 1
        needed: list[Ranges] = [((0, 1),) if need.get(step.outputs[0].name) else () for need in needs]
        if experts < self.ranks or self.ranks == 1 or not self.kind.divides_experts:
            return StepPlan(needed)
        cuts = expert_cuts(experts, self.ranks)
        return StepPlan([((0, 1),)] * self.ranks, step.outputs[0].name in all_rows, -1, cuts)

    # Pieces of steps

    def piece(self, step: Step, axis: Axis | None, lo: int, hi: int, rank: int, plan: StepPlan) -> Step:
        """Returns the step that computes the indices ``lo`` to ``hi`` - 1 of the axis, on parts of the whole program's
        weights.
        """
        if plan.experts:
            return self._piece_of_experts(step, plan.experts[rank], plan.experts[rank + 1])
        if step.op == "kv_write":
            heads = self._heads_of(step.inputs[3]).key_value[rank]
            step = step.model_copy(update={"attrs": {**step.attrs, **self.kind.cache_attrs(rank, self.ranks)}})
            return with_operands(
                step, [part_of(o, 1, *heads) for o in step.inputs[:2]] + list(step.inputs[2:]), step.outputs
            )
        if axis is None:
            return step
        op, inputs = step.op, list(step.inputs)
        attrs = dict(step.attrs)
        if step.op == "gated_activation":
            both = inputs[0]
            inputs = [
                part_of(both, both.rank - 1, 0, axis.count),
                part_of(both, both.rank - 1, axis.count, 2 * axis.count),
            ]
        elif step.op == "rope_kv_write":
            heads = self._heads_of(step.inputs[5]).key_value[rank]
            inputs[1:3] = [part_of(o, 1, *heads) for o in inputs[1:3]]
            attrs |= self.kind.cache_attrs(rank, self.ranks)
        elif step.op == "paged_attention":
            op, more = self.kind.attention(self._heads_of(step.inputs[1]), lo, rank, self.ranks)
            attrs |= more
        inputs = [self._part(o, cut, lo, hi) for o, cut in zip(inputs, axis.inputs, strict=True)]
        outputs = [self._part(o, cut, lo, hi) for o, cut in zip(step.outputs, axis.outputs, strict=True)]
        return Step(op=op, inputs=tuple(inputs), outputs=tuple(outputs), attrs=attrs, where=step.where)

    def _heads_of(self, cache: Operand) -> Heads:
        heads = self.heads.get(cache.name)
        if heads is None:  # written and never read
            have = self.groups[cache.name.rpartition("/")[0]].planes[0].heads
            heads = Heads(1, (0,) * (self.ranks + 1), ((0, have),) * self.ranks)
        return heads

    def _part(self, operand: Operand, cut: Slice | None, lo: int, hi: int) -> Operand:
        if cut is None:
            return operand
        end = min(hi * cut.scale, operand.shape[cut.dim].constant)
        part = part_of(operand, cut.dim, lo * cut.scale, end)
        return part if cut.dim else self._rows_of_weight(part, lo * cut.scale, operand)

    def _rows_of_weight(self, part: Operand, first: int, whole: Operand) -> Operand:
        """Returns ``part`` as an operand with a weight of its own, so that a rank loads only these rows of the weight.

        A weight that ranks need whole, or whose first row isn't aligned, stays a view of the whole weight. So does one
        that a step reads once more for each token, whose rows aren't the operand's.
        """
        if whole.kind != "weight" or part.shape == whole.shape or self._stays_whole(whole, first):
            return part
        use = self.weights[whole.name]
        count = part.shape[0].constant
        name = f"{whole.name}[{first}:{first + count}]"
        self.weights[name] = use.model_copy(
            update={"name": name, "shape": (count, *use.shape[1:]), "source": whole.name, "first": first}
        )
        return part.model_copy(update={"name": name, "offset": Affine()})

    def _stays_whole(self, weight: Operand, first: int) -> bool:
        """Returns True if ranks load all rows of a weight: some step needs it whole, or row ``first`` isn't aligned."""
        use = self.weights[weight.name]
        bytes_of_row = stored_bytes(use.dtype, math.prod(use.shape[1:]))
        return use.layout == "rows" and (use.name in self.whole or first * bytes_of_row % ALIGNMENT != 0)

    def _piece_of_experts(self, step: Step, lo: int, hi: int) -> Step:
        at = 1 if step.op == "grouped_linear" else 3
        inputs = list(step.inputs)
        inputs[at] = part_of(inputs[at], 0, lo, hi + 1)
        for i in range(at + 1, len(inputs)):
            inputs[i] = self._rows_of_weight(part_of(inputs[i], 0, lo, hi), lo, inputs[i])
        return with_operands(step, inputs, step.outputs)

    def index_columns(self, operand: Operand, cut: Slice, lo: int, hi: int) -> tuple[int, int]:
        """Returns the columns (first, end) of an operand that belong to the indices ``lo`` to ``hi`` - 1 of an axis.

        A column is the number of an element in a row of the operand, from 0 on. ``end`` is exclusive.

        Args:
            operand: an output [M, ...] of the step that is cut along the axis.
            cut: the dimension of the operand that the axis divides, and the number of its elements for each index.
            lo, hi: the first index, and the index after the last one. It may exceed the axis: the columns end with the
                row.
        """
        unit = columns_of_index(operand, cut)
        return lo * unit, min(hi * unit, width_of(operand))
