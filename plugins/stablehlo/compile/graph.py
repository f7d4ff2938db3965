"""Translates the onnx target's graph, with the sizes of one bucket, to a StableHLO module.

The graph is the program with caches in slots (``plugins/steps/linear_io.py``), in standard operators. Its sizes B, S, C
and R are variable; here they are numbers. So values that depend only on sizes are computed now, and aren't in the
module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import UnsupportedModelError

from ...steps.linear_io import INPUT_IDS, LOGITS, POSITION_IDS, ROWS, WRITE_INDEX
from ..section import ModuleSection
from .module_text import Array, ModuleText, Tensor

KINDS = {of.onnx: of.stablehlo for of in DTYPES.values() if of.onnx and of.stablehlo}
"""ONNX's element types -> StableHLO's names of them."""

_BITS = {"bf16": "ui16", "f8E4M3FN": "ui8"}


@dataclass(frozen=True)
class Scaled:
    """A quantized weight: its stored values and their scales.

    Attributes:
        values: [.., K, N], integers or 8-bit floats; 4-bit values are stored as bytes in one dimension.
        scales: [N] along ``axis``, or one for every ``block`` values along it.
        axis, block: see ``scales``; ``block`` is 0 for one scale per index.
        bits: 4 or 8.
        shape: the logical shape of the values.
    """

    values: Tensor
    scales: Tensor
    axis: int
    block: int
    bits: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Cache:
    """The keys or values of all slots of a step, ``rows`` [B*Nkv, C, D]. ``shape`` is (B, Nkv, C, D).

    Requests and heads are one dimension, the batch of attention's products. With a reshape in between, XLA would write
    the cache twice: for the result, and into a copy for the product.
    """

    rows: Tensor
    shape: tuple[int, ...]


Value = Tensor | Array | Scaled | Cache
"""A value of the graph: a tensor that the module computes, an array that is known when the module is written, a weight
that isn't dequantized yet, or a cache.
"""

Handler = Callable[["Graph", "Call"], Any]
"""A function that translates a node, and returns its value, or the values of its several results."""


@dataclass(frozen=True)
class Call:
    """A node of the graph.

    Attributes:
        kind: its operator.
        inputs: the names of its inputs; "" for one that is left out.
        outputs: the names of its results.
        attributes: its attributes.
        label: its name, which contains the module path.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    label: str

    def get(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)


