"""INetworkDefinition in numpy: layers, and plugins as TensorRT's bindings have them.

Plugins are created, asked and launched as TensorRT does it, and a launch gets the arguments of the plugin's interface
in its order: addresses of inputs, integers, addresses of outputs. What the kernels do is in
``tests.plugins.engines.tiny_paged.py``.

A size counts as free if two samples of the sizes differ in it.
"""

from __future__ import annotations

import ctypes
import heapq
import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from tests.plugins.engines.fake_tensorrt import Feeds
from tests.plugins.gpu.fake_driver import KERNELS, FakeCuda
from tests.plugins.tensorrt.compile.numpy_layers import MEANINGS, Array, unpacked
from tests.plugins.tensorrt.symbolic import Builder as ExpressionBuilder
from tests.plugins.tensorrt.symbolic import Expression, Integers

SAMPLES = (
    {"T": 5, "B": 3, "R": 2, "M": 16, "P": 6, "B+1": 4},
    {"T": 7, "B": 4, "R": 3, "M": 40, "P": 9, "B+1": 5},
)
NUMPY: dict[str, Any] = {
    **{"FLOAT": np.float32, "HALF": np.float16, "BF16": ml_dtypes.bfloat16, "BOOL": np.bool_},
    **{"INT64": np.int64, "INT32": np.int32, "INT8": np.int8, "FP8": ml_dtypes.float8_e4m3fn},
}


class Tensor:
    def __init__(self, network: Network, layer: Layer | None, index: int, dtype: Any = None) -> None:
        self.network, self.layer, self.index, self._dtype = network, layer, index, dtype
        self.name = ""
        self.letters: list[str | int] = []  # of an input

    @property
    def samples(self) -> list[Array]:
        return [values[self] for values in self.network.settle()]

    @property
    def dtype(self) -> Any:
        if self._dtype is None:
            trt, of = self.network.trt, self.samples[0].dtype
            self._dtype = getattr(trt.DataType, next(name for name, known in NUMPY.items() if known == of))
        return self._dtype

    @property
    def shape(self) -> Any:
        first, second = (array.shape for array in self.samples)
        free = self.layer.free(self.index) if self.layer is not None else ()
        sizes = [n if n == m and i not in free else -1 for i, (n, m) in enumerate(zip(first, second, strict=True))]
        return self.network.trt.Dims(sizes)

    def set_dimension_name(self, index: int, name: str) -> None:
        assert self.letters[index] == -1
        self.letters[index] = name


