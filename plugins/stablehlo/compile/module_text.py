"""Writes a StableHLO module as text. Values have static shapes, and there is one method for each operation.

https://openxla.org/stablehlo/spec defines the operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from enginewright.runtime.shared.dtypes import DTYPES

Shape = tuple[int, ...]
Array = npt.NDArray[Any]

NUMPY: dict[str, np.dtype[Any]] = {of.stablehlo: of.numpy for of in DTYPES.values() if of.stablehlo}
"""StableHLO's names of element types -> NumPy's types."""

KINDS = {dtype: kind for kind, dtype in reversed(NUMPY.items())}
_FLOATS = tuple(DTYPES[name].stablehlo for name in ("f32", "f16", "bf16", "fp8"))


@dataclass(frozen=True)
class Tensor:
    """A value of the module: its SSA name, shape and element type."""

    name: str
    shape: Shape
    kind: str

    @property
    def type(self) -> str:
        """The type as text, such as "tensor<2x3xf32>"."""
        return f"tensor<{''.join(f'{size}x' for size in self.shape)}{self.kind}>"

    @property
    def is_float(self) -> bool:
        return self.kind in _FLOATS


class ModuleText:
    """A module's text under construction: the arguments of its function ``main``, and operations in order."""

    def __init__(self) -> None:
        self._arguments: list[tuple[Tensor, int | None]] = []
        self._lines: list[str] = []
        self._constants: dict[tuple[str, Shape, bytes], Tensor] = {}

    # ---- the function

    def argument(self, shape: Sequence[int], kind: str, aliases: int | None = None) -> Tensor:
        """Adds the next argument and returns it. ``kind`` is the type of its elements, such as "f32".

        ``aliases`` is the index of the result that may reuse its memory; None for none.
        """
        tensor = Tensor(f"%arg{len(self._arguments)}", tuple(shape), kind)
        self._arguments.append((tensor, aliases))
        return tensor

    def finish(self, results: Sequence[Tensor]) -> str:
        """Returns the module's text; its function "main" returns ``results``."""
        arguments = ", ".join(
            f"{tensor.name}: {tensor.type}" + ("" if aliases is None else f" {{tf.aliasing_output = {aliases} : i32}}")
            for tensor, aliases in self._arguments
        )
        types = ", ".join(result.type for result in results)
        names = ", ".join(result.name for result in results)
        body = "\n".join(f"    {line}" for line in self._lines)
        return (
            f"module @step {{\n  func.func public @main({arguments}) -> ({types}) {{\n{body}\n"
            f"    return {names} : {types}\n  }}\n}}\n"
        )

    def _add(self, text: str, shape: Sequence[int], kind: str) -> Tensor:
        result = Tensor(f"%{len(self._lines)}", tuple(int(size) for size in shape), kind)
        self._lines.append(f"{result.name} = {text}")
        return result

    def _typed(self, text: str, operands: Sequence[Tensor], shape: Sequence[int], kind: str) -> Tensor:
        """Adds the operation ``text`` and returns its result, of the given shape and element type ``kind``.

        The types of operands and result are appended to ``text``.
        """
        result = Tensor("", tuple(int(size) for size in shape), kind)
        types = ", ".join(operand.type for operand in operands)
        return self._add(f"{text} : ({types}) -> {result.type}", shape, kind)

    # ---- constants

    def constant(self, value: npt.ArrayLike, kind: str | None = None) -> Tensor:
        """Returns a constant; equal constants are added once."""
        array = np.asarray(value)
        kind = kind or KINDS[array.dtype]
        array = np.ascontiguousarray(array, NUMPY[kind]).reshape(array.shape)
        key = kind, array.shape, array.tobytes()
        if key not in self._constants:
            result = Tensor("", array.shape, kind)
            self._constants[key] = self._add(
                f"stablehlo.constant dense<{_elements(array, kind)}> : {result.type}", array.shape, kind
            )
        return self._constants[key]

    def iota(self, shape: Sequence[int], dim: int, kind: str = "i64") -> Tensor:
        """Returns a tensor with the values 0, 1, 2, ... along dimension ``dim``."""
        return self._add(f"stablehlo.iota dim = {dim} : {Tensor('', tuple(shape), kind).type}", shape, kind)

    # ---- element by element

    def unary(self, op: str, x: Tensor) -> Tensor:
        return self._add(f"stablehlo.{op} {x.name} : {x.type}", x.shape, x.kind)

    def binary(self, op: str, x: Tensor, y: Tensor) -> Tensor:
        """Adds the operation stablehlo.``op`` on x and y, of one type, with broadcasting. Returns its result."""
        x, y = self.together(x, y)
        return self._add(f"stablehlo.{op} {x.name}, {y.name} : {x.type}", x.shape, x.kind)

    def compare(self, direction: str, x: Tensor, y: Tensor) -> Tensor:
        """Compares two tensors, and returns an i1 tensor; ``direction`` is EQ, NE, LT, LE, GT or GE."""
        x, y = self.together(x, y)
        how = "FLOAT" if x.is_float else "UNSIGNED" if x.kind in ("i1", "ui8") else "SIGNED"
        return self._typed(f"stablehlo.compare {direction}, {x.name}, {y.name}, {how}", (x, y), x.shape, "i1")

    def select(self, where: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Returns x where the mask ``where`` is True, otherwise y."""
        where, x, y = self.together(where, x, y)
        return self._add(f"stablehlo.select {where.name}, {x.name}, {y.name} : {where.type}, {x.type}", x.shape, x.kind)

    def convert(self, x: Tensor, kind: str) -> Tensor:
        if x.kind == kind:
            return x
        if kind == "i1":
            return self.compare("NE", x, self.constant(np.zeros((), NUMPY[x.kind]), x.kind))
        return self._typed(f"stablehlo.convert {x.name}", (x,), x.shape, kind)

    def bitcast(self, x: Tensor, kind: str) -> Tensor:
        """Returns the bits of x as another type of equal size."""
        return self._typed(f"stablehlo.bitcast_convert {x.name}", (x,), x.shape, kind)

    def together(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors broadcast to their common shape, by NumPy's rules."""
        shape = np.broadcast_shapes(*(t.shape for t in tensors))
        return tuple(self.broadcast(t, shape) for t in tensors)

    # ---- shapes

    def broadcast(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Broadcasts a tensor to a shape, by NumPy's rules."""
        shape = tuple(int(size) for size in shape)
        if x.shape == shape:
            return x
        added = len(shape) - len(x.shape)
        equal = [i for i, size in enumerate(x.shape) if size == shape[i + added]]
        narrow = x if len(equal) == len(x.shape) else self.reshape(x, [x.shape[i] for i in equal])
        dims = [i + added for i in equal]
        return self._typed(f"stablehlo.broadcast_in_dim {narrow.name}, dims = {dims}", (narrow,), shape, x.kind)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Reshapes a tensor; one size of ``shape`` may be -1."""
        sizes = [int(size) for size in shape]
        if -1 in sizes:
            known = math.prod(size for size in sizes if size != -1)
            sizes[sizes.index(-1)] = math.prod(x.shape) // known
        if tuple(sizes) == x.shape:
            return x
        return self._typed(f"stablehlo.reshape {x.name}", (x,), sizes, x.kind)

    def transpose(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        dims = [int(d) for d in dims]
        if dims == sorted(dims):
            return x
        return self._typed(f"stablehlo.transpose {x.name}, dims = {dims}", (x,), [x.shape[d] for d in dims], x.kind)

    def slice(self, x: Tensor, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Returns every ``step``-th index from ``start`` to ``stop`` (exclusive) along one axis."""
        if (start, stop, step) == (0, x.shape[axis], 1):
            return x
        bounds = [f"{start}:{stop}:{step}" if i == axis else f"0:{size}" for i, size in enumerate(x.shape)]
        shape = [-(-(stop - start) // step) if i == axis else size for i, size in enumerate(x.shape)]
        return self._typed(f"stablehlo.slice {x.name} [{', '.join(bounds)}]", (x,), shape, x.kind)

    def concatenate(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        names = ", ".join(part.name for part in parts)
        return self._typed(f"stablehlo.concatenate {names}, dim = {axis}", parts, shape, parts[0].kind)

    def pad(self, x: Tensor, high: Sequence[int]) -> Tensor:
        """Pads a tensor with zeros at the end of each dimension."""
        zero = self.constant(np.zeros((), NUMPY[x.kind]), x.kind)
        nothing = [0] * len(x.shape)
        text = f"stablehlo.pad {x.name}, {zero.name}, low = {nothing}, high = {list(high)}, interior = {nothing}"
        return self._typed(text, (x, zero), [a + b for a, b in zip(x.shape, high, strict=True)], x.kind)

    # ---- what a value says where to look

    def dynamic_update_slice(self, x: Tensor, update: Tensor, starts: Sequence[Tensor]) -> Tensor:
        names = ", ".join(start.name for start in starts)
        text = f"stablehlo.dynamic_update_slice {x.name}, {update.name}, {names}"
        return self._typed(text, (x, update, *starts), x.shape, x.kind)

    def take(self, x: Tensor, indices: Tensor, axis: int) -> Tensor:
        """Returns x[.., indices, ..], with the indices along one axis."""
        rank, places = len(x.shape), len(indices.shape)
        sizes = [1 if i == axis else size for i, size in enumerate(x.shape)]
        shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
        offset = [*range(axis), *range(axis + places, rank - 1 + places)]
        numbers = (
            f"#stablehlo.gather<offset_dims = {offset}, collapsed_slice_dims = [{axis}], "
            f"start_index_map = [{axis}], index_vector_dim = {places}>"
        )
        text = (
            f'"stablehlo.gather"({x.name}, {indices.name}) <{{dimension_numbers = {numbers}, '
            f"indices_are_sorted = false, slice_sizes = array<i64: {', '.join(map(str, sizes))}>}}>"
        )
        return self._typed(text, (x, indices), shape, x.kind)

    # ---- what others compute

    def custom_call(
        self,
        name: str,
        operands: Sequence[Tensor],
        shape: Sequence[int],
        attributes: Mapping[str, int | float | str],
        *,
        in_place: bool = False,
    ) -> Tensor:
        """Calls a function of XLA's typed interface ("FFI"), and returns its result, a float tensor. Arrays are
        row-major.

        With ``in_place``, the result is in the memory of the first operand.
        """
        result = Tensor("", tuple(int(size) for size in shape), "f32")
        config = ", ".join(f"{key} = {_attribute(value)}" for key, value in sorted(attributes.items()))
        layouts = [", ".join(_row_major(tensor) for tensor in tensors) for tensors in (operands, (result,))]
        alias = "output_tuple_indices = [], operand_index = 0, operand_tuple_indices = []"
        aliasing = f", output_operand_aliases = [#stablehlo.output_operand_alias<{alias}>]" if in_place else ""
        text = (
            f"stablehlo.custom_call @{name}({', '.join(operand.name for operand in operands)}) {{"
            f"api_version = 4 : i32, backend_config = {{{config}}}, "
            f"operand_layouts = [{layouts[0]}], result_layouts = [{layouts[1]}]{aliasing}}}"
        )
        return self._typed(text, operands, shape, "f32")

    # ---- products and sums

    def dot(
        self, x: Tensor, y: Tensor, contracting: tuple[int, int], batching: int = 0, kind: str | None = None
    ) -> Tensor:
        """Returns the sum of products over one axis of each operand.

        ``contracting`` has these two axes. The first ``batching`` axes of both operands are batch axes. ``kind`` is the
        type of the result.
        """
        batch = list(range(batching))
        left = [s for i, s in enumerate(x.shape) if i >= batching and i != contracting[0]]
        right = [s for i, s in enumerate(y.shape) if i >= batching and i != contracting[1]]
        together = f", batching_dims = {batch} x {batch}" if batching else ""
        text = f"stablehlo.dot_general {x.name}, {y.name}{together}, contracting_dims = [{contracting[0]}] x "
        text += f"[{contracting[1]}], precision = [DEFAULT, DEFAULT]"
        return self._typed(text, (x, y), [*x.shape[:batching], *left, *right], kind or x.kind)

    def reduce(self, op: str, x: Tensor, axes: Sequence[int], keep: bool = False) -> Tensor:
        """Reduces some axes by ``op``, "add" or "maximum", and returns the result. ``keep`` keeps them with size 1."""
        axes = sorted(a % len(x.shape) for a in axes)
        least: Any = -np.inf if x.is_float else np.iinfo(NUMPY[x.kind]).min if op == "maximum" else 0
        initial = self.constant(np.asarray(0 if op == "add" else least, NUMPY[x.kind]), x.kind)
        shape = [size for i, size in enumerate(x.shape) if i not in axes]
        text = f"stablehlo.reduce({x.name} init: {initial.name}) applies stablehlo.{op} across dimensions = {axes}"
        result = self._typed(text, (x, initial), shape, x.kind)
        return self.reshape(result, [1 if i in axes else s for i, s in enumerate(x.shape)]) if keep else result

    def sort(self, values: Tensor, others: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """Sorts values in descending order along an axis, and ``others`` in the same order. The sort is stable."""
        shape = Tensor("", values.shape, values.kind)
        number = len(self._lines)
        one, two = Tensor("", (), values.kind), Tensor("", (), others.kind)
        text = (
            f'%{number}:2 = "stablehlo.sort"({values.name}, {others.name}) <{{dimension = {axis} : i64, '
            f"is_stable = true}}> ({{\n    ^bb0(%a: {one.type}, %b: {one.type}, %c: {two.type}, %d: {two.type}):\n"
            f"      %first = stablehlo.compare GT, %a, %b, {'FLOAT' if values.is_float else 'SIGNED'} : "
            f"({one.type}, {one.type}) -> tensor<i1>\n      stablehlo.return %first : tensor<i1>\n    }}) : "
            f"({shape.type}, {others.type}) -> ({shape.type}, {others.type})"
        )
        self._lines.append(text)
        return (
            Tensor(f"%{number}#0", values.shape, values.kind),
            Tensor(f"%{number}#1", others.shape, others.kind),
        )


def _attribute(value: int | float | str) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value} : i64" if isinstance(value, int) else f"0x{int(np.float32(value).view(np.uint32)):08X} : f32"


def _row_major(tensor: Tensor) -> str:
    rank = len(tensor.shape)
    return f"dense<{list(range(rank))[::-1] if rank else ''}> : tensor<{rank}xindex>"


def _elements(array: Array, kind: str) -> str:
    """Returns the text of a constant's elements, which is between "dense<" and ">"."""
    if kind == "i1":
        flags = ["true" if value else "false" for value in array.reshape(-1)]
        return flags[0] if len(set(flags)) == 1 and flags else _nested(array.shape, flags)
    if not array.size:
        return ""
    if kind in _FLOATS:
        words = array.reshape(-1).view(f"u{array.dtype.itemsize}")
        if len(set(words.tolist())) == 1:
            return f"0x{int(words[0]):0{2 * array.dtype.itemsize}X}"
    elif array.size == 1 or (array == array.reshape(-1)[0]).all():
        return str(int(array.reshape(-1)[0]))
    return f'"0x{array.astype(array.dtype.newbyteorder("<")).tobytes().hex().upper()}"'


def _nested(shape: Shape, items: Sequence[str]) -> str:
    if not shape:
        return items[0]
    step = len(items) // shape[0]
    parts = [_nested(shape[1:], items[i * step : (i + 1) * step]) for i in range(shape[0])]
    return f"[{', '.join(parts)}]"
