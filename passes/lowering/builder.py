"""Collects the steps, buffers and weights of a lowered program."""

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
from .views import ONE, View, collapse, contiguous_strides, elements, expand, reshape

_COMPUTED: tuple[Dtype, ...] = ("f32", "i32", "bf16", "f16", "i8")
DTYPES: Mapping[torch.dtype, Dtype] = {
    **{TORCH_DTYPES[name]: name for name in _COMPUTED},
    torch.int64: "i32",  # ids, positions and what is computed from them
    torch.bool: "f32",  # a condition of `where`: true if not 0
}
MAX_RANK = 4
"""The largest rank of the operands of elementwise, copy and reduce."""

NARROW: frozenset[Dtype] = frozenset({"bf16", "f16", "i8", "i4", "u4"})
"""Types that few kernels take."""
TAKES_NARROW = frozenset(
    {
        *("cast_bf16", "embedding", "linear", "grouped_linear"),
        *("quantize_activation", "quantized_linear", "quantized_grouped_linear", "quantized_embedding"),
        *("rms_norm_quantize", "layer_norm_quantize", "add_rms_norm_quantize", "add_layer_norm_quantize"),
    }
)
"""Steps that do."""
_ROW_MULTIPLE: Mapping[Dtype, int] = {"bf16": 2, "i8": 4}
"""Rows of these types begin at multiples of 32 bits, which is what a kernel's instruction takes of them at a time."""


@dataclass(frozen=True)
class Packing:
    """The storage of a weight that some linear uses: a layout, and a type of elements."""

    layout: Layout
    dtype: Dtype


@dataclass(frozen=True)
class Form:
    """The storage that a target's programs use.

    Attributes:
        target: the target's name, for messages.
        panels: True if products read weights in panels, as the cpu target's kernels do; False for rows.
        floats: the type of activations, and of weights that have no other format.
    """

    target: str = "the cpu target"
    panels: bool = True
    floats: Dtype = "f32"


CPU_FORM = Form()


@dataclass(frozen=True)
class WeightRef:
    """A weight whose layout is chosen by who uses it."""

    name: str


@dataclass(frozen=True)
class StoredRef:
    """A result of ``ew.dequantize``, which linears read in its stored form: values with scales and, if any, offsets."""

    values: WeightRef
    scales: WeightRef
    offsets: WeightRef | None
    group_size: int


@dataclass(frozen=True)
class CacheRef:
    """One half of a layer's KV cache. ``name`` is GROUP/LAYER."""

    name: str
    half: str  # "k" or "v"


Value = View | WeightRef | StoredRef | CacheRef | float | int | tuple["Value", ...]


