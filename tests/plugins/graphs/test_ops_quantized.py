from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.fx.node import Node

from enginewright.optimizer.verify.random_tokens import tolerance_of
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.framework.weight_formats import WeightFormats
from tests.acceptance.tiny_configs import tiny_family
from tests.plugins.graphs.linear_session import LinearSession, emit, lowered, run_plan, tokens_of

ew = torch.ops.ew

INT8 = WeightFormat(storage="int8", activation="int8")
INT8_GROUPS = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)
INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
INT4_CHANNEL = WeightFormat(storage="int4", activation="int8")
INT4_CHANNEL_OFFSETS = WeightFormat(storage="int4", zero_point=True, activation="int8")
INT4_128 = WeightFormat(storage="int4", group_size=128, activation="int8", activation_group_size=128)
FP8, FP8_GROUPS = WeightFormat(storage="fp8"), WeightFormat(storage="fp8", group_size=32)
INT4_OFFSETS = WeightFormat(storage="int4", group_size=64, zero_point=True, activation="int8", activation_group_size=64)


def _with_floats(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a call if activations aren't rounded, and weights are the floats that their integers stand for."""
    assert callable(node.target)
    if node.target is ew.quantize_activation.default:
        return (args[0],) * 3
    products = {ew.quantized_linear.default: ew.linear, ew.quantized_grouped_linear.default: ew.grouped_linear}
    if node.target not in products:
        return node.target(*args, **kwargs)
    a = dict(zip(bound_arguments(node), args, strict=False))
    width = a["weight"].shape[-1] // a["weight_scales"].shape[-1]

    def spread(factors: torch.Tensor) -> torch.Tensor:
        return factors.float().repeat_interleave(width, -1)

    weight = a["weight"].float() * spread(a["weight_scales"])
    if a["weight_offsets"] is not None:
        weight = weight + spread(a["weight_offsets"])
    between = [a["starts"]] if "starts" in a else []
    return products[node.target](a["values"], *between, weight, a["bias"])


@pytest.mark.parametrize(
    ("family", "default", "embeddings", "kinds"),
    [
        ("llama", INT8, INT8_GROUPS, {"INT8"}),
        ("gemma2", INT4, INT4, {"INT4", "UINT8"}),  # tied: by rows as pairs of values, and as a product's weight
        ("qwen2", INT4_OFFSETS, INT4_OFFSETS, {"INT4", "UINT8"}),
        ("mixtral", INT4_OFFSETS, INT8, {"INT4", "INT8"}),
        ("gemma2", INT4_CHANNEL, None, {"INT4", "UINT8"}),
        ("mixtral", INT4_CHANNEL_OFFSETS, INT8, {"INT4", "INT8"}),
        ("llama of 128", INT4_128, INT4_CHANNEL_OFFSETS, {"INT4", "UINT8"}),
        ("llama", WeightFormat(storage="bf16", activation="bf16"), None, {"BFLOAT16"}),
        ("gemma2", FP8, None, {"FLOAT8E4M3FN"}),  # tied
        ("mixtral", FP8_GROUPS, FP8, {"FLOAT8E4M3FN"}),
    ],
)
def test_weights_are_the_floats_that_they_stand_for(
    family: str, default: WeightFormat, embeddings: WeightFormat | None, kinds: set[str], tmp_path: Path
) -> None:
    formats = WeightFormats(default=default, embeddings=embeddings)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8} if family.endswith("128") else {}
    program = lowered(tiny_family(family.split()[0], **sizes), PassContext(recipe=PassOptions(weights=formats)))
    io = emit(program, tmp_path)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    names = {value: name for name, value in onnx.TensorProto.DataType.items()}
    external = {names[t.data_type] for t in model.graph.initializer if t.external_data}
    assert external - {"FLOAT"} == kinds
    logits = run_plan(LinearSession(tmp_path, io))
    inputs = packed_inputs(program, [torch.tensor(tokens_of(slot)) for slot in logits])
    compute = _with_floats if default.storage != "bf16" else _without_rounding
    expected = program.evaluate(inputs, compute=compute)[0].numpy()
    # Both are products of floats in another order, as of a model that was never quantized.
    atol = tolerance_of(io.summed_products) * float(np.abs(expected).max())
    np.testing.assert_allclose(np.concatenate(list(logits.values())), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("weights", "hidden"), [(INT4_CHANNEL, 96), (INT4_CHANNEL_OFFSETS, 64), (INT4_128, 128)])
def test_onnxruntime_multiplies_4_bits_as_they_are(weights: WeightFormat, hidden: int, tmp_path: Path) -> None:
    """With a scale a channel, too: of blocks of all of K it would make floats at every step."""
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": hidden // 16}
    formats = WeightFormats(default=weights, embeddings=INT8)
    emit(lowered(tiny_family("llama", **sizes), PassContext(recipe=PassOptions(weights=formats))), tmp_path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    kinds = [n.op_type for n in onnx.load(tmp_path / "loaded.onnx", load_external_data=False).graph.node]
    assert kinds.count("MatMulNBits") >= 7  # q, k and v, o, gate and up of two layers, and the head


def _without_rounding(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """bf16 weights with inputs that keep their 32 bits."""
    if node.target is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
        return args[0]
    if node.target is ew.linear.default:
        return ew.linear(args[0], args[1].float(), *args[2:])
    assert callable(node.target)
    return node.target(*args, **kwargs)