class Graph:
    """The translation of a graph to one module.

    Args:
        model: the graph with variable sizes.
        sizes: the sizes of the bucket.
        positions: the number of positions of the model; padding may be at later ones.
    """

    def __init__(self, model: onnx.ModelProto, sizes: ModuleSection, positions: int) -> None:
        self.text = ModuleText()
        self.sizes = sizes
        self.values: dict[str, Value] = {}
        self.call: Call | None = None
        self._initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self._order = [value.name for value in model.graph.input]
        self._inputs = {value.name: value for value in model.graph.input}
        self._outputs = [value.name for value in model.graph.output]
        self._computed: dict[object, Tensor] = {}
        self._stored: dict[str, Tensor] = {}
        self.weights = [t.name for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
        self._arguments(positions)

    def _arguments(self, positions: int) -> None:
        """Adds the module's arguments: ids, write_index and rows, then caches in the order of their results, then
        weights.
        """
        text, s = self.text, self.sizes
        self.values[INPUT_IDS] = text.argument((s.requests, s.tokens), "i64")
        index = self.values[WRITE_INDEX] = text.argument((s.requests,), "i64")
        self.values[ROWS] = text.argument((s.rows,), "i64")
        for number, name in enumerate(self._caches()):
            _, heads, _, size = self._inputs[name].type.tensor_type.shape.dim
            shape = (s.requests, int(heads.dim_value), s.places, int(size.dim_value))
            rows = text.argument((shape[0] * shape[1], *shape[2:]), "f32", aliases=number + 1)
            self.values[name] = Cache(rows, shape)
        for name in self.weights:
            tensor = self._initializers[name]
            self.values[name] = self._weight(name, tuple(tensor.dims), KINDS[tensor.data_type])
        steps = text.iota((s.requests, s.tokens), 1)
        self._places = text.binary("add", text.reshape(index, (s.requests, 1)), steps)  # [B, S]
        last = text.constant(np.asarray(positions - 1, np.int64))
        self.values[POSITION_IDS] = text.binary("minimum", self._places, last)
        for name in self._order:
            if name.startswith("mask"):
                self.values[name] = self._mask(self.window(name))

    def _weight(self, name: str, dims: tuple[int, ...], kind: str) -> Tensor:
        """Adds an argument for a weight as the bundle stores it. 4-bit values are bytes in one dimension.

        Floats that NumPy doesn't have are passed as integers with the same bits.
        """
        if kind in ("i4", "ui8"):
            count = math.prod(dims)
            stored = self._stored[name] = self.text.argument((-(-count // 2) if kind == "i4" else count,), "ui8")
            return stored if kind == "i4" else self.text.reshape(stored, dims)
        stored = self._stored[name] = self.text.argument(dims, _BITS.get(kind, kind))
        return self.text.bitcast(stored, kind) if kind in _BITS else stored

    def _mask(self, window: int) -> Tensor:
        """Returns the mask i1 [B, 1, S, C]: True for positions up to a token's own, at most the last ``window`` of them
        (0 means all).
        """
        text, s = self.text, self.sizes
        keys = text.iota((1, 1, 1, s.places), 3)
        places = text.reshape(self._places, (s.requests, 1, s.tokens, 1))
        seen = text.compare("LE", keys, places)
        if not window:
            return seen
        first = text.binary("subtract", places, text.constant(np.asarray(window, np.int64)))
        return text.binary("and", seen, text.compare("GT", keys, first))

    def _caches(self) -> list[str]:
        """Returns the names of the input caches, in the order of the output caches among the results."""
        return [name.replace("present_", "past_") for name in self._outputs if name != LOGITS]

    def translate(self, nodes: Sequence[onnx.NodeProto], handlers: Mapping[str, Handler]) -> str:
        """Translates the nodes and returns the module's text. Raises UnsupportedModelError for an operator without a
        handler.
        """
        for node in nodes:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            self.call = Call(node.op_type, tuple(node.input), tuple(node.output), attributes, node.name)
            handler = handlers.get(f"{node.domain}.{node.op_type}" if node.domain else node.op_type)
            if handler is None:
                raise self.unsupported("StableHLO has no operation for it here")
            result = handler(self, self.call)
            results = result if isinstance(result, tuple) else (result,)
            self.values |= dict(zip(filter(None, node.output), results, strict=False))
        presents = [self.cache(name).rows for name in self._outputs if name != LOGITS]
        return self.text.finish([self.tensor(LOGITS), *presents])

    # ---- values

    def value(self, name: str) -> Value:
        """Returns the value with this name; small constants are read from the graph."""
        if name not in self.values:
            self.values[name] = np.asarray(numpy_helper.to_array(self._initializers[name]))
        return self.values[name]

    def known(self, name: str) -> Array:
        """Returns a value that depends only on the module's sizes, as an array. Raises UnsupportedModelError if it
        depends on tokens.
        """
        value = self.value(name)
        if not isinstance(value, np.ndarray):
            raise self.unsupported("its sizes depend on the tokens")
        return value

    def integers(self, name: str) -> list[int]:
        """Returns a value that depends only on the module's sizes, as a list. Raises the error of ``known``."""
        return [int(n) for n in self.known(name).reshape(-1)]

    def tensor(self, name: str) -> Tensor:
        """Returns a value as a tensor of the module; a quantized weight is dequantized."""
        value = self.value(name)
        if isinstance(value, np.ndarray):
            return self.text.constant(value)
        if isinstance(value, Scaled):
            return self.once(("scaled", name), lambda: self.scaled(value))
        if isinstance(value, Cache):
            return self.once(("cache", name), lambda: self.text.reshape(value.rows, value.shape))
        return value

    def stored(self, name: str) -> Tensor:
        """Returns the module's argument for the weight ``name``: its values as the bundle stores them, not
        dequantized.
        """
        return self._stored[name]

    def places(self) -> Tensor:
        """Returns i64 [B]: the position in its slot of each request's first token."""
        index = self.values[WRITE_INDEX]
        assert isinstance(index, Tensor)
        return index

    def window(self, mask: str) -> int:
        """Returns the window of the mask with this name: the number of positions that a token attends to; 0 for all."""
        return int(mask.partition("_w")[2] or 0)

    def cache(self, name: str) -> Cache:
        cache = self.value(name)
        assert isinstance(cache, Cache), name
        return cache

    def shape(self, name: str) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.value(name).shape
        return shape

    def dims(self, name: str) -> tuple[int, ...]:
        """Returns the logical shape of a weight."""
        return tuple(self._initializers[name].dims)

    def once(self, key: object, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._computed:
            self._computed[key] = make()
        return self._computed[key]

    def scaled(self, weight: Scaled) -> Tensor:
        """Dequantizes a weight to floats."""
        text = self.text
        values = text.convert(self.unpacked(weight), "f32")
        scales = text.convert(weight.scales, "f32")
        if not weight.block:
            sizes = [1] * len(weight.shape)
            sizes[weight.axis] = weight.shape[weight.axis]
            return text.binary("multiply", values, text.reshape(scales, sizes))
        axis, size = weight.axis, weight.shape[weight.axis]
        groups = -(-size // weight.block)
        spread = text.reshape(scales, (*scales.shape[: axis + 1], 1, *scales.shape[axis + 1 :]))
        spread = text.broadcast(spread, (*scales.shape[:axis], groups, weight.block, *scales.shape[axis + 1 :]))
        spread = text.reshape(spread, (*scales.shape[:axis], groups * weight.block, *scales.shape[axis + 1 :]))
        return text.binary("multiply", values, text.slice(spread, axis, 0, size))

    def unpacked(self, weight: Scaled) -> Tensor:
        """Returns the stored values, one per element. Of 4-bit values, a byte has two, the first in its low half."""
        if weight.bits == 8:
            return weight.values
        text = self.text
        four = text.constant(np.asarray(4, np.uint8))
        low = text.binary(
            "shift_right_arithmetic",
            *self._signed(text.binary("shift_left", *text.together(weight.values, four)), four),
        )
        high = text.binary("shift_right_arithmetic", *self._signed(weight.values, four))
        pair = [text.reshape(half, (*half.shape, 1)) for half in (low, high)]
        return text.reshape(text.concatenate(pair, len(pair[0].shape) - 1), weight.shape)

    def _signed(self, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        return self.text.convert(x, "i8"), self.text.convert(count, "i8")

    def unsupported(self, reason: str) -> UnsupportedModelError:
        """Returns an error about the node that is being translated; its message names the node's module."""
        assert self.call is not None
        where = self.call.label.rpartition("/")[0]
        return UnsupportedModelError(
            f"{self.call.kind}{f' at {where}' if where else ''}: {reason}",
            hint="This model can't run on the stablehlo target; the cpu target may take it.",
        )