class Builder:
    """A lowered program under construction, which the handlers of ops append to.

    Args:
        program: the program that is lowered.
        packed: the storage of each weight that some linear uses; the others have rows.
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
        """A node's shape (``result``: of that one of its results)."""
        value = node.meta["val"] if result is None else node.meta["val"][result]
        return tuple(self.program.affine(s) for s in value.shape)

    def dtype(self, value: torch.Tensor) -> Dtype:
        """Raises UnsupportedModelError for a type that no kernel computes in.

        Where weights are in rows, all floats are f32 here: ``narrow_floats`` says which are stored in fewer bits.
        """
        if not self.form.panels and value.dtype == torch.bfloat16:
            return "f32"
        if value.dtype not in DTYPES:
            raise self.unsupported(f"{self.form.target} has no {str(value.dtype).removeprefix('torch.')}")
        return DTYPES[value.dtype]

    def unsupported(self, reason: str) -> UnsupportedModelError:
        """The error for the node being lowered: "aten.foo at model.layers.0.mlp: <reason>"."""
        assert self.node is not None
        return UnsupportedModelError(
            f"{op_and_where(self.node)}: {reason}",
            hint="This model can't run on this target. Please report the op and the model.",
        )

    # ---- operands

    def buffer(self, shape: Sequence[Affine], dtype: Dtype = "f32") -> View:
        """A new buffer, dense but for the ends of rows in bf16 and i8, which are padded to 32 bits."""
        name = f"b{len(self.buffers)}"
        shape = tuple(shape)
        multiple = _ROW_MULTIPLE.get(dtype, 1)
        padded = shape
        if multiple > 1:
            padded = (*shape[:-1], Affine(-(-shape[-1].constant // multiple) * multiple))
        self.buffers.append(Buffer(name=name, size=elements(padded) * BYTES_PER_ELEMENT[dtype]))
        return View("buffer", name, dtype, shape, contiguous_strides(padded))

    def result(self, node: Node) -> View:
        """Returns the view for a node's only result: a part of the buffer it was promised to, or a new buffer."""
        if node in self.destinations:
            return self.destinations[node]
        return self.buffer(self.shape(node), self.dtype(node.meta["val"]))

    def results(self, node: Node) -> list[View]:
        """New buffers for each of a node's results."""
        return [self.buffer(self.shape(node, i), self.dtype(value)) for i, value in enumerate(node.meta["val"])]

    def weight(self, name: str, *, rows: bool) -> View:
        """Returns a weight in layout rows, or in its stored form (packed if a linear uses it)."""
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
        """A weight as kernels read it, its scales behind it, and its groups' size as an attribute named ``group``."""
        if isinstance(value, WeightRef):
            return [self.weight(value.name, rows=False)], {}
        if isinstance(value, StoredRef):
            refs = [ref for ref in (value.values, value.scales, value.offsets) if ref is not None]
            stored = [self.weight(ref.name, rows=False) for ref in refs]
            return stored, {group: value.group_size} | ({} if value.offsets is None else {"has_offsets": True})
        raise self.unsupported(f"its weight is computed from the inputs, and {self.form.target} packs weights ahead")

    def view(self, value: Value | None) -> View:
        """A tensor as a strided view; weights in layout rows."""
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
        """A copy, dense or into ``to``."""
        out = self.buffer(view.shape, view.dtype) if to is None else to
        self.strided_step("copy", [view], out)
        return out

    def strided_step(
        self,
        op: str,
        inputs: Sequence[View],
        out: View,
        attrs: Mapping[str, int | float | bool | str] | None = None,
    ) -> None:
        """A step over operands that are all broadcast to ``out``'s shape; ranks above 4 are brought down."""
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
        """Kernels take a step input whole or not at all; a view of one becomes the same view of a copy of it."""
        if view.kind != "input" or view == self.inputs.get(view.name):
            return view
        if view.name not in self.input_copies:
            if view.name not in self.inputs:
                raise self.unsupported(f"{self.form.target} can't compute with {view.name}")
            self.input_copies[view.name] = self.copy(self.inputs[view.name])
        return replace(view, kind="buffer", name=self.input_copies[view.name].name)

    def cast(self, view: View) -> View:
        """i32 as f32."""
        if view.dtype == "f32":
            return view
        out = self.buffer(view.shape)
        self.strided_step("elementwise", [view], out, {"fn": "cast"})
        return out

    def reshaped(self, view: View, shape: Sequence[Affine]) -> View:
        """``view`` under another shape, copied first if strides can't express that."""
        shape = tuple(shape)
        reshaped = reshape(view, shape)
        if reshaped is None:
            reshaped = reshape(self.copy(view), shape)
        assert reshaped is not None, "a dense view has every shape"
        return reshaped

    def unit(self, view: View) -> View:
        """``view`` with unit inner stride, copied if need be."""
        view = self._readable(view)
        return view if view.has_unit_inner_stride else self.copy(view)

    def rows(self, view: View, rank: int = 3) -> View:
        """``view`` as [rows.., C] of rank 2 to ``rank`` with unit inner stride, copied if need be."""
        view = self.unit(view)
        if 2 <= view.rank <= rank:
            return view
        return self.reshaped(view, (elements(view.shape[:-1]), view.shape[-1]))
