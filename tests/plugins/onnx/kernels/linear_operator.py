"""A product as the operator ``Linear`` of the library for onnxruntime, and as a step of the cpu target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import ModelProto, TensorProto, helper

from enginewright.plugins.native.executable import isas
from enginewright.plugins.onnx.kernels.library import operators_library
from enginewright.runtime.bundle.weights import stored_dtype
from enginewright.runtime.shared.dtypes import Dtype
from enginewright.runtime.shared.lowered_program import Operand
from enginewright.runtime.shared.panel_layouts import Layout
from tests.plugins.native.lowered_builder import LoweredBuilder, T, packed
from tests.runtime.bundle.test_sparse_panels import sparse_weight

Array = npt.NDArray[Any]
Float = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Format:
    """The storage of a weight, and the groups in which it and x are scaled."""

    storage: str
    dtype: Dtype
    layout: Layout
    weight_group: int = 0
    activation_group: int = 0
    offsets: bool = False

    @property
    def scaled(self) -> bool:
        return self.storage in ("fp8", "int8", "int4")

    @property
    def rounded(self) -> bool:
        """Returns True if x is multiplied as integers."""
        return self.storage in ("int8", "int4")


FORMATS: dict[str, Format] = {
    "f32": Format("f32", "f32", "panel32"),
    "bf16": Format("bf16", "bf16", "panel32x2"),
    "fp8": Format("fp8", "fp8", "panel32"),
    "fp8 in groups": Format("fp8", "fp8", "panel32", 32),
    "int8": Format("int8", "i8", "panel32x4"),
    "int8 in groups": Format("int8", "i8", "panel32x4", 32, 32),
    "int8, weights in groups": Format("int8", "i8", "panel32x4", 32, 0),
    "int8, x in groups": Format("int8", "i8", "panel32x4", 0, 32),
    "int4": Format("int4", "i4", "panel32x8", 32, 32),
    "int4 with offsets": Format("int4", "u4", "panel32x8", 32, 32, offsets=True),
    "f32, 2:4": Format("f32", "f32", "sparse32"),
    "bf16, 2:4": Format("bf16", "bf16", "sparse32"),
    "int8, 2:4": Format("int8", "i8", "sparse32", 32, 32),
    "int4, 2:4": Format("int4", "i4", "sparse32", 32, 32),
}


@dataclass(frozen=True)
class Product:
    """A weight [n, k] with all that belongs to it: scales and offsets f16 [n, G], bias f32 [n]."""

    format: Format
    weight: Array
    scales: Array | None = None
    offsets: Array | None = None
    bias: Float | None = None
    activation: str = ""

    def attributes(self) -> dict[str, int | str]:
        n, k = self.weight.shape
        f = self.format
        return {
            "n": n,
            "k": k,
            "storage": f.storage,
            "sparse": int(f.layout == "sparse32"),
            "weight_group": f.weight_group,
            "activation_group": f.activation_group,
            "activation": self.activation,
        }

    def stored(self) -> dict[str, Array]:
        """The arrays of the file, by the names of the operator's inputs."""
        f, arrays = self.format, {}
        arrays["weight"] = packed(self.weight, f.layout, f.dtype).view(stored_dtype(f.dtype, f.layout))
        if self.scales is not None:
            arrays["scales"] = packed(self.scales, "panel32").view(np.float16)
        if self.offsets is not None:
            arrays["offsets"] = packed(self.offsets, "panel32").view(np.float16)
        if self.bias is not None:
            arrays["bias"] = self.bias
        return arrays


