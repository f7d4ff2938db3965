"""One lowered program becomes one for each rank: tensor and pipeline parallelism that keep every bit.

Tensor parallelism. Each rank computes some of the heads, channels and columns that a step gives, and all of K of each:
no sum is cut, so its numbers are those of the whole program. Where later steps read columns of other ranks there is an
``all_gather`` (Shoeybi et al., Megatron-LM, 2019, has sums over ranks there instead, which depend on how many there
are).

Operands keep the places that they have in the whole program: a rank's step is the same step on views of some columns.
So what is gathered lies in one buffer that all ranks of a machine share, in which each writes its own columns, and
gathering is waiting for the others. All other buffers are a rank's own.

From the last step to the first it is asked which columns each rank needs of what a step gives:

    o_proj's result   all columns, on all ranks (a norm sums over them)   each rank computes its share, then all gather
    attention         the heads that this rank's quantization reads       each rank computes those heads
    q, k and v        of these heads                                      two or three ranges of one weight's rows
    the norm before   all columns                                         each rank computes them for itself

What isn't understood is computed by every rank, which is right, if slower.

Pipeline parallelism (Huang et al., GPipe, 2018). The steps are cut into stages, one behind the other, where least is
handed on, and so that each stage reads about as many bytes of weights. A stage has one rank, or ``tensor`` of them. The
last stage has rank 0, which samples; the first one has the last ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..shared.arena import ALIGNMENT, plan_arena, plan_region
from ..shared.contracts import CacheGroup
from ..shared.dtypes import stored_bytes
from ..shared.errors import RequestError
from ..shared.hidden_taps import add_taps
from ..shared.lowered_program import Affine, Buffer, LoweredProgram, Operand, Step
from ..shared.panel_layouts import PANEL
from ..shared.records import Record
from ..shared.step_costs import StepSizes, step_costs

Ranges = tuple[tuple[int, int], ...]
"""Ascending pieces of 0 .. n-1, each from its first to behind its last."""

MOST_RANKS = 64


class Partition(Record, frozen=True, kw_only=True):
    """How a model is cut.

    Attributes:
        tensor: ranks that compute each layer together.
        pipeline: stages of layers, one behind the other.
        ring: ranks that compute each layer together, as with ``tensor``, and divide keys and values by ranges of a
            request's tokens, not by heads.
    """

    tensor: int = 1
    pipeline: int = 1
    ring: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.tensor * self.pipeline * self.ring

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Reads ``tensor=2``, or a number of ranks. Raises RequestError."""
        if text.strip().isdigit():
            text = f"tensor={text}"
        values: dict[str, int] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in cls.__struct_fields__ or not value.strip().isdigit() or name in values:
                known = ", ".join(f"{name}=N" for name in cls.__struct_fields__)
                raise RequestError(f"partition: {part.strip()!r} isn't understood", hint=f"Write {known}.")
            values[name] = int(value)
        found = cls(**values)
        if not all(values.values()) or found.ranks > MOST_RANKS:
            raise RequestError(f"partition: {text!r} is out of range", hint=f"There are 1 to {MOST_RANKS} ranks.")
        return found

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return ",".join(f"{name}={value}" for name, value in values.items() if value > 1) or "tensor=1"


def partition(program: LoweredProgram, how: Partition) -> tuple[LoweredProgram, ...]:
    """Cuts a lowered program, of whatever target, into one for each rank, with memory planned.

    The logits are whole on rank 0 alone. Block tables and slots are the same on every rank; a cache group has
    the heads of its rank.

    With ``ring`` a rank keeps all heads of the blocks with ``block % ring == rank``. Whoever hands out blocks sees to
    it that all of a split of 512 tokens have one owner.

    Raises RequestError if there are more ranks than query heads, more stages than layers, heads that can't be cut, or
    ``ring`` together with another way.
    """
    if how.ranks == 1:
        return (program,)
    if 1 < how.ring < how.ranks:
        raise RequestError(
            f"partition: {how}: ring doesn't go together with another way to cut a model",
            hint=f"Use ring={how.ranks}, which cuts weights as tensor={how.ranks} does.",
        )
    stages = _stages(_renamed(program), how.pipeline)
    found: list[LoweredProgram] = []
    for index in reversed(range(how.pipeline)):
        ranks = _Neighbours(index, how.pipeline, how.tensor * how.ring)
        found += _Cut(stages[index], ranks, by_keys=how.ring > 1).programs()
    for link in range(how.pipeline - 1):
        found = list(plan_region(found, how.pipeline + 1 + link))
    planned = (plan_arena(_narrowed(_told_who_sends(one, found))) for one in found)
    return tuple(map(add_taps, planned))


def _narrowed(program: LoweredProgram) -> LoweredProgram:
    """A rank's own buffers without the columns that it never touches."""
    views: dict[str, list[Operand]] = {}
    for operand in (o for step in program.steps for o in (*step.inputs, *step.outputs)):
        if operand.kind == "buffer":
            views.setdefault(operand.name, []).append(operand)
    whole = {b.name for b in program.buffers if b.region} | {o.name for o in program.outputs.values()}
    places = {
        name: found for name, of in views.items() if name not in whole and (found := _columns_in_use(of)) is not None
    }

    def moved(operand: Operand) -> Operand:
        found = places.get(operand.name) if operand.kind == "buffer" else None
        if found is None:
            return operand
        offset = next(at + operand.offset.constant - lo for (lo, hi), at in found if lo <= operand.offset.constant < hi)
        strides = (Affine(_width_of(found)), *operand.strides[1:])
        return operand.model_copy(update={"offset": Affine(offset), "strides": strides})

    def size(buffer: Buffer) -> Buffer:
        if buffer.name not in places:
            return buffer
        view = views[buffer.name][0]
        row = stored_bytes(view.dtype, _width_of(places[buffer.name]))
        return buffer.model_copy(update={"size": view.shape[0] * row})

    steps = tuple(_with(step, map(moved, step.inputs), map(moved, step.outputs)) for step in program.steps)
    return program.model_copy(update={"steps": steps, "buffers": tuple(map(size, program.buffers))})


