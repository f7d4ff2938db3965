"""Builds a lowered program: collects its steps, buffers and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx.node import Node

from enginewright.runtime.shared.dtypes import BYTES_PER_ELEMENT, Dtype
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.lowered_program import Affine, Buffer, Operand, Step, WeightUse
from enginewright.runtime.shared.panel_layouts import Layout

from ..formats.rounding import TORCH_DTYPES
from ..ir.program import Program
from ..ir.provenance import WHERE, join_where, op_and_where
from ..ir.weights import WeightExpr
from .views import ONE, View, collapse, contiguous_strides, elements, expand, permute, reshape

_COMPUTED: tuple[Dtype, ...] = ("f32", "i32", "bf16", "f16", "i8")
DTYPES: Mapping[torch.dtype, Dtype] = {
    **{TORCH_DTYPES[name]: name for name in _COMPUTED},
    torch.int64: "i32",  # ids, positions and what is computed from them
    torch.bool: "f32",  # a condition of `where`: true if not 0
}
MAX_RANK = 4
"""The largest rank of operands that the kernels of elementwise, copy and reduce steps read."""

NARROW: frozenset[Dtype] = frozenset({"bf16", "f16", "i8", "i4", "u4"})
"""Element types that few kernels read."""
TAKES_NARROW = frozenset(
    {
        *("cast_bf16", "embedding", "linear", "grouped_linear"),
        *("quantize_activation", "quantized_linear", "quantized_grouped_linear", "quantized_embedding"),
        *("rms_norm_quantize", "layer_norm_quantize", "add_rms_norm_quantize", "add_layer_norm_quantize"),
    }
)
"""Steps whose kernels read or write these types."""
_ROW_MULTIPLE: Mapping[Dtype, int] = {"bf16": 2, "i8": 4}
"""Types whose rows begin at multiples of 32 bits, as kernels need it -> the number of elements in 32 bits."""


@dataclass(frozen=True)
class Packing:
    """The layout and the element type in which a weight that products read is stored."""

    layout: Layout
    dtype: Dtype


@dataclass(frozen=True)
class Form:
    """The storage that a target's programs use.

    Attributes:
        target: the target's name, for messages.
        panels: True if products read weights in panels, as the cpu target's kernels do; False for row-major weights.
        floats: the type of activations, and of weights without another format.
    """

    target: str = "the cpu target"
    panels: bool = True
    floats: Dtype = "f32"


CPU_FORM = Form()


@dataclass(frozen=True)
class WeightRef:
    """A weight as an argument of a call. Its layout isn't decided yet, as it depends on its readers."""

    name: str


@dataclass(frozen=True)
class StoredRef:
    """The result of an ``ew.dequantize``, as the stored values, scales and perhaps offsets.

    A linear reads these stored tensors itself, so the floats are never computed.
    """

    values: WeightRef
    scales: WeightRef
    offsets: WeightRef | None
    group_size: int


@dataclass(frozen=True)
class CacheRef:
    """One part of a layer's cache as an argument of a call: ``half`` is "k" or "v", or "state". ``name`` is
    GROUP/LAYER.
    """

    name: str
    half: str  # "k" or "v"


Value = View | WeightRef | StoredRef | CacheRef | float | int | tuple["Value", ...]