def random_product(
    name: str, n: int, k: int, rng: np.random.Generator, *, bias: bool = False, activation: str = ""
) -> Product:
    """A product of one of ``FORMATS``."""
    f = FORMATS[name]
    groups = (n, -(-k // f.weight_group) if f.weight_group else 1)
    if f.layout == "sparse32":
        weight: Array = sparse_weight(n, k, f.dtype)
    elif f.rounded:
        least, most = {"i8": (-128, 128), "i4": (-8, 8), "u4": (0, 16)}[f.dtype]
        weight = rng.integers(least, most, (n, k)).astype(np.int8)
    else:
        kind = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}[f.dtype]
        weight = rng.standard_normal((n, k)).astype(kind)
    return Product(
        f,
        weight,
        rng.uniform(0.01, 0.2, groups).astype(np.float16) if f.scaled else None,
        rng.standard_normal(groups).astype(np.float16) if f.offsets else None,
        rng.standard_normal(n).astype(np.float32) if bias else None,
        activation,
    )


def operator_model(
    attributes: Mapping[str, int | str], stored: Mapping[str, Array], computed: tuple[str, ...] = ()
) -> ModelProto:
    """A graph of the one operator: x f32 [B, S, K] -> y f32 [B, S, N].

    ``computed``: names of ``stored`` that the graph takes, and doesn't have.
    """
    k, n = attributes["k"], attributes["n"]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "S", k])]
    constants, names = [], ["x"]
    for name in ("weight", "scales", "offsets", "bias"):
        array = stored.get(name)
        names.append("" if array is None else name)
        if array is None:
            continue
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        if name in computed:
            inputs.append(helper.make_tensor_value_info(name, kind, array.shape))
        else:
            constants.append(helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True))
    while not names[-1]:
        names.pop()
    node = helper.make_node("Linear", names, ["y"], name="product", domain="enginewright", **attributes)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "S", n])
    graph = helper.make_graph([node], "product", inputs, [y], constants)
    imports = [helper.make_opsetid("", 24), helper.make_opsetid("enginewright", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=12)


def open_model(
    model: ModelProto, threads: int = 1, entries: Mapping[str, str] = MappingProxyType({})
) -> onnxruntime.InferenceSession:
    """``entries``: of the session, less ``enginewright.``; by default as many threads as the session has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # what fails is raised as well
    for key, value in ({"threads": str(threads)} | dict(entries)).items():
        options.add_session_config_entry(f"enginewright.{key}", value)
    options.register_custom_ops_library(str(operators_library()))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def open_product(product: Product, threads: int = 1, isa: str = isas()[0]) -> onnxruntime.InferenceSession:
    """Opens a session of a model with one product."""
    return open_model(operator_model(product.attributes(), product.stored()), threads, {"isa": isa})


def by_onnxruntime(session: onnxruntime.InferenceSession, x: Float) -> Float:
    """x [M, K] -> [M, N]."""
    (y,) = session.run(["y"], {"x": x[None]})
    output: Float = y[0]
    return output


def by_cpu_target(product: Product, x: Float, isa: str = isas()[0]) -> Float:
    """The product by a step of a cpu program, with one thread."""
    b, f = LoweredBuilder(), product.format
    operands: list[Operand] = [b.values(x)]
    attributes: dict[str, int | str] = {"has_bias": product.bias is not None}
    if f.storage == "bf16":
        operands = [b.buffer(T, x.shape[1], dtype="bf16", padding=2)]
        b.step("cast_bf16", [b.values(x)], operands)
    elif f.rounded:
        operands = b.quantized(operands[0], f.activation_group)
        attributes |= {"activation_group": f.activation_group, "has_offsets": f.offsets}
    if f.scaled:
        attributes["weight_group"] = f.weight_group
    if product.activation:
        attributes["activation"] = product.activation
    operands.append(b.weight(product.weight, f.layout, f.dtype))
    operands += [b.weight(factors, "panel32") for factors in (product.scales, product.offsets) if factors is not None]
    operands += [] if product.bias is None else [b.weight(product.bias)]
    op = "quantized_linear" if f.rounded else "linear"
    step = b.step(op, operands, [b.buffer(T, len(product.weight))], **attributes)
    (out,) = b.run(step, len(x), isa=isa)
    return out.astype(np.float32, copy=False)
