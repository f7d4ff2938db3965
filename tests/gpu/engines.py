"""Engines of the tiny decoder for the GPU at hand, built by TensorRT-RTX itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import pytest

from enginewright.plugins.engines.section import ProfileSection
from enginewright.plugins.steps.linear_io import LinearCacheGroup, LinearIo
from tests.plugins.steps import tiny_onnx as tiny

C = 33
PROFILES = (
    ProfileSection(phase="decode", B=(1, 4, 8), S=(1, 1, 1), R=(1, 4, 8), C=C),
    ProfileSection(phase="prefill", B=(1, 1, 2), S=(1, 8, 16), R=(1, 1, 32), C=C),
)


@contextmanager
def equal_heads() -> Iterator[None]:
    """TensorRT-RTX attends to keys and values of one size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "DV", tiny.D)
        groups = tuple(group.model_copy(update={"value_head_size": tiny.D}) for group in tiny.GROUPS)
        patch.setattr(tiny, "GROUPS", groups)
        yield


def linear_io() -> LinearIo:
    groups = tuple(LinearCacheGroup.from_group(group) for group in tiny.GROUPS)
    return LinearIo(file="", opset=24, onnxruntime="1.25.0", cache_groups=groups, summed_products=8)


def graph() -> onnx.ModelProto:
    """The tiny model with slots of one size, as TensorRT wants them."""
    model = tiny.make_model()
    for value in (*model.graph.input, *model.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param == "C":
                size.dim_value = C
    return model


def build(path: Path, capability: int) -> None:
    """Writes the plan. One for a GPU that TensorRT-RTX doesn't name is built for the current one. Skips if refused."""
    trt: Any = pytest.importorskip("tensorrt_rtx", reason="pip install 'enginewright[tensorrt-rtx]'")
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(graph().SerializeToString()), parser.get_error(0).desc()
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True  # no kernel of its own has heads as small as these
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    known = trt.ComputeCapability.__members__
    config.set_compute_capability(known.get(f"SM{capability}", trt.ComputeCapability.CURRENT), 0)
    for sizes in PROFILES:
        profile = builder.create_optimization_profile()
        for tensor in (network.get_input(i) for i in range(network.num_inputs)):
            shape = list(tensor.shape)
            letters = [tensor.get_dimension_name(i) for i in range(len(shape))]
            ranges = {"B": sizes.B, "S": sizes.S, "R": sizes.R}
            if -1 in shape:
                at = [[ranges[a][k] if n == -1 else n for n, a in zip(shape, letters, strict=True)] for k in range(3)]
                profile.set_shape(tensor.name, *at)
        assert config.add_optimization_profile(profile) >= 0
    plan = builder.build_serialized_network(network, config)
    if plan is None and f"SM{capability}" not in known:
        pytest.skip(f"TensorRT-RTX {trt.__version__} builds nothing for compute capability {capability}")
    assert plan is not None
    path.write_bytes(plan)