_Places = tuple[tuple[tuple[int, int], int], ...]
"""Ranges of a row's columns, and where each begins once the others are gone."""


def _width_of(places: _Places) -> int:
    return sum(hi - lo for (lo, hi), _ in places)


def _columns_in_use(views: Sequence[Operand]) -> _Places | None:
    """What views of a buffer touch of its rows; None if that is all, or they aren't some columns of the same rows."""
    like = views[0]
    if len({(v.dtype, v.shape[:1], v.strides[:1]) for v in views}) > 1 or like.rank < 2:
        return None
    ranges = []
    for view in views:
        inner = list(zip(view.shape[1:], view.strides[1:], strict=True))
        numbers = [view.offset, *view.strides, *view.shape[1:]]
        if not all(n.is_constant for n in numbers) or view.strides[-1].constant != 1:
            return None
        past = view.offset.constant + 1 + sum((n.constant - 1) * stride.constant for n, stride in inner)
        if view.offset.constant < 0 or past > like.strides[0].constant:
            return None
        ranges.append((view.offset.constant, past))
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if merged and lo <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(hi, merged[-1][1])
        else:
            merged.append((lo, hi))
    widths = [hi - lo for lo, hi in merged]
    if sum(widths) >= like.strides[0].constant or any(stored_bytes(like.dtype, n) % ALIGNMENT for n in widths):
        return None
    return tuple(zip(merged, itertools.accumulate(widths, initial=0), strict=False))


def _told_who_sends(program: LoweredProgram, programs: Sequence[LoweredProgram]) -> LoweredProgram:
    """Puts into a rank's ``receive`` which columns each rank of the stage before sends."""
    step = program.steps[0]
    if step.op != "receive":
        return program
    first = int(step.attrs["first"])
    senders = programs[first : first + int(step.attrs["ranks"])]
    sent = zip(*(one.steps[-1].outputs for one in senders), strict=True)
    lists = [[0, *(o.offset.constant + o.shape[1].constant for o in operands)] for operands in sent]
    attrs = {**step.attrs, "cuts": ";".join(",".join(map(str, cuts)) for cuts in lists)}
    return program.model_copy(update={"steps": (step.model_copy(update={"attrs": attrs}), *program.steps[1:])})


@dataclass(frozen=True)
class _Neighbours:
    """One stage's place among the ranks."""

    stage: int
    stages: int
    count: int

    @property
    def first(self) -> int:
        """Its first rank."""
        return (self.stages - 1 - self.stage) * self.count

    @property
    def region(self) -> int:
        """What its ranks share."""
        return 1 + self.stage


@dataclass(frozen=True)
class _Stage:
    """The steps of one stage, what it gets from the one before, and what it hands on."""

    program: LoweredProgram
    received: tuple[Operand, ...] = ()
    sent: tuple[Operand, ...] = ()


def _stages(program: LoweredProgram, count: int) -> list[_Stage]:
    """Cuts the steps where the stages are even and hand on as little as possible. Raises RequestError."""
    if count == 1:
        return [_Stage(program)]
    flow = _Flow(program)
    cuts = [0, *_stage_cuts(program, flow, count), len(program.steps)]
    stages: list[_Stage] = []
    received: tuple[Operand, ...] = ()
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        steps = (*(program.steps[i] for i in flow.again(begin)), *program.steps[begin:end])
        last = number + 1 == count
        sent = () if last else tuple(_as_rows(name, program, flow.rows) for name in flow.handed_on(end))
        outputs = program.outputs if last else {}
        groups = _groups_of(program, steps)
        part = program.model_copy(update={"steps": steps, "outputs": outputs, "cache_groups": groups})
        stages.append(_Stage(part, received, sent))
        received = sent
    return stages


def _groups_of(program: LoweredProgram, steps: Sequence[Step]) -> tuple[CacheGroup, ...]:
    """All cache groups, with the layers that these steps have."""
    used = {o.name for step in steps for o in step.inputs if o.kind == "cache"}
    return tuple(
        g.model_copy(update={"layers": tuple(layer for layer in g.layers if f"{g.name}/{layer}" in used)})
        for g in program.cache_groups
    )


_CHEAP = frozenset({"rope_table", "elementwise", "copy", "reduce"})
_MOST_HANDED_ON = 8  # times the least that any cut hands on
_BYTES_COUNT = 0.05  # as much more to hand on as the least counts as being so far off, as a part of a stage's weights


