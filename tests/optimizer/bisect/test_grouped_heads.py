"""A bundle whose key/value heads were grouped: what is wrong in it is found, down to the source's rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.bisect import Given, bisect
from enginewright.optimizer.bisect.bisection import EMISSION
from tests.optimizer.bisect.planting import Planting, emit_bundle, scale_rows
from tests.passes.captured import tiny

pytestmark = pytest.mark.usefixtures("captured_once")  # matrices of the mixes are in files that go with each run

LAYER = "model.layers.1.self_attn"
RECIPE = """
name = "grouped"
[attention]
kv_heads = 2
grouping = "neighbours"
[calibration]
tokens = 512
sequence_length = 64
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports a model with four heads of keys and values, which have become two."""
    folder = tmp_path_factory.mktemp("grouped")
    recipe = folder / "grouped.toml"
    recipe.write_text(RECIPE)
    return emit_bundle(tiny("Llama", num_key_value_heads=4)[0], folder / "bundle", str(recipe))


def test_a_bundle_as_exported_agrees(bundle: Path) -> None:
    """After the conversion everything is exact again, and is compared as such, value by value."""
    report = bisect(Given(tiny("Llama", num_key_value_heads=4)[0]), Given(bundle))
    assert report.first_divergence is None
    assert report.largest_error is not None and report.largest_error < 2e-6
    assert report.values_compared > 40


def test_a_weight_times_1_01(bundle: Path, tmp_path: Path) -> None:
    name = f"{LAYER}.q_proj+k_proj+v_proj.weight"  # 64 rows of queries, 32 of keys, 32 of values
    planting = Planting(bundle, tmp_path / "key")
    scale_rows(planting, name, 64, 96)
    divergence = bisect(Given(tiny("Llama", num_key_value_heads=4)[0]), Given(planting.folder)).first_divergence
    assert divergence is not None and divergence.stage == EMISSION
    assert divergence.layer == "model.layers.1" and divergence.value_name == f"output of {LAYER}.k_proj"
    # Each new head is made of two of the source's.
    assert any(f"{LAYER}.k_proj.weight[0:32]" in t and f"{LAYER}.k_proj.weight[32:64]" in t for t in divergence.tensors)
    assert "k_proj" in divergence.reasons[0] and "is 1.0100 times" in divergence.reasons[0]

    planting = Planting(bundle, tmp_path / "output")
    scale_rows(planting, f"{LAYER}.o_proj.weight", 0, 64)
    divergence = bisect(Given(tiny("Llama", num_key_value_heads=4)[0]), Given(planting.folder)).first_divergence
    assert divergence is not None and divergence.layer == "model.layers.1"  # its product goes right into the residual
    assert any(f"{LAYER}.o_proj.weight[0:64]" in tensor for tensor in divergence.tensors)
    assert f"{LAYER}.o_proj.weight" in divergence.reasons[0] and "is 1.0100 times" in divergence.reasons[0]