class Builder:
    """A lowered program under construction, to which the handlers of ops add steps.

    Args:
        program: the program that is lowered.
        packed: the storage of each weight that a product reads, by its name; other weights are row-major.
        form: the storage that the target uses.
    """

    def __init__(self, program: Program, packed: Mapping[str, Packing], form: Form = CPU_FORM) -> None:
        self.program = program
        self.packed = packed
        self.form = form
        self.steps: list[Step] = []
        self.buffers: list[Buffer] = []
        self.weights: dict[str, WeightUse] = {}
        self.sources: dict[str, WeightExpr] = {}
        self.node: Node | None = None  # the node being lowered
        self.inputs: dict[str, View] = {}  # step inputs, whole
        self.input_copies: dict[str, View] = {}
        self.destinations: dict[Node, View] = {}  # nodes whose result goes into a part of another's buffer

    # ---- facts

    def shape(self, node: Node, result: int | None = None) -> tuple[Affine, ...]:
        """Returns the shape of a node's value. ``result`` is the index of the result if the node has several."""
        value = node.meta["val"] if result is None else node.meta["val"][result]
        return tuple(self.program.affine(s) for s in value.shape)

    def dtype(self, value: torch.Tensor) -> Dtype:
        """Returns the element type of a value. Raises UnsupportedModelError for a type without kernels.

        For targets with row-major weights, bf16 is f32 here; ``narrow_floats`` chooses later the values that are stored
        in 16 bits.
        """
        if not self.form.panels and value.dtype == torch.bfloat16:
            return "f32"
        if value.dtype not in DTYPES:
            raise self.unsupported(f"{self.form.target} has no {str(value.dtype).removeprefix('torch.')}")
        return DTYPES[value.dtype]

    def unsupported(self, reason: str) -> UnsupportedModelError:
        """Returns an error about the node that is being lowered: "aten.foo at model.layers.0.mlp: <reason>"."""
        assert self.node is not None
        return UnsupportedModelError(
            f"{op_and_where(self.node)}: {reason}",
            hint="This model can't run on this target. Please report the op and the model.",
        )

    # ---- operands

    def buffer(self, shape: Sequence[Affine], dtype: Dtype = "f32") -> View:
        """Adds a buffer and returns it as a view. It is dense, except that rows of bf16 and i8 are padded to multiples
        of 32 bits.
        """
        name = f"b{len(self.buffers)}"
        shape = tuple(shape)
        multiple = _ROW_MULTIPLE.get(dtype, 1)
        padded = shape
        if multiple > 1:
            padded = (*shape[:-1], Affine(-(-shape[-1].constant // multiple) * multiple))
        self.buffers.append(Buffer(name=name, size=elements(padded) * BYTES_PER_ELEMENT[dtype]))
        return View("buffer", name, dtype, shape, contiguous_strides(padded))

    def result(self, node: Node) -> View:
        """Returns the view to which a node's only result is written: a part of another op's buffer if that was
        assigned, or a new buffer.
        """
        if node in self.destinations:
            return self.destinations[node]
        return self.buffer(self.shape(node), self.dtype(node.meta["val"]))

    def results(self, node: Node) -> list[View]:
        """Returns new buffers for a node's several results."""
        return [self.buffer(self.shape(node, i), self.dtype(value)) for i, value in enumerate(node.meta["val"])]

    def weight(self, name: str, *, rows: bool) -> View:
        """Returns a view of a weight, row-major if ``rows`` is True, otherwise as products read it.

        A weight that is needed in both forms is stored twice, the second time as NAME.rows.
        """
        expr = self.program.weights[name]
        packing = self.packed.get(name)
        used = name
        if packing is None or rows:
            used = name if packing is None else f"{name}.rows"
            if used != name and used in self.program.weights:
                raise self.unsupported(f"the name {used} is taken by another weight")
            packing = Packing("rows", self.dtype(torch.empty((), dtype=expr.dtype, device="meta")))
        dtype = packing.dtype
        self.weights.setdefault(used, WeightUse(name=used, dtype=dtype, shape=expr.shape, layout=packing.layout))
        self.sources.setdefault(used, expr)
        shape = tuple(Affine(s) for s in expr.shape)
        return View("weight", used, dtype, shape, contiguous_strides(shape))

    def product_weight(self, value: object, group: str) -> tuple[list[View], dict[str, int]]:
        """Returns views of a product's weight, its scales and offsets, and attributes of the step.

        ``group`` is the name of the attribute for the group size. Raises UnsupportedModelError if the weight is
        computed.
        """
        if isinstance(value, WeightRef):
            return [self.weight(value.name, rows=False)], {}
        if isinstance(value, StoredRef):
            refs = [ref for ref in (value.values, value.scales, value.offsets) if ref is not None]
            stored = [self.weight(ref.name, rows=False) for ref in refs]
            return stored, {group: value.group_size} | ({} if value.offsets is None else {"has_offsets": True})
        raise self.unsupported(f"its weight is computed from the inputs, and {self.form.target} packs weights ahead")

    def view(self, value: Value | None) -> View:
        """Returns a tensor as a strided view, a weight as row-major.

        Raises UnsupportedModelError for other arguments, such as a cache or None.
        """
        if isinstance(value, WeightRef):
            return self.weight(value.name, rows=True)
        if not isinstance(value, View):
            raise self.unsupported(f"{self.form.target} has no kernel for it with such an argument")
        return value

    # ---- steps

    def step(
        self,
        op: str,
        inputs: Sequence[View | Operand],
        outputs: Sequence[View],
        attrs: Mapping[str, int | float | bool | str] | None = None,
    ) -> None:
        assert self.node is not None
        narrow = {v.dtype for v in (*inputs, *outputs)} & NARROW
        if narrow and op not in TAKES_NARROW:
            raise self.unsupported(f"{self.form.target} has no {op} of {' and '.join(sorted(narrow))}")
        self.steps.append(
            Step(
                op=op,
                inputs=tuple(i if isinstance(i, Operand) else i.operand() for i in inputs),
                outputs=tuple(o.operand() for o in outputs),
                attrs=dict(attrs or {}),
                where=join_where(self.node.meta[WHERE]),
            )
        )

    def copy(self, view: View, to: View | None = None) -> View:
        """Adds a copy of a view into a dense buffer, or into ``to``, and returns the destination.

        The step has the dimensions of symbolic size first: ranks cut views of tokens along their second dimension.
        """
        out = self.buffer(view.shape, view.dtype) if to is None else to
        order = sorted(range(out.rank), key=lambda d: out.shape[d].is_constant)
        self.strided_step("copy", [permute(expand(view, out.shape), order)], permute(out, order))
        return out

    def strided_step(
        self,
        op: str,
        inputs: Sequence[View],
        out: View,
        attrs: Mapping[str, int | float | bool | str] | None = None,
    ) -> None:
        """Adds a step whose inputs are broadcast to the shape of ``out``. Dimensions are merged if there are more than
        4.

        Raises UnsupportedModelError if they can't be merged.
        """
        views = [*(self._readable(expand(i, out.shape)) for i in inputs), out]
        if not out.rank:
            views = [replace(v, shape=(ONE,), strides=(ONE,)) for v in views]
        if out.rank > MAX_RANK:
            merged = collapse(views, MAX_RANK)
            if merged is None:
                raise self.unsupported(f"{self.form.target} has no {op} of rank {out.rank}")
            views = merged
        self.step(op, views[:-1], [views[-1]], attrs)

    def _readable(self, view: View) -> View:
        """Returns a view that kernels can read. Kernels read step inputs only whole, so a part of one becomes that part
        of a copy.
        """
        if view.kind != "input" or view == self.inputs.get(view.name):
            return view
        if view.name not in self.input_copies:
            if view.name not in self.inputs:
                raise self.unsupported(f"{self.form.target} can't compute with {view.name}")
            self.input_copies[view.name] = self.copy(self.inputs[view.name])
        return replace(view, kind="buffer", name=self.input_copies[view.name].name)

    def cast(self, view: View) -> View:
        """Adds a cast to f32, and returns its result; a view of f32 is returned unchanged."""
        if view.dtype == "f32":
            return view
        out = self.buffer(view.shape)
        self.strided_step("elementwise", [view], out, {"fn": "cast"})
        return out

    def reshaped(self, view: View, shape: Sequence[Affine]) -> View:
        """Returns a view with another shape, copied first if strides can't express it."""
        shape = tuple(shape)
        reshaped = reshape(view, shape)
        if reshaped is None:
            reshaped = reshape(self.copy(view), shape)
        assert reshaped is not None, "a dense view has every shape"
        return reshaped

    def unit(self, view: View) -> View:
        """Returns a view whose last dimension has stride 1, copied if necessary."""
        view = self._readable(view)
        return view if view.has_unit_inner_stride else self.copy(view)

    def rows(self, view: View, rank: int = 3) -> View:
        """Returns a view [rows.., C] with 2 to ``rank`` dimensions, the last with stride 1, copied if necessary."""
        view = self.unit(view)
        if 2 <= view.rank <= rank:
            return view
        return self.reshaped(view, (elements(view.shape[:-1]), view.shape[-1]))
