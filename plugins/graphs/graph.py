"""Builds an ONNX graph from a Program: nodes, constants, and weights as external data in the bundle.

In the graph, all floats have 32 bits and all integers 64 bits, whatever the program's types are; conditions are bool. A
graph of 16-bit floats gets casts between the two float types (``float_types.py``), which handlers needn't know. Tokens
are packed as in the program, N = B*S; only attention uses [B, S].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import sympy
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.fx.node import Node

from enginewright.passes.ir.program import Program, affine_of
from enginewright.passes.ir.provenance import WHERE, join_where, op_and_where
from enginewright.runtime.shared.errors import UnsupportedModelError

from ..steps.linear_io import ROWS
from .float_types import ELEMENTS, FloatType, narrowed, operand_type, result_type
from .weights import ExternalWeights, Form, Stored

FLAT_IDS = "ids"
"""The name of the tensor with the token ids as i64 [N]."""

Value = str | tuple[str, ...]
"""The name of a call's result in the graph, or the names of its several results."""

Handler = Callable[["GraphBuilder", Node, Mapping[str, Any]], Value]
"""A function that emits a call. It gets the builder, the call, and its arguments by the names of the op's schema, and
returns the names of its results.
"""

TYPES: Mapping[torch.dtype, int] = {
    **dict.fromkeys((torch.float32, torch.float64, torch.bfloat16, torch.float16), TensorProto.FLOAT),
    **dict.fromkeys((torch.int64, torch.int32, torch.int8, torch.uint8), TensorProto.INT64),
    torch.bool: TensorProto.BOOL,
}
"""The type of a tensor in the program -> its element type in the graph."""

_NUMPY: Mapping[int, Any] = {TensorProto.FLOAT: np.float32, TensorProto.INT64: np.int64, TensorProto.BOOL: np.bool_}

_PRODUCTS = frozenset(
    {torch.ops.ew.linear.default, torch.ops.ew.embedding.default, torch.ops.ew.grouped_linear.default}
)


