"""Networks are built with the real library: that of TensorRT-RTX, which has TensorRT's interface but for plugins."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor

import pytest

from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.plugins.engines.plan import PlanHeader
from tests.acceptance.tiny_configs import tiny_family
from tests.conftest import make_tiny_model
from tests.plugins.graphs.linear_session import lowered
from tests.plugins.tensorrt.compile.conftest import MakeBundle
from tests.plugins.tensorrt.compile.cut_network import build

# Rotations of a part of the heads, biases and layer norms; a softcap, windows and a tied table; sinks and experts with
# limits; value heads of a size of their own, expanded keys and routing by groups.
FAMILIES = ("llama", "gpt_neox", "gemma2", "gpt_oss", "deepseek_v3")


def check(bundle: str, rtx: ProcessPoolExecutor, dtype: str, layers: int) -> None:
    ran = rtx.submit(build, bundle).result()
    assert ran.keys() == {"decode", "prefill"}
    for engine in ran.values():
        header = PlanHeader.parse(engine["plan"], "plan")
        assert (header.bytes, header.compute_capabilities) == (len(engine["plan"]), ("8.9",))
        assert engine["q"] == [f"DataType.{dtype}"] * 3 * layers
        assert all(any(f"layers.{i}." in name for name in engine["layers"]) for i in range(layers))


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, make_bundle: MakeBundle, rtx: ProcessPoolExecutor) -> None:
    check(str(make_bundle(lowered(tiny_family(family)))), rtx, "HALF", 2)


@pytest.mark.parametrize(("family", "dtype"), [("Llama", "FLOAT"), ("Qwen3", "BF16"), ("GPTNeoX", "HALF")])
def test_another_size_in_every_type(family: str, dtype: str, make_bundle: MakeBundle, rtx: ProcessPoolExecutor) -> None:
    model = make_tiny_model(family, num_hidden_layers=3, hidden_size=128, intermediate_size=224)
    name = {"FLOAT": "f32", "BF16": "bf16", "HALF": "f16"}[dtype]
    check(str(make_bundle(lowered(model), name)), rtx, dtype, 3)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stored", "weights"),
    [
        ("i8", WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)),
        (
            "i4",
            WeightFormat(storage="int4", group_size=64, zero_point=True, activation="int8", activation_group_size=64),
        ),
        ("i4", WeightFormat(storage="int4", group_size=128, activation="int8", activation_group_size=128)),
        ("i4", WeightFormat(storage="int4", activation="int8")),
        ("fp8", WeightFormat(storage="fp8")),
    ],
)
def test_weights_of_fewer_bits(
    stored: str, weights: WeightFormat, make_bundle: MakeBundle, rtx: ProcessPoolExecutor
) -> None:
    model = make_tiny_model("Llama", hidden_size=128, intermediate_size=256, num_attention_heads=8)
    bundle = make_bundle(lowered(model, PassContext(recipe=PassOptions(weights=WeightFormats(default=weights)))))
    described = json.loads((bundle / "targets/tensorrt/network.json").read_text())["weights"].values()
    assert sum(weight["dtype"] == stored for weight in described) >= 8  # the linears of two layers, and others
    check(str(bundle), rtx, "HALF", 2)
