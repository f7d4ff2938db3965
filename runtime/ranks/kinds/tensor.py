"""Tensor parallelism: each rank computes some heads, channels and columns of each layer, over the whole of K.

No sum is divided, so the numbers are those of the whole program. Where later steps read columns of other ranks, there
is an ``all_gather``. Megatron-LM (Shoeybi et al., 2019) adds partial sums there instead, which depend on the number of
ranks. Caches are divided by heads, and each expert belongs to one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from ...shared.errors import RequestError
from ...shared.lowered_program import Operand, Step
from ...shared.panel_layouts import PANEL
from .base import Arrivals, Axis, Heads, LayerKind, Rule
from .views import Slice, pairs, width_of

LINEAR = frozenset({"linear", "quantized_linear"})
GROUPED = frozenset({"grouped_linear", "quantized_grouped_linear"})
_NORMS = frozenset({"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"})


def _linear(step: Step) -> Axis | None:
    """Returns the axis of a product: its output columns, which are rows of its weight.

    A residual is cut along its columns.
    """
    size = step.outputs[0].shape[-1].constant
    inputs: list[Slice | None] = []
    for i, operand in enumerate(step.inputs):
        residual = bool(step.attrs.get("has_residual")) and i + 1 == len(step.inputs)
        if operand.kind == "weight" and operand.shape and operand.shape[0] == size and not residual:
            inputs.append(Slice(0))
        else:
            inputs.append(Slice(1) if residual else None)
    return Axis(size, tuple(inputs), (Slice(1),), PANEL)


def _gated(step: Step) -> Axis | None:
    """Returns the axis of a gated activation: the columns of gate and up, in separate operands, and of the output.

    Returns None if one row isn't a dimension. ``LayerCut.piece`` splits the input that has both into two operands.
    """
    if step.inputs[0].rank != 2 or len(step.inputs) != 1:
        return None
    return Axis(step.outputs[0].shape[-1].constant, (Slice(1), Slice(1)), (Slice(1),))


def _quantized(step: Step) -> Axis | None:
    group, size = step.attrs["group_size"], step.inputs[0].shape[-1].constant
    if not isinstance(group, int) or not 0 < group < size or step.inputs[0].rank != 2:
        return None
    return Axis(-(-size // group), (Slice(1, group),), (Slice(1, group), Slice(1), Slice(1)))


def _bf16(step: Step) -> Axis | None:
    size = step.inputs[0].shape[-1].constant
    return Axis(size // 2, (Slice(1, 2),), (Slice(1, 2),)) if size % 2 == 0 else None


def _rows(step: Step) -> Axis | None:
    if step.outputs[0].rank < 2:
        return None
    return Axis(step.outputs[0].shape[1].constant, (Slice(1), None), (Slice(1),))


def _by_heads(step: Step, inputs: int) -> Axis | None:
    """Returns the axis of a step on [M, heads, size]: its heads.

    ``inputs``: the number of inputs, from the first on, that are cut; a rank needs the others whole. Returns None if
    the outputs or these inputs have another shape.
    """
    count = step.outputs[0].shape[1].constant
    if any(o.rank != 3 or o.shape[1] != count for o in step.outputs):
        return None
    if any(o.rank != 3 or o.shape[1] != count for o in step.inputs[:inputs]):
        return None
    slices = (*(Slice(1),) * inputs, *(None,) * (len(step.inputs) - inputs))
    return Axis(count, slices, (Slice(1),) * len(step.outputs))


def _norm(step: Step) -> Axis | None:
    return _by_heads(step, sum(o.rank == 3 for o in step.inputs)) if step.inputs[0].rank == 3 else None


def _elements(step: Step) -> Axis | None:
    out = step.outputs[0]
    if out.rank < 2 or not out.shape[1].is_constant:
        return None
    inputs: list[Slice | None] = []
    for operand in step.inputs:
        dim = operand.rank - (out.rank - 1)
        repeated = dim < 0 or operand.shape[dim] != out.shape[1]
        inputs.append(None if repeated else Slice(dim))
    return Axis(out.shape[1].constant, tuple(inputs), (Slice(1),))


def _attention(step: Step) -> Axis | None:
    vectors = [None if o.kind in ("cache", "input") else Slice(0) for o in step.inputs[5:]]
    return Axis(step.inputs[0].shape[1].constant, (Slice(1), None, None, None, None, *vectors), (Slice(1),))


def _rope_kv_write(step: Step) -> Axis | None:
    """Returns the axis of the step: the heads of the queries.

    ``LayerCut.piece`` chooses the keys and values of a rank.
    """
    return Axis(step.inputs[0].shape[1].constant, (Slice(1), *(None,) * (len(step.inputs) - 1)), (Slice(1),))


RULES: dict[str, Rule] = {
    **dict.fromkeys(LINEAR, _linear),
    "gated_activation": _gated,
    "quantize_activation": _quantized,
    "cast_bf16": _bf16,
    "take_rows": _rows,
    **dict.fromkeys(_NORMS, _norm),
    "rope": lambda step: _by_heads(step, 1),
    "reduce": lambda step: _by_heads(step, 1) if step.inputs[0].rank == 3 else None,
    "elementwise": _elements,
    "copy": _elements,
    "paged_attention": _attention,
    "rope_kv_write": _rope_kv_write,
}


class Tensor(LayerKind):
    """Divides heads, channels, columns and experts."""

    name = "tensor"
    collectives: ClassVar[tuple[str, ...]] = ("all_gather", "gather_experts")
    rules = RULES
    divides_experts = True

    def heads(self, step: Step, have: int, ranks: int) -> Heads:
        queries = step.inputs[0].shape[1].constant
        group = queries // have
        if queries < ranks:
            raise RequestError(
                f"ranks: {ranks} are more than the {queries} query heads of {step.where}",
                hint=f"Use {queries} or fewer.",
            )
        whole = have % ranks == 0
        if step.attrs.get("best_blocks") and (self.owns_blocks or not whole):
            raise RequestError(
                f"partition: with [adaptive_context] the query heads of a key/value head choose together what they "
                f"look at, and {ranks} ranks don't divide the {have} key/value heads of {step.where}",
                hint="Use tensor=N with an N that divides them, or pipeline=N.",
            )
        cuts = tuple((have * r // ranks) * group if whole else queries * r // ranks for r in range(ranks + 1))
        return Heads(group, cuts, self._key_value(cuts, have, group))

    def _key_value(self, cuts: tuple[int, ...], have: int, group: int) -> tuple[tuple[int, int], ...]:
        return tuple((a // group, -(-b // group)) for a, b in pairs(cuts))

    def attention(self, heads: Heads, first: int, rank: int, ranks: int) -> tuple[str, dict[str, int]]:
        first_head = first - heads.key_value[rank][0] * heads.group
        return "paged_attention", {"group": heads.group, "first_head": first_head}

    def arrivals(self, step: Step, ranks: range, rank: int, element: Callable[[Operand], float]) -> Arrivals | None:
        if step.attrs.get("to", -1) not in (-1, rank):
            return None  # it sends its own, and goes on
        lists = [[int(c) for c in text.split(",")] for text in str(step.attrs["cuts"]).split(";")]
        if step.op == "gather_experts":  # on average, if tokens choose evenly
            (cuts,) = lists
            whole = sum((width_of(o) * element(o) for o in step.outputs), 0.0)
            parts = [whole * (hi - lo) / cuts[-1] for lo, hi in pairs(cuts)]
        else:
            sizes = list(map(element, step.outputs))
            parts = [
                sum((cuts[i + 1] - cuts[i]) * size for cuts, size in zip(lists, sizes, strict=True))
                for i in range(len(lists[0]) - 1)
            ]
        return Arrivals(ranks, dict(zip(ranks, parts, strict=True)))


def expert_cuts(experts: int, ranks: int) -> tuple[int, ...]:
    """Returns the first expert of each rank, then the number of experts. There must be an expert for each rank."""
    return tuple(experts * r // ranks for r in range(ranks + 1))


def expert_shares(rows: Sequence[int], ranks: int) -> list[int]:
    """Returns the number of rows that each rank computes, from the number of rows of each expert."""
    if len(rows) < ranks:
        return [sum(rows)] * ranks
    return [sum(rows[lo:hi]) for lo, hi in pairs(expert_cuts(len(rows), ranks))]
