"""Converts a ``Network`` to TensorRT's INetworkDefinition, strongly typed. Layers are named after the modules that they
belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import tensorrt as trt

from enginewright.runtime.shared.errors import TargetError

from ...steps.paged_section import PagedProfile
from . import layers_elementwise, layers_products, layers_views
from .layers_elementwise import Handler
from .network import KV_WRITE, PAGED_ATTENTION, QUANTIZED_KV_WRITE, QUANTIZED_PAGED_ATTENTION, Network
from .network_builder import TYPES, NetworkBuilder, WeightBytes

_HANDLERS: Mapping[str, Handler] = {
    **layers_elementwise.HANDLERS,
    **layers_products.HANDLERS,
    **layers_views.HANDLERS,
}

OPERATORS = frozenset(
    {*_HANDLERS, KV_WRITE, QUANTIZED_KV_WRITE, PAGED_ATTENTION, QUANTIZED_PAGED_ATTENTION},
)
"""The operators that a network may contain."""


class AttentionLayers(Protocol):
    """Adds the layers for a call of one of our own operators, which is the builder's current call."""

    def write(self, b: NetworkBuilder) -> tuple[trt.ITensor, ...]:
        """Adds the cache write; returns the two written caches, and their scales."""

    def attend(self, b: NetworkBuilder) -> trt.ITensor:
        """Adds attention, and returns its result."""


def build_network(
    network: trt.INetworkDefinition, description: Network, weights: WeightBytes, attention: AttentionLayers
) -> NetworkBuilder:
    """Adds everything in ``description`` to an empty, strongly typed network.

    Returns the builder, which must live until the engine is built, because TensorRT reads its constants. Raises
    TargetError, naming the call, if TensorRT rejects one.
    """
    b = NetworkBuilder(network, description, weights)
    for name, port in description.inputs.items():
        dims = trt.Dims([size if isinstance(size, int) else -1 for size in port.shape])
        tensor = network.add_input(name, TYPES[port.dtype], dims)
        for i, size in enumerate(port.shape):
            if isinstance(size, str):
                tensor.set_dimension_name(i, size.replace(" ", ""))
        b.tensors[name] = tensor
    for call in description.calls:
        b.call = call
        result = _results(b, attention)
        b.tensors.update(zip(call.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    b.call = None
    for name in description.outputs:
        tensor = b.tensor(name)
        tensor.name = name
        network.mark_output(tensor)
    return b


def _results(b: NetworkBuilder, attention: AttentionLayers) -> trt.ITensor | tuple[trt.ITensor, ...]:
    assert b.call is not None
    match b.call.op:
        case "ew.kv_write" | "ew.quantized_kv_write":
            return attention.write(b)
        case "ew.paged_attention" | "ew.quantized_paged_attention":
            return attention.attend(b)
    if b.call.op not in _HANDLERS:
        raise TargetError(
            f"{b.call.op} at {b.call.name}: the tensorrt target has no such operator",
            hint="Build with the version of enginewright that exported the bundle, or a newer one.",
        )
    return _HANDLERS[b.call.op](b)


def add_profile(
    builder: trt.Builder,
    config: trt.IBuilderConfig,
    network: trt.INetworkDefinition,
    description: Network,
    sizes: PagedProfile,
) -> None:
    """Adds the sizes of the engine's steps as an optimization profile. Raises TargetError if TensorRT rejects them."""
    ranges = {"T": sizes.T, "B": sizes.B, "R": sizes.R, "M": sizes.M, "P": sizes.P}
    ranges["B + 1"] = (sizes.B[0] + 1, sizes.B[1] + 1, sizes.B[2] + 1)
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        name = network.get_input(i).name
        letters = description.inputs[name].shape if name in description.inputs else ()
        if not any(isinstance(size, str) for size in letters):
            continue
        shapes = [[size if isinstance(size, int) else ranges[size][which] for size in letters] for which in range(3)]
        profile.set_shape(name, *(trt.Dims(shape) for shape in shapes))
    if config.add_optimization_profile(profile) < 0:
        raise TargetError(f"{sizes.phase}: TensorRT doesn't take these sizes: {ranges}", hint="Export for other sizes.")