class _Flow:
    """From which step to which one a program's buffers are needed."""

    def __init__(self, program: LoweredProgram) -> None:
        self.program = program
        self.rows = _row_sizes(program)
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
        found = [
            name
            for name, (first, _) in self.written.items()
            if first < at <= self.read.get(name, -1) and name not in self.cheap
        ]
        return sorted(found, key=lambda name: (not self.sizes[name].t, name))  # what every step has comes first

    def may_cut(self, names: Iterable[str], at: int) -> bool:
        """Whether these are rows that nobody writes from ``at`` on."""
        return all(self.rows[name] is not None and self.written[name][1] < at for name in names)

    def again(self, at: int) -> list[int]:
        """The steps before ``at`` whose results are needed from there on and depend on step inputs alone, such as a
        table of rotations."""
        needed = {o.name for step in self.program.steps[at:] for o in step.inputs if o.name in self.cheap}
        found = []
        for index in reversed(range(at)):
            step = self.program.steps[index]
            if any(o.name in needed for o in step.outputs):
                found.append(index)
                needed.update(o.name for o in step.inputs if o.kind == "buffer")
        return found[::-1]


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
        wanted = before[-1] * number / count
        later = count - 1 - number
        left = [at for at in places if not cuts or at > cuts[-1]]
        left = left[: len(left) - later]
        cuts.append(
            min(left, key=lambda at: count * abs(before[at] - wanted) / before[-1] + handed[at] / least * _BYTES_COUNT)
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


@dataclass(frozen=True)
class _Slice:
    """Which part of an operand goes with the indices ``lo .. hi-1`` of a step's axis: ``scale`` elements along
    dimension ``dim`` for each index."""

    dim: int
    scale: int = 1


@dataclass(frozen=True)
class _Axis:
    """Along what a step may be cut.

    Attributes:
        count: indices along it.
        inputs, outputs: for each operand; None is needed whole.
        unit: indices that are computed together, as weights are stored in panels.
    """

    count: int
    inputs: tuple[_Slice | None, ...]
    outputs: tuple[_Slice | None, ...]
    unit: int = 1


@dataclass(frozen=True)
class _Share:
    """How the columns of a buffer may be cut: at ``cuts``, or, if there are none, at multiples of ``grain``."""

    grain: int
    cuts: tuple[int, ...] = ()


@dataclass
class _Plan:
    """What ranks do of one step: the axis's ranges of each rank, and whether they gather afterwards.

    Attributes:
        to: the rank that alone needs what is gathered; -1: all do.
    """

    ranges: list[Ranges]
    gather: bool = False
    to: int = -1
    experts: tuple[int, ...] = ()


@dataclass
class _Heads:
    """Query heads, and the key/value heads that they read, by rank."""

    group: int
    query: tuple[int, ...]
    key_value: tuple[tuple[int, int], ...]


_LINEAR = frozenset({"linear", "quantized_linear"})
_GROUPED = frozenset({"grouped_linear", "quantized_grouped_linear"})
_NORMS = frozenset({"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"})
_FOLLOWS = frozenset({"gated_activation", "quantize_activation", "cast_bf16", "take_rows", "elementwise", "copy"})
"""Ops that are cut where what they read is: their work isn't done twice, and what they give is gathered instead."""

_BY_ROW = frozenset({"gated_activation", "quantize_activation", "cast_bf16", "elementwise", "copy"})
"""Ops whose rows depend on the same rows alone."""


class _Cut:
    """The work of ``partition``, for the ranks of one program."""

    def __init__(self, stage: _Stage, place: _Neighbours, *, by_keys: bool) -> None:
        self.stage, self.place, self.ranks, self.by_keys = stage, place, place.count, by_keys
        program = self.program = stage.program
        self.weights = {use.name: use for use in program.weights}
        self.sizes = {b.name: b.size for b in self.program.buffers}
        self.groups = {g.name: g for g in program.cache_groups}
        self.rows = _row_sizes(self.program)
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

    def programs(self) -> tuple[LoweredProgram, ...]:
        made = self._made(1)
        if any(self._lacks_results(program) for program in made):  # each rank computes them whole
            made = self._made(self.ranks)
        return plan_region(made, self.place.region)

    def _made(self, asking: int) -> list[LoweredProgram]:
        """The programs if so many of the first ranks need the logits."""
        plans = self._ask(asking)
        return [_Made(self, plans, rank).program() for rank in range(self.ranks)]

    @staticmethod
    def _lacks_results(program: LoweredProgram) -> bool:
        written = {o.name for step in program.steps for o in step.outputs}
        return any(o.kind == "buffer" and o.name not in written for o in program.outputs.values())

    # Heads

    def _cut_heads(self) -> dict[str, _Heads]:
        """Cuts query heads, by the cache operand's name. Layers of a cache group have the same key/value heads on a
        rank."""
        found: dict[str, _Heads] = {}
        of_group: dict[str, tuple[tuple[int, int], ...]] = {}
        for step in self.program.steps:
            if step.op != "paged_attention":
                continue
            cache = step.inputs[1].name
            name = cache.rpartition("/")[0]
            have, queries = self.groups[name].planes[0].heads, step.inputs[0].shape[1].constant
            group = queries // have
            if queries < self.ranks:
                raise RequestError(
                    f"ranks: {self.ranks} are more than the {queries} query heads of {step.where}",
                    hint=f"Use {queries} or fewer.",
                )
            whole = have % self.ranks == 0
            if step.attrs.get("best_blocks") and (self.by_keys or not whole):
                raise RequestError(
                    f"partition: with [adaptive_context] the query heads of a key/value head choose together what they "
                    f"look at, and {self.ranks} ranks don't divide the {have} key/value heads of {step.where}",
                    hint="Use tensor=N with an N that divides them, or pipeline=N.",
                )
            cuts = tuple(
                (have * r // self.ranks) * group if whole else queries * r // self.ranks for r in range(self.ranks + 1)
            )
            key_value = tuple((0, have) if self.by_keys else (a // group, -(-b // group)) for a, b in _pairs(cuts))
            if of_group.setdefault(name, key_value) != key_value:
                raise RequestError(
                    f"ranks: layers of cache group {name} have different numbers of query heads",
                    hint=f"Use a number of ranks that divides {have}.",
                )
            found[cache] = _Heads(group, cuts, key_value)
        return found

    # Along what steps can be cut

    def _axis(self, step: Step) -> _Axis | None:
        if any(o.kind == "buffer" and self.rows[o.name] is None for o in step.outputs):
            return None
        if step.op in _LINEAR:
            return self._axis_of_linear(step)
        if step.op == "gated_activation" and step.inputs[0].rank == 2 and len(step.inputs) == 1:
            # Made two inputs, gate and up, before it is cut: see _Made.
            return _Axis(step.outputs[0].shape[-1].constant, (_Slice(1), _Slice(1)), (_Slice(1),))
        if step.op == "quantize_activation":
            group, size = step.attrs["group_size"], step.inputs[0].shape[-1].constant
            if not isinstance(group, int) or not 0 < group < size or step.inputs[0].rank != 2:
                return None
            return _Axis(-(-size // group), (_Slice(1, group),), (_Slice(1, group), _Slice(1), _Slice(1)))
        if step.op == "cast_bf16":
            size = step.inputs[0].shape[-1].constant
            return _Axis(size // 2, (_Slice(1, 2),), (_Slice(1, 2),)) if size % 2 == 0 else None
        if step.op == "take_rows":
            if step.outputs[0].rank < 2:
                return None
            return _Axis(step.outputs[0].shape[1].constant, (_Slice(1), None), (_Slice(1),))
        if step.op in _NORMS and step.inputs[0].rank == 3:
            whole = sum(o.rank == 3 for o in step.inputs)
            return self._by_heads(step, whole)
        if step.op == "rope":
            return self._by_heads(step, 1)
        if step.op == "reduce" and step.inputs[0].rank == 3:
            return self._by_heads(step, 1)
        if step.op in ("elementwise", "copy"):
            return self._axis_of_elements(step)
        if step.op == "paged_attention":
            count = step.inputs[0].shape[1].constant
            if self.by_keys:  # a rank attends with all queries to its keys, and gives some of the heads
                return _Axis(count, (None,) * len(step.inputs), (_Slice(1),))
            vectors = (_Slice(0),) * (len(step.inputs) - 5)
            return _Axis(count, (_Slice(1), None, None, None, None, *vectors), (_Slice(1),))
        if step.op == "rope_kv_write":  # of queries; keys and values are a rank's own: see _Made
            return _Axis(step.inputs[0].shape[1].constant, (_Slice(1), *(None,) * 5), (_Slice(1),))
        return None

    def _axis_of_linear(self, step: Step) -> _Axis | None:
        size = step.outputs[0].shape[-1].constant
        inputs: list[_Slice | None] = []
        for i, operand in enumerate(step.inputs):
            residual = bool(step.attrs.get("has_residual")) and i + 1 == len(step.inputs)
            if operand.kind == "weight" and operand.shape and operand.shape[0] == size and not residual:
                inputs.append(_Slice(0))
            else:
                inputs.append(_Slice(1) if residual else None)
        return _Axis(size, tuple(inputs), (_Slice(1),), PANEL)

    @staticmethod
    def _by_heads(step: Step, inputs: int) -> _Axis | None:
        count = step.outputs[0].shape[1].constant
        if any(o.rank != 3 or o.shape[1] != count for o in step.outputs):
            return None
        if any(o.rank != 3 or o.shape[1] != count for o in step.inputs[:inputs]):
            return None
        given = (*(_Slice(1),) * inputs, *(None,) * (len(step.inputs) - inputs))
        return _Axis(count, given, (_Slice(1),) * len(step.outputs))

    @staticmethod
    def _axis_of_elements(step: Step) -> _Axis | None:
        out = step.outputs[0]
        if out.rank < 2 or not out.shape[1].is_constant:
            return None
        inputs: list[_Slice | None] = []
        for operand in step.inputs:
            dim = operand.rank - (out.rank - 1)
            repeated = dim < 0 or operand.shape[dim] != out.shape[1]
            inputs.append(None if repeated else _Slice(dim))
        return _Axis(out.shape[1].constant, tuple(inputs), (_Slice(1),))

    def _read_whole(self) -> frozenset[str]:
        """The weights that some step isn't cut along, such as a table of embeddings that is the head's, too."""
        found: set[str] = set()
        for step, axis in zip(self.program.steps, self.axes, strict=True):
            if step.op not in _GROUPED:
                cuts = axis.inputs if axis is not None else (None,) * len(step.inputs)
                weights = zip(step.inputs, cuts, strict=False)  # a gated activation is given two inputs for its one
                found.update(o.name for o, cut in weights if o.kind == "weight" and cut is None)
        return frozenset(found)

    def _is_whole(self, operand: Operand) -> bool:
        """Whether a view has every element of its buffer's rows, in their order."""
        size = self.rows.get(operand.name) if operand.kind == "buffer" else None
        return size is not None and self._columns(operand) == ((0, size),) and _is_dense(operand)

    # Where what is cut stays cut

    def _follow(self) -> dict[str, _Share]:
        """How buffers are cut of which each rank computes a share: products, attention, and what follows them."""
        shares: dict[str, _Share] = {}
        for step, axis in zip(self.program.steps, self.axes, strict=True):
            if axis is None or not all(self._is_whole(o) for o in step.outputs):
                continue
            if step.op in _LINEAR:
                found: _Share | None = _Share(PANEL)
            elif step.op == "paged_attention":
                size = step.outputs[0].shape[2].constant
                found = _Share(1, tuple(h * size for h in self.heads[step.inputs[1].name].query))
            elif step.op in _FOLLOWS:
                found = self._followed(step, axis, shares)
            else:
                found = None
            if found is None:
                continue
            own = self._index_cuts(step, axis, found)
            first = axis.outputs[0]
            assert first is not None
            for operand, cut in zip(step.outputs, axis.outputs, strict=True):
                width = self.rows[operand.name]
                assert cut is not None and width is not None
                if own is not None:
                    columns = _columns_of_index(operand, cut)
                    cuts = tuple(min(i * columns, width) for i in own) if found.cuts else ()
                    grain = max(1, found.grain * columns // _columns_of_index(step.outputs[0], first))
                    shares[operand.name] = _Share(grain, cuts)
        return shares

    def _followed(self, step: Step, axis: _Axis, shares: Mapping[str, _Share]) -> _Share | None:
        """The cut of what a step gives, in columns of its first output, if what it reads is cut for it alone."""
        grain, cuts = 1, set()
        from_share = False
        for operand, cut in zip(step.inputs, axis.inputs, strict=False):
            share = shares.get(operand.name) if operand.kind == "buffer" else None
            if share is None or cut is None or self.readers[operand.name] != 1 or not self._is_whole(operand):
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
        return _Share(grain, cuts.pop() if cuts else ())

    def _index_cuts(self, step: Step, axis: _Axis, share: _Share) -> tuple[int, ...] | None:
        """Where the axis is cut so that the first output has that share; None if it can't be."""
        cut = axis.outputs[0]
        assert cut is not None
        unit = _columns_of_index(step.outputs[0], cut)
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

    def _ask(self, asking: int) -> list[_Plan]:
        """Goes from the last step to the first. Needs are columns of buffers' rows."""
        needs: list[dict[str, Ranges]] = [{} for _ in range(self.ranks)]
        for operand in self.program.outputs.values():
            for need in needs[:asking]:
                self._need(need, operand)
        for operand in self.stage.sent:
            for need, (lo, hi) in zip(needs, self.sent_columns(operand), strict=True):
                self._need(need, _cut(operand, 1, lo, hi))
        all_rows = self._rows_of_all()
        plans: list[_Plan] = []
        for index in reversed(range(len(self.program.steps))):
            step, axis = self.program.steps[index], self.axes[index]
            plan = self._plan(step, axis, needs, all_rows)
            plans.append(plan)
            for rank, ranges in enumerate(plan.ranges):
                for lo, hi in self._computed(step, axis, ranges):
                    for operand in self.piece(step, axis, lo, hi, rank, plan).inputs:
                        self._need(needs[rank], operand)
        return plans[::-1]

    def sent_columns(self, operand: Operand) -> list[tuple[int, int]]:
        """The columns of what is handed on that each rank sends: those that it computes, if it doesn't compute all."""
        share = self.shares.get(operand.name, _Share(1))
        if share.cuts:
            return _pairs(share.cuts)
        size = operand.shape[1].constant
        pieces = -(-size // share.grain)
        cuts = [min(pieces * r // self.ranks * share.grain, size) for r in range(self.ranks + 1)]
        return _pairs(cuts)

    def _plan(
        self, step: Step, axis: _Axis | None, needs: Sequence[Mapping[str, Ranges]], all_rows: frozenset[str]
    ) -> _Plan:
        if step.op in _GROUPED:
            return self._plan_of_experts(step, needs, all_rows)
        if step.op == "kv_write":
            return _Plan([((0, 1),)] * self.ranks)
        wanted = [self._wanted(step, axis, need) for need in needs]
        if axis is None or (self.ranks == 1 and step.op not in ("paged_attention", "rope_kv_write")):
            return _Plan(wanted)
        whole = [ranges == ((0, axis.count),) for ranges in wanted]
        to = 0 if whole[0] and not any(wanted[1:]) else -1
        if step.op == "rope_kv_write" and self.by_keys:
            return _Plan([((0, axis.count),)] * self.ranks)
        if step.op in ("paged_attention", "rope_kv_write"):
            cuts = self.heads[step.inputs[1 if step.op == "paged_attention" else 5].name].query
            own: list[Ranges] = [((lo, hi),) for lo, hi in _pairs(cuts)]
            more = any(_less(ranges, mine) for ranges, mine in zip(wanted, own, strict=True))
            return _Plan(own, more, to)
        share = self.shares.get(step.outputs[0].name)
        cuts_or_none = self._index_cuts(step, axis, share) if share is not None else None
        if cuts_or_none is None or not any(whole):
            return _Plan(wanted)
        return _Plan([((lo, hi),) for lo, hi in _pairs(cuts_or_none)], True, to)

    def _wanted(self, step: Step, axis: _Axis | None, need: Mapping[str, Ranges]) -> Ranges:
        """The indices of a step's axis that a rank needs, of all outputs; without an axis, the whole or nothing."""
        found: list[tuple[int, int]] = []
        for i, operand in enumerate(step.outputs):
            columns = need.get(operand.name, ())
            if axis is None:
                found += [(0, 1)] * bool(_both(columns, self._columns(operand)))
            elif (cut := axis.outputs[i]) is not None:
                found += _touched(operand, cut, axis.count, columns)
        return _union(found)

    def _need(self, need: dict[str, Ranges], operand: Operand) -> None:
        if operand.kind == "buffer":
            need[operand.name] = _union([*need.get(operand.name, ()), *self._columns(operand)])

    def _columns(self, operand: Operand) -> Ranges:
        """The columns of its buffer's rows that a view touches, and maybe those between; (0, 1) of other buffers."""
        if self.rows.get(operand.name) is None:
            return ((0, 1),)
        return _columns(operand)

    def _computed(self, step: Step, axis: _Axis | None, ranges: Ranges) -> Ranges:
        """The ranges that a rank computes so that it has those: whole panels of weights."""
        if axis is None or axis.unit == 1:
            return ranges
        unit = axis.unit
        return _union((lo // unit * unit, min(-(-hi // unit) * unit, axis.count)) for lo, hi in ranges)

    # Experts

    def _rows_of_all(self) -> frozenset[str]:
        """The buffers of which a rank needs the rows of others' experts too."""
        found: set[str] = set()
        for step in reversed(self.program.steps):
            rows_alone = step.op in _GROUPED or (
                step.op in _BY_ROW and _by_row(step) and not any(o.name in found for o in step.outputs)
            )
            names = [o.name for o in step.inputs if o.kind == "buffer"]
            found.update(() if rows_alone else names)
        found.update(o.name for o in self.program.outputs.values())
        return frozenset(found)

    def _plan_of_experts(self, step: Step, needs: Sequence[Mapping[str, Ranges]], all_rows: frozenset[str]) -> _Plan:
        starts = step.inputs[1 if step.op == "grouped_linear" else 3]
        experts = starts.shape[0].constant - 1
        wanted: list[Ranges] = [((0, 1),) if need.get(step.outputs[0].name) else () for need in needs]
        if experts < self.ranks or self.ranks == 1:
            return _Plan(wanted)
        cuts = expert_cuts(experts, self.ranks)
        return _Plan([((0, 1),)] * self.ranks, step.outputs[0].name in all_rows, -1, cuts)

    # Pieces of steps

    def piece(self, step: Step, axis: _Axis | None, lo: int, hi: int, rank: int, plan: _Plan) -> Step:
        """The step that computes ``lo .. hi-1`` of its axis, its weights being parts of the whole program's."""
        if plan.experts:
            return self._piece_of_experts(step, plan.experts[rank], plan.experts[rank + 1])
        if step.op == "kv_write":
            heads = self._heads_of(step.inputs[3]).key_value[rank]
            step = step.model_copy(update={"attrs": {**step.attrs, **self._keys_of(rank)}})
            return _with(step, [_cut(o, 1, *heads) for o in step.inputs[:2]] + list(step.inputs[2:]), step.outputs)
        if axis is None:
            return step
        op, inputs = step.op, list(step.inputs)
        attrs = dict(step.attrs)
        if step.op == "gated_activation":
            both = inputs[0]
            inputs = [_cut(both, both.rank - 1, 0, axis.count), _cut(both, both.rank - 1, axis.count, 2 * axis.count)]
        elif step.op == "rope_kv_write":
            heads = self._heads_of(step.inputs[5]).key_value[rank]
            inputs[1:3] = [_cut(o, 1, *heads) for o in inputs[1:3]]
            attrs |= self._keys_of(rank)
        elif step.op == "paged_attention" and self.by_keys:
            op = "ring_attention"
            attrs |= {"first_head": lo, **self._keys_of(rank)}
        elif step.op == "paged_attention":
            own = self._heads_of(step.inputs[1])
            attrs |= {"group": own.group, "first_head": lo - own.key_value[rank][0] * own.group}
        inputs = [self._part(o, cut, lo, hi) for o, cut in zip(inputs, axis.inputs, strict=True)]
        outputs = [self._part(o, cut, lo, hi) for o, cut in zip(step.outputs, axis.outputs, strict=True)]
        return Step(op=op, inputs=tuple(inputs), outputs=tuple(outputs), attrs=attrs, where=step.where)

    def _keys_of(self, rank: int) -> dict[str, int]:
        """Attributes that say which blocks a rank has, where it doesn't have all."""
        return {"ranks": self.ranks, "rank": rank} if self.by_keys else {}

    def _heads_of(self, cache: Operand) -> _Heads:
        found = self.heads.get(cache.name)
        if found is None:  # written and never read
            have = self.groups[cache.name.rpartition("/")[0]].planes[0].heads
            found = _Heads(1, (0,) * (self.ranks + 1), ((0, have),) * self.ranks)
        return found

    def _part(self, operand: Operand, cut: _Slice | None, lo: int, hi: int) -> Operand:
        if cut is None:
            return operand
        end = min(hi * cut.scale, operand.shape[cut.dim].constant)
        return self._rows_of_weight(_cut(operand, cut.dim, lo * cut.scale, end), lo, operand)

    def _rows_of_weight(self, part: Operand, first: int, whole: Operand) -> Operand:
        """A weight is named by its part, so that a rank has that alone. Of rows it may stay a view of the whole."""
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
        """Whether ranks have all rows of a weight: where each reads them all, or kernels can't read from ``first``."""
        use = self.weights[weight.name]
        bytes_of_row = stored_bytes(use.dtype, math.prod(use.shape[1:]))
        return use.layout == "rows" and (use.name in self.whole or first * bytes_of_row % ALIGNMENT != 0)

    def _piece_of_experts(self, step: Step, lo: int, hi: int) -> Step:
        at = 1 if step.op == "grouped_linear" else 3
        inputs = list(step.inputs)
        inputs[at] = _cut(inputs[at], 0, lo, hi + 1)
        for i in range(at + 1, len(inputs)):
            inputs[i] = self._rows_of_weight(_cut(inputs[i], 0, lo, hi), lo, inputs[i])
        return _with(step, inputs, step.outputs)

    def index_columns(self, operand: Operand, cut: _Slice, lo: int, hi: int) -> tuple[int, int]:
        """The columns of a view, counted from its first, that go with some indices."""
        unit = _columns_of_index(operand, cut)
        return lo * unit, min(hi * unit, _width(operand))


@dataclass
class _Made:
    """The program of one rank, made step by step."""

    cut: _Cut
    plans: Sequence[_Plan]
    rank: int
    steps: list[Step] = field(default_factory=list)
    shared: dict[str, Buffer] = field(default_factory=dict)

    def program(self) -> LoweredProgram:
        whole = self.cut.program
        self._receive()
        for step, axis, plan in zip(whole.steps, self.cut.axes, self.plans, strict=True):
            self._add(step, axis, plan)
        self._send()
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

    def _receive(self) -> None:
        """Takes what the stage before hands on, into buffers of the rank's own."""
        place = self.cut.place
        if not self.cut.stage.received:
            return
        given = [self._link(operand, place.stage - 1) for operand in self.cut.stage.received]
        attrs: dict[str, Any] = {"first": place.first + place.count, "ranks": place.count}
        self.steps.append(
            Step(op="receive", inputs=tuple(given), outputs=self.cut.stage.received, attrs=attrs, where="pipeline")
        )

    def _send(self) -> None:
        place = self.cut.place
        if not self.cut.stage.sent:
            return
        given, to = [], []
        for operand in self.cut.stage.sent:
            columns = self.cut.sent_columns(operand)[self.rank]
            given.append(_cut(operand, 1, *columns))
            to.append(_cut(self._link(operand, place.stage), 1, *columns))
        attrs: dict[str, Any] = {"first": place.first - place.count, "ranks": place.count}
        self.steps.append(Step(op="send", inputs=tuple(given), outputs=tuple(to), attrs=attrs, where="pipeline"))

    def _link(self, operand: Operand, stage: int) -> Operand:
        """Where a value lies between that stage and the next."""
        name = f"{operand.name}.sent.{stage}"
        size = next(b.size for b in self.cut.program.buffers if b.name == operand.name)
        self.shared[name] = Buffer(name=name, size=size, region=self.cut.place.stages + 1 + stage)
        return operand.model_copy(update={"name": name})

    def _add(self, step: Step, axis: _Axis | None, plan: _Plan) -> None:
        moved = {o.name: self._moved(o) for o in step.outputs} if plan.gather else {}
        aimed = _with(step, step.inputs, [moved.get(o.name, o) for o in step.outputs]) if moved else step
        for lo, hi in self.cut._computed(step, axis, plan.ranges[self.rank]):
            self.steps.append(self.cut.piece(aimed, axis, lo, hi, self.rank, plan))
        if not plan.gather:
            return
        self._gather(aimed, axis, plan)
        for before, after in zip(step.outputs, aimed.outputs, strict=True):
            if before.name != after.name:
                self.steps.append(Step(op="copy", inputs=(after,), outputs=(before,), where=step.where))

    def _moved(self, operand: Operand) -> Operand:
        """Where the output of a step goes that is gathered: a shared buffer, in which nobody else writes."""
        size = self.cut.rows[operand.name]
        alone = self.cut.writers[operand.name] == 1 and size is not None and self.cut._is_whole(operand)
        if alone:
            before = next(b for b in self.cut.program.buffers if b.name == operand.name)
            self.shared[operand.name] = before.model_copy(update={"region": self.cut.place.region, "offset": None})
            return operand
        name = f"{operand.name}.gathered.{operand.offset}"
        bytes_of_row = stored_bytes(operand.dtype, _width(operand))
        self.shared[name] = Buffer(name=name, size=operand.shape[0] * bytes_of_row, region=self.cut.place.region)
        strides = [Affine(1)]
        for length in reversed(operand.shape[1:]):
            strides.insert(0, strides[0] * length)
        return operand.model_copy(update={"name": name, "offset": Affine(), "strides": tuple(strides)})

    def _gather(self, step: Step, axis: _Axis | None, plan: _Plan) -> None:
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
        flat = tuple(map(_flat, step.outputs))
        own = []
        for operand, cuts in zip(flat, lists, strict=True):
            ends = [int(c) for c in cuts.split(",")]
            own.append(_cut(operand, 1, ends[self.rank], ends[self.rank + 1]))
        self.steps.append(Step(op="all_gather", inputs=tuple(own), outputs=flat, attrs=attrs, where=step.where))


def expert_cuts(experts: int, ranks: int) -> tuple[int, ...]:
    """Says with which expert each rank's begin, and where the last one's end. Fewer experts than ranks aren't cut."""
    return tuple(experts * r // ranks for r in range(ranks + 1))


def expert_shares(rows: Sequence[int], ranks: int) -> list[int]:
    """How many of the rows that experts have each rank computes."""
    if len(rows) < ranks:
        return [sum(rows)] * ranks
    return [sum(rows[lo:hi]) for lo, hi in _pairs(expert_cuts(len(rows), ranks))]


def _pairs(cuts: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cuts))


def _with(step: Step, inputs: Iterable[Operand], outputs: Iterable[Operand]) -> Step:
    return step.model_copy(update={"inputs": tuple(inputs), "outputs": tuple(outputs)})


def _cut(operand: Operand, dim: int, lo: int, hi: int) -> Operand:
    """The view of ``lo .. hi-1`` along a dimension."""
    shape = (*operand.shape[:dim], Affine(hi - lo), *operand.shape[dim + 1 :])
    return operand.model_copy(update={"shape": shape, "offset": operand.offset + operand.strides[dim] * lo})


def _flat(operand: Operand) -> Operand:
    """[M, ...] with dense rows as [M, C]."""
    shape, strides = (operand.shape[0], Affine(_width(operand))), (operand.strides[0], Affine(1))
    return operand.model_copy(update={"shape": shape, "strides": strides})


def _width(operand: Operand) -> int:
    """Elements of a row."""
    return math.prod(size.constant for size in operand.shape[1:])


def _is_dense(operand: Operand) -> bool:
    """Whether a row's elements lie one behind the other, in their order."""
    wanted = 1
    for size, stride in zip(reversed(operand.shape[1:]), reversed(operand.strides[1:]), strict=True):
        if size != 1 and stride != wanted:
            return False
        wanted *= size.constant
    return True


def _columns_of_index(operand: Operand, cut: _Slice) -> int:
    """How many elements of a row go with one index."""
    return cut.scale * math.prod(size.constant for size in operand.shape[cut.dim + 1 :])


def _columns(operand: Operand) -> Ranges:
    """The columns that a view [M, ...] touches: exactly along dimension 1, beyond it from the first to the last."""
    offset = operand.offset.constant
    if operand.rank == 1:
        return ((offset, offset + 1),)
    inner = 1 + sum(
        (size.constant - 1) * stride.constant
        for size, stride in zip(operand.shape[2:], operand.strides[2:], strict=True)
    )
    count, step = operand.shape[1].constant, operand.strides[1].constant
    if step <= inner:
        return ((offset, offset + (count - 1) * step + inner),) if count > 0 else ()
    return tuple((offset + i * step, offset + i * step + inner) for i in range(count))


def _touched(operand: Operand, cut: _Slice, count: int, columns: Ranges) -> list[tuple[int, int]]:
    """The indices of an axis whose part of a view has any of these columns."""
    if not columns:
        return []
    part = _columns(_cut(operand, cut.dim, 0, cut.scale))
    width, step = part[-1][1] - part[0][0], operand.strides[cut.dim].constant * cut.scale
    found = []
    for lo, hi in columns:
        # Index i has the columns from offset + i * step on, `width` of them.
        first = -(-(lo - operand.offset.constant - width + 1) // step) if step else 0
        end = -(-(hi - operand.offset.constant) // step) if step else count
        if max(first, 0) < min(end, count):
            found.append((max(first, 0), min(end, count)))
    return found


def _by_row(step: Step) -> bool:
    """Whether rows of what a step reads and gives go together."""
    rows = step.outputs[0].shape[0]
    return all(o.shape[:1] == (rows,) or o.kind == "weight" for o in (*step.inputs, *step.outputs))


def _union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if merged and lo <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(hi, merged[-1][1])
        elif lo < hi:
            merged.append((lo, hi))
    return tuple(merged)


def _both(a: Ranges, b: Ranges) -> bool:
    return any(x < w and z < y for x, y in a for z, w in b)


def _less(wanted: Ranges, own: Ranges) -> bool:
    """Whether something wanted isn't one's own."""
    return _union([*wanted, *own]) != own


def _views(program: LoweredProgram) -> Iterator[Operand]:
    for step in program.steps:
        yield from (o for o in (*step.inputs, *step.outputs) if o.kind == "buffer")
    yield from (o for o in program.outputs.values() if o.kind == "buffer")


def _row_sizes(program: LoweredProgram) -> dict[str, int | None]:
    """Elements of a row of each buffer, of those whose views are all rows of one stride; None for the others."""
    found: dict[str, int | None] = {}
    strides: dict[str, tuple[Affine, Affine]] = {}
    for operand in _views(program):
        name = operand.name
        if found.get(name, 0) is None:
            continue
        constant = all(a.is_constant for a in (*operand.shape[1:], *operand.strides, operand.offset))
        if (
            operand.rank < 2
            or not constant
            or strides.setdefault(name, (operand.shape[0], operand.strides[0]))
            != (
                operand.shape[0],
                operand.strides[0],
            )
        ):
            found[name] = None
            continue
        columns = _columns(operand)
        end = columns[-1][1] if columns else 0
        found[name] = None if end > operand.strides[0].constant else max(end, found.get(name) or 0)
    return found


def _renamed(program: LoweredProgram) -> LoweredProgram:
    """The same program in which no step writes a buffer as a whole that another has written: a step that works in
    place gets a buffer of its own, so that it may be shared."""
    rows = _row_sizes(program)
    sizes = {b.name: b for b in program.buffers}
    current: dict[str, str] = {}
    written: set[str] = set()
    steps: list[Step] = []

    def read(operand: Operand) -> Operand:
        name = current.get(operand.name, operand.name)
        return (
            operand if operand.kind != "buffer" or name == operand.name else operand.model_copy(update={"name": name})
        )

    for index, step in enumerate(program.steps):
        inputs = tuple(map(read, step.inputs))
        for operand in step.outputs:
            size = rows.get(operand.name)
            again = operand.kind == "buffer" and operand.name in written and size is not None
            if again and _columns(operand) == ((0, size),):
                name = f"{operand.name}.{index}"
                current[operand.name] = name
                sizes[name] = sizes[operand.name].model_copy(update={"name": name})
        written.update(o.name for o in step.outputs)
        steps.append(_with(step, inputs, map(read, step.outputs)))
    outputs = {name: read(o) for name, o in program.outputs.items()}
    return program.model_copy(update={"steps": tuple(steps), "outputs": outputs, "buffers": tuple(sizes.values())})
