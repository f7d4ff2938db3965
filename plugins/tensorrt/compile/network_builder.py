"""Adds layers to a TensorRT network: tensors by their names in the description, constants, weights, and names of
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, get_args

import numpy as np
import numpy.typing as npt
import tensorrt as trt

from enginewright.runtime.shared.dtypes import DTYPES
from enginewright.runtime.shared.errors import TargetError

from .network import Call, Constant, Dtype, Network

WeightBytes = Callable[[str], npt.NDArray[np.generic]]
"""A function from the name of a weight in the bundle to its stored form. The memory must stay in place until the engine
is built.
"""

TYPES: Mapping[Dtype, trt.DataType] = {name: getattr(trt.DataType, DTYPES[name].tensorrt) for name in get_args(Dtype)}

Layer = TypeVar("Layer", bound=trt.ILayer)


class NetworkBuilder:
    """Adds layers to ``network`` for the calls of ``description``.

    Attributes:
        call: the current call, after which its layers are named.
        tensors: the values of the description, by their names.
    """

    def __init__(self, network: trt.INetworkDefinition, description: Network, weights: WeightBytes) -> None:
        self.network = network
        self.description = description
        self.call: Call | None = None
        self.tensors: dict[str, trt.ITensor] = {}
        self._weights = weights
        self._kept: list[npt.NDArray[np.generic]] = []  # TensorRT reads weights where they lie, when it builds
        self._constants: dict[tuple[object, ...], trt.ITensor] = {}
        self._layers = 0

    # ---- what calls read

    def input(self, index: int) -> trt.ITensor:
        """Returns the tensor of an input of the current call, by its index."""
        return self.tensor(self.operand(index))

    def operand(self, index: int) -> str:
        """Returns the name of an input of the current call, by its index; "" if it is left out."""
        assert self.call is not None
        return self.call.inputs[index] if index < len(self.call.inputs) else ""

    def tensor(self, name: str) -> trt.ITensor:
        """Returns the tensor of a value by its name. Constants and weights are added when they are first needed."""
        if name not in self.tensors:
            if name in self.description.constants:
                self.tensors[name] = self._constant_of(self.description.constants[name])
            else:
                self.tensors[name] = self._weight_of(name)
        return self.tensors[name]

    def integers(self, index: int) -> tuple[int, ...] | None:
        """Returns the elements of an input that is a constant of integers; None for another input."""
        constant = self.description.constants.get(self.operand(index))
        return None if constant is None else tuple(int(v) for v in constant.values)

    def attribute(self, name: str, default: int = 0) -> int:
        """Returns an integer attribute of the current call; ``default`` if it isn't set."""
        assert self.call is not None
        value = self.call.attributes.get(name, default)
        assert isinstance(value, int)
        return value

    def number(self, name: str, default: float = 0.0) -> float:
        """Returns a float attribute of the current call; ``default`` if it isn't set."""
        assert self.call is not None
        value = self.call.attributes.get(name, default)
        assert isinstance(value, (int, float))
        return float(value)

    def text(self, name: str) -> str:
        """Returns a text attribute of the current call; "" if it isn't set."""
        assert self.call is not None
        return str(self.call.attributes.get(name, ""))

    # ---- what layers are made with

    def add(self, layer: Layer | None) -> Layer:
        """Names a layer and returns it. Raises TargetError for None, which TensorRT returns for a layer that it
        rejects.
        """
        if layer is None:
            raise self.refused("TensorRT doesn't take it")
        self._layers += 1
        where = self.call.name if self.call is not None else "network"
        layer.name = f"{where}#{self._layers}"
        return layer

    def out(self, layer: trt.ILayer | None) -> trt.ITensor:
        """Names a layer and returns its only output. Raises TargetError for None, which TensorRT returns for a layer
        that it rejects.
        """
        return self.add(layer).get_output(0)

    def refused(self, reason: str) -> TargetError:
        """Returns an error about the current call: "MatMul at model.layers.0.mlp/MatMul_7: <reason>"."""
        what = "the network" if self.call is None else f"{self.call.op} at {self.call.name}"
        return TargetError(f"{what}: {reason}", hint="See TensorRT's own messages above this one.")

    def constant(self, values: npt.NDArray[np.generic]) -> trt.ITensor:
        """Adds a constant and returns its tensor. Equal ones are shared."""
        array = np.ascontiguousarray(values)  # which has a dimension, also if the constant has none
        key = (array.dtype.str, values.shape, array.tobytes())
        if key not in self._constants:
            dtype = next(name for name in TYPES if DTYPES[name].numpy == array.dtype)
            self._constants[key] = self._add_constant(array, dtype, values.shape)
        return self._constants[key]

    def shape_constant(self, values: Sequence[int]) -> trt.ITensor:
        """Adds a constant i64 [n] and returns its tensor."""
        return self.constant(np.asarray(values, np.int64))

    def _constant_of(self, constant: Constant) -> trt.ITensor:
        return self.constant(np.asarray(constant.values, DTYPES[constant.dtype].numpy).reshape(constant.shape))

    def _weight_of(self, name: str) -> trt.ITensor:
        weight = self.description.weights[name]
        return self._add_constant(self._weights(weight.tensor), weight.dtype, weight.shape)

    def _add_constant(self, array: npt.NDArray[np.generic], dtype: Dtype, shape: Sequence[int]) -> trt.ITensor:
        self._kept.append(array)
        count = int(np.prod(shape, dtype=np.int64))
        weights = trt.Weights(TYPES[dtype], array.ctypes.data, count)
        return self.out(self.network.add_constant(trt.Dims(list(shape)), weights))

    # ---- what several kinds of calls need

    def cast(self, x: trt.ITensor, dtype: trt.DataType) -> trt.ITensor:
        """Adds a cast and returns its result."""
        return x if x.dtype == dtype else self.out(self.network.add_cast(x, dtype))

    def shape(self, x: trt.ITensor) -> trt.ITensor:
        """Returns a tensor i64 [rank] with the shape of ``x`` at run time."""
        return self.out(self.network.add_shape(x))

    def reshape(self, x: trt.ITensor, sizes: Sequence[int]) -> trt.ITensor:
        """Reshapes a tensor as ONNX does: a size of 0 copies the input's size, one of -1 is inferred."""
        layer = self.add(self.network.add_shuffle(x))
        layer.reshape_dims = trt.Dims(list(sizes))
        return layer.get_output(0)

    def of_rank(self, x: trt.ITensor, rank: int) -> trt.ITensor:
        """Reshapes a tensor to ``rank`` dimensions by sizes of 1 in front."""
        missing = rank - len(x.shape)
        if missing <= 0:
            return x
        axes = self.shape_constant(list(range(missing)))
        return self.out(self.network.add_unsqueeze(x, axes))

    def same_rank(self, *tensors: trt.ITensor) -> list[trt.ITensor]:
        """Returns the tensors with as many dimensions as the one with the most, by sizes of 1 in front."""
        rank = max(len(x.shape) for x in tensors)
        return [self.of_rank(x, rank) for x in tensors]

    def binary(self, x: trt.ITensor, y: trt.ITensor, kind: trt.ElementWiseOperation) -> trt.ITensor:
        """Adds an element-wise operation on two tensors, with broadcasting."""
        x, y = self.same_rank(x, y)
        return self.out(self.network.add_elementwise(x, y, kind))

    def unary(self, x: trt.ITensor, kind: trt.UnaryOperation) -> trt.ITensor:
        """Adds an element-wise operation on one tensor."""
        return self.out(self.network.add_unary(x, kind))

    def like(self, value: float, x: trt.ITensor) -> trt.ITensor:
        """Returns a scalar constant in the type of ``x``."""
        dtype = next(name for name, of in TYPES.items() if of == x.dtype)
        return self.constant(np.asarray(value, DTYPES[dtype].numpy))


def sizes_of(x: trt.ITensor) -> tuple[int, ...]:
    """Returns a tensor's shape, with -1 for dynamic sizes."""
    return tuple(x.shape[i] for i in range(len(x.shape)))
