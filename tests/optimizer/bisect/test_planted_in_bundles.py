"""Bugs planted in the weights and in the program of a bundle are found, with layer and tensor named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from enginewright.optimizer.bisect import FirstDivergence, Given, bisect
from enginewright.optimizer.bisect.bisection import EMISSION
from enginewright.runtime.bundle.reader import Bundle
from tests.optimizer.bisect.planting import Bundles, Planting, drop_bias, scale_rows, shift_rope, swap_halves
from tests.passes.captured import tiny

pytestmark = pytest.mark.usefixtures("replayed_once")

CASES = [("Qwen2", "f32"), ("Qwen2", "int8"), ("Qwen2", "int4"), ("Gemma2", "f32"), ("Gemma2", "int8")]
LAYER = "model.layers.1"


def divergence(family: str, bundle: Path) -> FirstDivergence:
    first = bisect(Given(tiny(family)[0]), Given(bundle)).first_divergence
    assert first is not None
    assert first.stage == EMISSION and first.pass_name is None
    assert first.error > first.tolerance
    return first


def planted(bundle: Path, folder: Path, plant: Callable[[Planting], None]) -> Path:
    planting = Planting(bundle, folder / "planted")
    plant(planting)
    return planting.folder


def weights(bundle: Path, prefix: str) -> list[str]:
    """The tensors that a weight is stored as."""
    return [name for name in Bundle.open(bundle).index.tensors if name.startswith(prefix) and "bias" not in name]


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_a_bundle_as_exported_agrees(family: str, recipe: str, bundles: Bundles) -> None:
    report = bisect(Given(tiny(family)[0]), Given(bundles(family, recipe)))
    assert report.first_divergence is None
    # Float32 sums in two orders; of rounded activations, and of keys and values in bf16 (2^-8 apart), some may fall on
    # the other run.
    assert report.largest_error is not None and report.largest_error < (2e-6 if recipe == "f32" else 8e-3)
    assert report.values_compared > 40


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_a_weight_times_1_01(family: str, recipe: str, bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles(family, recipe)
    name = f"{LAYER}.self_attn.q_proj+k_proj+v_proj.weight" + ("" if recipe == "f32" else ".scales")
    first = divergence(family, planted(bundle, tmp_path, lambda p: scale_rows(p, name, 64, 96)))
    assert first.layer == LAYER
    assert first.value_name == f"output of {LAYER}.self_attn.k_proj"
    assert any(f"{LAYER}.self_attn.k_proj.weight[0:32]" in tensor for tensor in first.tensors)
    assert re.search(r"is 1\.010[0-2] times", first.reasons[0])  # scales and offsets are rounded to f16
    assert "k_proj" in first.reasons[0]
    assert first.others == []
    assert first.calls[-1].endswith("linear (" + " + ".join(f"{LAYER}.self_attn.{x}_proj" for x in "qkv") + ")")


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_gate_and_up_swapped(family: str, recipe: str, bundles: Bundles, tmp_path: Path) -> None:
    bundle = bundles(family, recipe)

    def swap(planting: Planting) -> None:
        for name in weights(bundle, f"{LAYER}.mlp.gate_proj+up_proj.weight"):
            swap_halves(planting, name)

    first = divergence(family, planted(bundle, tmp_path, swap))
    assert first.layer == LAYER
    assert first.value_name == f"output of {LAYER}.mlp.gate_proj"
    assert "are swapped" in first.reasons[0]
    assert "gate_proj.weight" in first.reasons[0] and "up_proj.weight" in first.reasons[0]
    assert first.others == [f"output of {LAYER}.mlp.up_proj"]


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_a_rope_one_position_off(family: str, recipe: str, bundles: Bundles, tmp_path: Path) -> None:
    first = divergence(
        family, planted(bundles(family, recipe), tmp_path, lambda p: shift_rope(p, f"{LAYER}.self_attn"))
    )
    assert first.layer == LAYER
    assert first.value_name == f"key, as attention gets it, of {LAYER}.self_attn"
    assert any("inv_freq" in tensor for tensor in first.tensors)
    assert "position that rope has is off by +1" in first.reasons[0]
    assert first.others == [f"query, as attention gets it, of {LAYER}.self_attn"]


@pytest.mark.parametrize("recipe", ["f32", "int8"])
@pytest.mark.parametrize(
    ("family", "layer", "where", "module", "tensor"),
    [
        (
            "Qwen2",
            LAYER,
            f"{LAYER}.self_attn.q_proj + {LAYER}.self_attn.k_proj + {LAYER}.self_attn.v_proj",
            "self_attn.q_proj",
            "self_attn.q_proj.bias[0:64]",
        ),
        (
            "GPTNeoX",
            "gpt_neox.layers.0",
            "gpt_neox.layers.0.attention.query_key_value",
            "attention.query_key_value",
            "attention.query_key_value.bias",
        ),
    ],
)
def test_a_dropped_bias(
    family: str, layer: str, where: str, module: str, tensor: str, recipe: str, bundles: Bundles, tmp_path: Path
) -> None:
    first = divergence(family, planted(bundles(family, recipe), tmp_path, lambda p: drop_bias(p, where)))
    assert first.layer == layer
    assert first.value_name == f"output of {layer}.{module}"
    assert first.reasons[0].startswith("B doesn't add the bias") and f"{layer}.{tensor}" in first.reasons[0]
    assert "it was dropped" in first.reasons[1]
    assert f"{layer}.{tensor}" in first.tensors[0] and first.tensors[0].endswith("which B doesn't add")
