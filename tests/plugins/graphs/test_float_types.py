"""A graph of 16-bit floats computes what the one of 32 does, but for rounding; what needs 32 bits has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from enginewright.plugins.graphs.float_types import FloatType, narrowed
from enginewright.runtime.shared.errors import UnsupportedModelError
from tests.acceptance.tiny_configs import tiny_family
from tests.plugins.graphs.linear_session import LinearSession, emit, lowered, reference_logits, run_plan

FAMILIES = ("gpt_neox", "gemma2", "gpt_oss")
"""Biases, and rotations of a part; a softcap and windows; sinks and experts."""


def _kl(found: np.ndarray, expected: np.ndarray) -> float:
    """Mean KL in nats of two arrays of logits [T, V]."""
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_f16_beside_transformers(family: str, tmp_path: Path) -> None:
    model = tiny_family(family)
    io = emit(lowered(model), tmp_path, floats="f16", capacity=32)
    assert {group.dtype for group in io.cache_groups} == {"f16"}
    expected = reference_logits(model)
    for slot, logits in run_plan(LinearSession(tmp_path, io)).items():
        assert logits.dtype == np.float32
        # 11 bits of each of some ten roundings between logits: KL goes with their square
        assert _kl(logits, expected[slot]) < 1e-4
        assert _kl(logits, expected[slot]) > 0


@pytest.mark.parametrize("floats", ["f16", "bf16"])
def test_what_has_which_type(floats: FloatType, tmp_path: Path) -> None:
    emit(lowered(tiny_family("llama")), tmp_path, floats=floats, capacity=48)
    model = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "model.onnx", load_external_data=False))
    narrow = {"f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[floats]
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    types = {v.name: v.type.tensor_type.elem_type for v in values}
    kinds: dict[str, set[int]] = {}
    for node in model.graph.node:
        kinds.setdefault(node.op_type, set()).update(types[name] for name in node.output)
    for kind in ("MatMul", "Attention", "TensorScatter", "RMSNormalization", "RotaryEmbedding"):
        assert kinds[kind] == {narrow}
    assert kinds["Cos"] == {TensorProto.FLOAT} == {types["logits"]}
    shapes = {v.name: [d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    assert "mask" not in shapes and shapes["past_key_0"][2] == 48  # places are fixed: the graph makes its mask
    weights = {t.name: t.data_type for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL}
    assert narrow in weights.values()
    assert all(kind == TensorProto.FLOAT for name, kind in weights.items() if "norm" in name or "inv_freq" in name)


def test_a_weight_that_f16_does_not_hold(tmp_path: Path) -> None:
    model = tiny_family("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 7e4
    with pytest.raises(UnsupportedModelError, match=r"weight lm_head.*beyond 65,504, which f16 does not have\n.*bf16"):
        emit(lowered(model), tmp_path, floats="f16")
    emit(lowered(model), tmp_path, floats="bf16")


def test_constants_stay_finite() -> None:
    least = np.asarray([np.finfo(np.float32).min, 1.5, np.inf], np.float32)
    assert narrowed(least, TensorProto.FLOAT16).tolist() == [-65504.0, 1.5, np.inf]
    assert narrowed(least, TensorProto.BFLOAT16).astype(np.float32)[0] == pytest.approx(-3.39e38, rel=1e-2)
