"""A bundle of 2:4 weights: what is wrong in what is kept is found, down to the source's rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.bisect import Given, bisect
from enginewright.optimizer.bisect.bisection import EMISSION
from enginewright.runtime.bundle.reader import Bundle
from tests.optimizer.bisect.planting import Planting, emit_bundle, scale_rows
from tests.passes.captured import tiny

pytestmark = pytest.mark.usefixtures("replayed_once")

LAYER = "model.layers.1.self_attn"
RECIPE = """
name = "sparse"
[weights]
default = { sparsity = "2:4" }
sparsify = "magnitude"
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    recipe = folder / "sparse.toml"
    recipe.write_text(RECIPE)
    return emit_bundle(tiny("Llama")[0], folder / "bundle", str(recipe))


def test_a_bundle_as_exported_agrees(bundle: Path) -> None:
    assert sum(t.layout == "sparse32" for t in Bundle.open(bundle).index.tensors.values()) == 8
    report = bisect(Given(tiny("Llama")[0]), Given(bundle))
    assert report.first_divergence is None
    assert report.values_compared > 40


def test_a_weight_times_1_01(bundle: Path, tmp_path: Path) -> None:
    name = next(n for n in Bundle.open(bundle).index.tensors if n.startswith(f"{LAYER}.q_proj+k_proj+v_proj.weight"))
    planting = Planting(bundle, tmp_path / "key")
    scale_rows(planting, name, 64, 96)
    divergence = bisect(Given(tiny("Llama")[0]), Given(planting.folder)).first_divergence
    assert divergence is not None and divergence.stage == EMISSION
    assert divergence.layer == "model.layers.1" and divergence.value_name == f"output of {LAYER}.k_proj"
    assert any(f"{LAYER}.k_proj.weight[0:32]" in tensor for tensor in divergence.tensors)