class Layer:
    """``arguments``: all but the inputs. What is set later is an attribute of it."""

    reshape_dims = first_transpose = axes = None
    axis: Any = None

    def __init__(self, network: Network, kind: str, inputs: Sequence[Tensor], arguments: Sequence[Any]) -> None:
        assert all(isinstance(x, Tensor) and x.network is network for x in inputs)
        self.network, self.kind, self.inputs, self.arguments = network, kind, list(inputs), list(arguments)
        self.name = ""
        count = 2 if kind == "topk" else 1
        dtype = {"cast": 0, "dequantize": 0, "constant": 1}.get(kind)
        dtype_field = None if dtype is None else self.arguments[dtype]
        self.outputs = [Tensor(network, self, i, dtype_field) for i in range(count)]
        if kind == "cast":
            self.arguments[0] = NUMPY[self.arguments[0].name]

    def get_output(self, index: int) -> Tensor:
        return self.outputs[index]

    def set_input(self, index: int, tensor: Tensor) -> None:
        assert index == len(self.inputs) or (self.kind == "slice" and index == 2)
        self.inputs.append(tensor)

    def free(self, index: int) -> Sequence[int]:
        """Dimensions of an output that vary, though the samples have one size."""
        return ()

    def compute(self, *inputs: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            result = MEANINGS[self.kind](self, *inputs)
        return result if isinstance(result, tuple) else (np.asarray(result),)


class PluginLayer(Layer):
    """A plugin of ours, made and asked by the bindings' own classes."""

    def __init__(self, network: Network, inputs: Sequence[Tensor], plugin: Any) -> None:
        super().__init__(network, "plugin", inputs, ())
        self.plugin = plugin
        self.inputs_of_shape = [
            [self._dimension(i, j, n) for j, n in enumerate(ints(x.shape))] for i, x in enumerate(inputs)
        ]
        types = plugin.get_output_data_types([x.dtype for x in inputs], [len(x.shape) for x in inputs])
        self.shapes = plugin.get_output_shapes(self.inputs_of_shape, [], ExpressionBuilder())
        self.aliased = [plugin.get_aliased_input(i) for i in range(len(self.shapes))]
        self.outputs = [Tensor(network, self, i, of) for i, of in enumerate(types)]
        self.launch: Any = None

    @staticmethod
    def _dimension(i: int, j: int, size: int) -> Expression:
        key = f"{i},{j}"
        return Expression((lambda s: s[key]) if size < 0 else (lambda s: size), fixed=size >= 0)

    def free(self, index: int) -> Sequence[int]:
        return [i for i, size in enumerate(self.shapes[index]) if not size.fixed]

    def choose(self) -> None:
        """Makes the choices of TensorRT's build, in its order; of several tactics the last one wins."""
        plugin, trt, tensors = self.plugin, self.network.trt, [*self.inputs, *self.outputs]
        descs = []
        for tensor in tensors:
            desc, inner = trt.DynamicPluginTensorDesc(), trt.PluginTensorDesc()
            inner.type, inner.format = tensor.dtype, trt.TensorFormat.LINEAR
            inner.dims = trt.Dims([-1] * len(tensor.shape))
            desc.desc = inner
            descs.append(desc)
        count = len(self.inputs)
        plugin.get_supported_format_combinations(descs, count)
        plugin.configure_plugin(descs[:count], descs[count:])
        tactics = sorted(plugin.get_valid_tactics())
        plugin.set_tactic(tactics[-1] if tactics else 0)
        self.launch, self.integers = SimpleNamespace(), Integers()
        plugin.get_launch_params([], descs, count, self.launch, self.integers, ExpressionBuilder())
        plain = [desc.desc for desc in descs]
        self.entry, self.code = plugin.get_kernel(plain[:count], plain[count:])

    def compute(self, *inputs: Array) -> tuple[Array, ...]:
        sizes = {f"{i},{j}": n for i, array in enumerate(inputs) for j, n in enumerate(array.shape)}
        shapes = [[size.value(sizes) for size in shape] for shape in self.shapes]
        garbage = 0 if self.launch is None else np.nan  # no launch yet: these are samples
        new = [
            inputs[alias] if alias >= 0 else np.full(shape, garbage, NUMPY[tensor.dtype.name])
            for alias, shape, tensor in zip(self.aliased, shapes, self.outputs, strict=True)
        ]
        if self.launch is None:
            return tuple(new)
        assert all(alias < 0 or list(inputs[alias].shape) == s for alias, s in zip(self.aliased, shapes, strict=True))
        device = self.network.cuda.devices[-1]
        with_copies = [_Placed(device, array) for array in inputs]
        placed = [with_copies[a] if a >= 0 else _Placed(device, x) for a, x in zip(self.aliased, new, strict=True)]
        integers = [np.int32(self.integers[i].value(sizes)) for i in range(self.integers.nbSymExprs)]
        grid = tuple(getattr(self.launch, f"grid_{axis}").value(sizes) for axis in "xyz")
        assert min(grid) > 0 and self.launch.block_x.value(sizes) % 32 == 0
        arguments = [*(x.address for x in with_copies), *integers, *(x.address for x in placed)]
        code, read = _as_read(self.code, arguments)
        KERNELS[self.entry](device, code, grid, read)  # type: ignore[arg-type]
        results = tuple(x.read() if a < 0 else inputs[a] for a, x in zip(self.aliased, placed, strict=True))
        for x in {id(x): x for x in (*with_copies, *placed)}.values():
            x.free()
        return results


def _as_read(code: bytes, arguments: Sequence[Any]) -> tuple[bytes, list[Any]]:
    """The kernel's arguments as its code reads them, by name; what it doesn't read is what is written."""
    fields = json.loads(code)
    assert len(arguments) == len(fields["names"])
    read = {name: arguments[int(place.rpartition("_")[2][:-1])] for name, place in fields["reads"].items()}
    tensors = [read[name.removesuffix("_before")] for name in fields["names"]]
    return code, tensors


class _Placed:
    """An array in the GPU's memory: where it is if it lies there, else a copy."""

    def __init__(self, device: Any, array: Array) -> None:
        self.device, self.array = device, array
        self.address = int(array.ctypes.data)
        inside = any(a <= self.address < a + len(m) for a, m in device.memory.items())
        self.copied = not inside
        if self.copied:
            self.address = device.allocate(array.nbytes)
            device.upload(self.address, np.ascontiguousarray(array))

    def read(self) -> Array:
        assert self.copied
        array = np.empty(self.array.shape, self.array.dtype)
        self.device.download(array, self.address)
        return array

    def free(self) -> None:
        if self.copied:
            self.device.free(self.address)


class Network:
    """INetworkDefinition, strongly typed."""

    def __init__(self, trt: Any, cuda: FakeCuda) -> None:
        self.trt, self.cuda = trt, cuda
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.layers: list[Layer] = []
        self.found: tuple[dict[Tensor, Array], ...] = ({}, {})
        self._settled = 0

    num_inputs = property(lambda self: len(self.inputs))
    num_layers = property(lambda self: len(self.layers))

    def get_input(self, index: int) -> Tensor:
        return self.inputs[index]

    def get_layer(self, index: int) -> Layer:
        return self.layers[index]

    def add_input(self, name: str, dtype: Any, dims: Any) -> Tensor:
        tensor = Tensor(self, None, 0, dtype)
        tensor.name, tensor.letters = name, list(ints(dims))
        self.inputs.append(tensor)
        return tensor

    def mark_output(self, tensor: Tensor) -> None:
        assert tensor.network is self and tensor not in self.outputs
        self.outputs.append(tensor)

    def settle(self) -> tuple[dict[Tensor, Array], ...]:
        """The values of every tensor, for samples of the inputs' sizes, all zeros."""
        for values, sizes in zip(self.found, SAMPLES, strict=True):
            for tensor in self.inputs:
                if tensor not in values:
                    shape = [n if isinstance(n, int) else sizes[n] for n in tensor.letters]
                    assert min(shape, default=0) >= 0, f"{tensor.name}: a free size without a name"
                    values[tensor] = np.zeros(shape, NUMPY[tensor.dtype.name])
            for layer in self.layers[self._settled :]:
                values.update(zip(layer.outputs, layer.compute(*(values[x] for x in layer.inputs)), strict=True))
        self._settled = len(self.layers)
        return self.found

    def add_constant(self, shape: Any, weights: Any) -> Layer:
        sizes, (dtype, address, count) = list(ints(shape)), weights
        assert int(np.prod(sizes, dtype=np.int64)) == count
        packed = dtype.name == "INT4"
        of = np.dtype(np.uint8 if packed else NUMPY[dtype.name])
        nbytes = -(-count // 2) if packed else count * of.itemsize
        data = np.frombuffer(ctypes.string_at(address, nbytes), of)
        value = unpacked(data, sizes) if packed else data.reshape(sizes)
        return self._added(Layer(self, "constant", (), (value, dtype)))

    def add_plugin(self, create: Any, aot: bool) -> PluginLayer:
        request = self.trt.QuickPluginCreationRequest
        inputs, shape_inputs, plugin = create(request.STRICT_AOT if aot else request.STRICT_JIT)
        assert not shape_inputs
        return self._added(PluginLayer(self, inputs, plugin))

    def __getattr__(self, name: str) -> Any:
        kind = name.removeprefix("add_")
        if not name.startswith("add_") or kind not in MEANINGS:
            raise AttributeError(name)

        def add(*given: Any) -> Layer:
            flat = [x for one in given for x in (one if isinstance(one, list) else [one])]
            tensors = [x for x in flat if isinstance(x, Tensor)]
            return self._added(Layer(self, kind, tensors, [x for x in flat if not isinstance(x, Tensor)]))

        return add

    def _added(self, layer: Any) -> Any:
        self.settle()  # those before it have everything set by now
        self.layers.append(layer)
        return layer

    def compute(self, feeds: Mapping[str, Array]) -> Feeds:
        values = {tensor: feeds[tensor.name] for tensor in self.inputs}
        for layer in self._order():
            results = layer.compute(*(values[x] for x in layer.inputs))
            for tensor, value in zip(layer.outputs, results, strict=True):
                assert tensor.dtype.name == "INT4" or value.dtype == NUMPY[tensor.dtype.name], (layer.name, value.dtype)
                values[tensor] = value
        return {tensor.name: values[tensor] for tensor in self.outputs}

    def _order(self) -> list[Layer]:
        """Each layer behind those whose results it takes, and writes as late as that allows: as TensorRT may."""
        waiting = {layer: {x.layer for x in layer.inputs if x.layer is not None} for layer in self.layers}
        order: list[Layer] = []
        late = {layer: isinstance(layer, PluginLayer) and "kv_write" in layer.name for layer in self.layers}
        place = {layer: (late[layer], i) for i, layer in enumerate(self.layers)}
        readers: dict[Layer, list[Layer]] = {layer: [] for layer in self.layers}
        for layer, needed in waiting.items():
            for one in needed:
                readers[one].append(layer)
        ready = [(place[layer], layer) for layer, needed in waiting.items() if not needed]
        heapq.heapify(ready)
        while ready:
            order.append(heapq.heappop(ready)[1])
            for reader in readers[order[-1]]:
                waiting[reader].discard(order[-1])
                if not waiting[reader]:
                    heapq.heappush(ready, (place[reader], reader))
        assert len(order) == len(self.layers)
        return order

    def alias_of(self, tensor: Tensor) -> str:
        """The input of the network whose memory an output has; "" for none."""
        while isinstance(tensor.layer, PluginLayer) and (index := tensor.layer.aliased[tensor.index]) >= 0:
            tensor = tensor.layer.inputs[index]
        return tensor.name if tensor in self.inputs else ""


def ints(dims: Any) -> list[int]:
    return [int(dims[i]) for i in range(len(dims))]