class GraphBuilder:
    """Builds a graph. ``node`` is the call that is being emitted, to which names of nodes and errors refer.

    Args:
        program: the program to emit.
        weights: writes the weights.
        floats: the type in which the graph computes.
        capacity: the number of positions of a slot, C; None doesn't fix it.
        target: the target's name, for errors.
    """

    def __init__(
        self,
        program: Program,
        weights: ExternalWeights,
        floats: FloatType = "f32",
        capacity: int | None = None,
        target: str = "onnx",
    ) -> None:
        self.program = program
        self.target = target
        self.weights = weights
        self.floats: FloatType = floats
        self.element = ELEMENTS[floats]
        self.capacity: int | str = capacity or "C"
        self.overrides: Mapping[Any, Handler] = {}  # in the place of the target's handlers
        self.node: Node | None = None
        self.names: dict[Node, Value] = {}
        self.halves: dict[Node, tuple[str, str]] = {}  # rope_table -> cosines and sines [N, 1, F]
        self.spread: set[Node] = set()  # [E, N, ..] in the graph where the program has [N*k, ..]: see ops_experts
        self.inputs: dict[str, onnx.ValueInfoProto] = {}
        self.outputs: dict[str, onnx.ValueInfoProto] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, TensorProto] = {}
        self._constants: dict[tuple[object, ...], str] = {}
        self._computed: dict[object, str] = {}
        self._types: dict[str, int] = {}  # the float types of computed tensors, in a graph of 16 bits
        self._count = 0

    # ---- nodes

    def op(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Adds a call of a standard operator with one result, and returns the result's name."""
        return self.ops(kind, inputs, 1, (name,) if name else (), **attributes)[0]

    def ops(
        self, kind: str, inputs: Sequence[str], results: int, names: Sequence[str] = (), **attributes: Any
    ) -> tuple[str, ...]:
        """Adds a call of an operator with several results, and returns their names.

        Args:
            kind: the operator; a standard one unless the attribute ``domain`` names another domain.
            inputs: the names of its inputs; "" for one that is left out.
            results: the number of results.
            names: the names of the results; () chooses them.
            attributes: the operator's attributes.
        """
        types: list[int] = []
        if self.floats != "f32":
            inputs, types = self._operands(kind, inputs)
        self._count += 1
        stem = f"{kind}_{self._count}"
        outputs = tuple(names) or tuple(f"{stem}:{i}" if results > 1 else stem for i in range(results))
        where = join_where(self.node.meta[WHERE]) if self.node is not None else ""
        label = f"{where}/{stem}" if where else stem
        self.nodes.append(helper.make_node(kind, list(inputs), list(outputs), name=label, **attributes))
        if (result := result_type(kind, types, attributes.get("to"))) is not None:
            self._types |= dict.fromkeys(outputs[:1] if kind == "TopK" else outputs, result)
        return outputs

    def once(self, key: object, make: Callable[[], str]) -> str:
        """Returns the result of ``make``, which is called only the first time for each key."""
        if key not in self._computed:
            self._computed[key] = make()
        return self._computed[key]

    def unsupported(self, reason: str) -> UnsupportedModelError:
        """Returns an error about the call that is being emitted: "aten.foo at model.layers.0.mlp: <reason>"."""
        assert self.node is not None
        reason = reason.replace("the onnx target", f"the {self.target} target")
        return UnsupportedModelError(
            f"{op_and_where(self.node)}: {reason}",
            hint=f"This model can't run on the {self.target} target; the cpu target may take it.",
        )

    # ---- float types

    def wide(self, name: str) -> str:
        """Returns the tensor ``name`` as 32-bit floats, cast if necessary."""
        return self._in_type(name, TensorProto.FLOAT)

    def _float_type(self, name: str) -> int | None:
        """Returns the float type of the tensor ``name``; None if it has no floats."""
        if name in self._types:
            return self._types[name]
        if name in self.inputs:
            kind = self.inputs[name].type.tensor_type.elem_type
        elif name in self.initializers:
            kind = self.initializers[name].data_type
        else:
            return None
        return kind if kind in ELEMENTS.values() else None

    def _operands(self, kind: str, names: Sequence[str]) -> tuple[list[str], list[int]]:
        """Casts the operands ``names`` to the float type that the operator ``kind`` needs.

        Returns the names of the results, and their float types.
        """
        types = [self._float_type(name) for name in names]
        computed = [t for name, t in zip(names, types, strict=True) if t is not None and name not in self.initializers]
        constant = [t for name, t in zip(names, types, strict=True) if t is not None and name in self.initializers]
        common = None if kind == "Cast" else operand_type(kind, computed, constant, self.element)
        if kind == "DequantizeLinear":
            return list(names), [t for t in types if t is not None]
        if common is None:
            return list(names), [*computed, *constant]
        operands = [name if t is None else self._in_type(name, common) for name, t in zip(names, types, strict=True)]
        return operands, [common]

    def _in_type(self, name: str, kind: int) -> str:
        if self._float_type(name) in (kind, None):
            return name
        tensor = self.initializers.get(name)
        if tensor is not None and tensor.data_location != TensorProto.EXTERNAL and kind != TensorProto.FLOAT:
            return self.once(("narrow", name), lambda: self.constant(narrowed(numpy_helper.to_array(tensor), kind)))
        return self.once(("float type", name, kind), lambda: self.op("Cast", name, to=kind))

    # ---- values

    def constant(self, value: npt.NDArray[Any]) -> str:
        """Adds a small constant to the file, and returns its name."""
        array = np.asarray(value, order="C")
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._constants[key] = name
            self.initializers[name] = numpy_helper.from_array(array, name)
        return self._constants[key]

    def integers(self, *values: int) -> str:
        """Adds a constant i64 [n], for shapes and axes, and returns its name."""
        return self.constant(np.asarray(values, np.int64))

    def number(self, value: float, dtype: torch.dtype) -> str:
        """Adds a scalar constant in the graph's type for ``dtype``, and returns its name."""
        return self.constant(np.asarray(value, _NUMPY[TYPES[dtype]]))

    def value(self, node: object) -> str:
        """Returns the tensor of a node's only result, in the type that it has. Raises UnsupportedModelError if there is
        none.
        """
        if not isinstance(node, Node):
            raise self.unsupported(f"{node!r} isn't a tensor")
        if node.op == "get_attr":
            return self.weight(node)
        name = self.names.get(node)
        if not isinstance(name, str):
            raise self.unsupported(f"the onnx target has no {node.target} to give it")
        return name

    def cast(self, value: object, dtype: torch.dtype) -> str:
        """Returns an argument, a node or a number, as a tensor of the graph's type for ``dtype``."""
        if isinstance(value, (bool, int, float)):
            return self.number(value, dtype)
        name = self.value(value)
        assert isinstance(value, Node)
        return self.to(name, value.meta["val"].dtype, dtype)

    def to(self, name: str, before: torch.dtype, after: torch.dtype) -> str:
        """Casts a tensor from the graph's type for ``before`` to its type for ``after``, and returns the result."""
        if TYPES[before] == TYPES[after]:
            return name
        return self.once(("cast", name, TYPES[after]), lambda: self.op("Cast", name, to=TYPES[after]))

    def weight(self, node: Node, form: Form = "rows") -> str:
        """Adds a weight as external data, or as a constant if it has integers; returns the name of the tensor with its
        values.
        """
        name = str(node.target)
        dtype = self.program.weights[name].dtype
        if not dtype.is_floating_point:
            return self.once((name, form), lambda: self._integers_of(name))
        if self.floats != "f32":
            return self.stored(name, form, self.floats if self._is_multiplied(node) else "f32")
        if dtype != torch.bfloat16:
            return self.stored(name, form, "f32")
        # onnxruntime multiplies no bf16 on a CPU: it makes this cast when it loads the file.
        narrow = self.stored(name, form, "bf16")
        return self.once((name, form), lambda: self.op("Cast", narrow, to=TensorProto.FLOAT))

    def stored(self, name: str, form: Form, stored: Stored) -> str:
        """Adds a weight as external data of the type ``stored``, and returns its name."""
        return self.take(self.weights.add(name, self.program.weights[name], form, stored))

    def scales(self, name: str, form: Form) -> str:
        """Adds the scales of a quantized weight, all positive, and returns their name."""
        return self.take(self.weights.add(name, self.program.weights[name], form, self.floats, positive=True))

    def take(self, tensor: TensorProto) -> str:
        """Adds a tensor that refers to the bundle's data as an initializer, and returns its name."""
        self.initializers[tensor.name] = tensor
        return str(tensor.name)

    def _is_multiplied(self, node: Node) -> bool:
        """Returns True if a weight is read only as a matrix of products or as a table."""
        return len(self.program.weights[str(node.target)].shape) > 1 and all(u.target in _PRODUCTS for u in node.users)

    def _integers_of(self, name: str) -> str:
        value = self.program.weights[name].evaluate()
        return self.constant(value.numpy().astype(_NUMPY[TYPES[value.dtype]]))

    # ---- sizes

    def expressions(self, node: Node, index: int | None = None) -> tuple[sympy.Expr, ...]:
        """Returns the shape of a call's result as expressions in T, B and R. ``index`` selects one of several
        results.
        """
        value = node.meta["val"] if index is None else node.meta["val"][index]
        return tuple(self.program.expression(s) for s in value.shape)

    def size(self, expr: sympy.Expr) -> str:
        """Returns a tensor i64 [1] with a size. An expression in T and R is computed in the graph."""
        if expr.is_Integer:
            return self.integers(int(expr))

        def make() -> str:
            affine = affine_of(expr)
            if affine.b:
                raise self.unsupported(f"the size {expr} depends on how many requests there are")
            total = self.integers(affine.constant)
            for factor, count in ((affine.t, self.tokens), (affine.r, self.sampled)):
                if factor:
                    term = self.op("Mul", count(), self.integers(factor)) if factor != 1 else count()
                    total = self.op("Add", total, term) if total != self.integers(0) else term
            return total

        return self.once(("size", expr), make)

    def tokens(self) -> str:
        """Returns a tensor i64 [1] with N, the number of tokens."""
        return self.once("N", lambda: self.op("Shape", FLAT_IDS))

    def sampled(self) -> str:
        """Returns a tensor i64 [1] with R, the number of rows of logits."""
        return self.once("R", lambda: self.op("Shape", ROWS))

    def shape(self, sizes: Sequence[sympy.Expr], free: bool = True) -> str:
        """Returns a tensor i64 [rank] with a shape. With ``free``, a single size that isn't constant is -1, as Reshape
        allows.
        """
        unknown = [s for s in sizes if not s.is_Integer]
        if not unknown or (free and len(unknown) == 1):
            return self.integers(*(int(s) if s.is_Integer else -1 for s in sizes))
        parts = [self.size(s) for s in sizes]
        return self.once(("shape", tuple(sizes)), lambda: self.op("Concat", *parts, axis=0))

    def reshape(self, name: str, *sizes: int) -> str:
        """Reshapes a tensor; a size of -1 is inferred."""
        return self.op("Reshape", name, self.integers(*sizes))
