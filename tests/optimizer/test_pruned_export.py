"""Pruned models as bundles: run as the program says, counted as they are, in every format, and bisected by rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.bisect import Given, bisect
from enginewright.optimizer.bisect.bisection import EMISSION
from enginewright.optimizer.bisect.replay import replay
from enginewright.optimizer.capture import capture
from enginewright.optimizer.export import export
from enginewright.optimizer.export.report import ExportReport
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.sections import BudgetSection, CalibrationSection
from enginewright.passes.framework.pruning import Pruning
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.shared.errors import PassError, VerificationError
from enginewright.runtime.shared.progress import silent
from tests.conftest import make_tiny_model
from tests.optimizer.bisect.planting import Planting, scale_rows

PRUNE = Pruning(channels=0.5, heads=0.5, layers=1)


def recipe(weights: str = "f32", prune: Pruning = PRUNE, max_kl: float = 5.0) -> Recipe:
    small = CalibrationSection(tokens=256, sequence_length=32)
    update = {"name": "pruned", "prune": prune, "budget": BudgetSection(max_kl=max_kl), "calibration": small}
    return load_recipe(weights).model_copy(update=update)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_tiny_model("Llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def exported(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportReport]:
    path = tmp_path_factory.mktemp("pruned") / "pruned.bundle"
    return path, export(model, path, recipe=recipe())


def test_a_pruned_bundle_is_served_as_its_program_says(
    model: PreTrainedModel, exported: tuple[Path, ExportReport], tmp_path: Path
) -> None:
    path, _ = exported
    captured = capture(model)
    stages = replay(
        model,
        captured,
        recipe(),
        "cpu",
        calibration=None,
        scratch=tmp_path,
        progress=silent,
    )
    program = stages[-1].program
    tokens = torch.arange(3, 40, dtype=torch.int32)
    expected = program.evaluate(packed_inputs(program, [tokens]))[0]
    with LLM(path, threads=1) as llm:
        logits = llm.logits(tokens.tolist())
        generated = llm.generate([tokens.tolist()])[0]
    # Float32 sums in two orders.
    np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-4, atol=1e-4)
    assert generated.token_ids


def test_parameters_and_bytes_are_those_of_the_pruned_model(
    model: PreTrainedModel, exported: tuple[Path, ExportReport]
) -> None:
    path, report = exported
    (heads,) = [p for p in report.passes if p.name == "prune_heads"]
    groups = [f.value for f in heads.figures if f.name == "key/value heads kept"]
    # q and o of 2 heads, k and v of 1 or 2, 64 channels, two norms
    layers = [2 * 64 * 32 + 2 * 64 * 16 * n + 3 * 64 * 64 + 2 * 64 for n in groups]
    embeddings = sum(p.numel() for n, p in model.named_parameters() if "layers" not in n)
    assert len(layers) == 2
    assert report.parameters == embeddings + sum(layers)
    assert Bundle.open(path).model.parameters == report.parameters
    weights = sum(s.nbytes for s in report.storage)
    assert 4 * report.parameters <= weights < 4.2 * report.parameters  # and the tables of positions
    assert len(cached_layers(path)) == 2


def cached_layers(path: Path) -> list[int]:
    return sorted(layer for group in Bundle.open(path).program("cpu").cache_groups for layer in group.layers)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats_on_top(weights: str, model: PreTrainedModel, tmp_path: Path) -> None:
    report = export(model, tmp_path / "m.bundle", recipe=recipe(weights, Pruning(channels=0.3)))
    (channels,) = [p for p in report.passes if p.name == "prune_channels"]
    counts = {f.value for f in channels.figures if f.name == "channels kept"}
    assert counts == {96.0 if weights == "int8" else 64.0}  # groups of 32, and of 64
    storages = {s.dtype for s in report.storage if s.layer is not None}
    assert ("i8" if weights == "int8" else "u4") in storages


@pytest.mark.matrix
def test_a_planted_bug_is_found_in_a_pruned_bundle(
    model: PreTrainedModel, exported: tuple[Path, ExportReport], tmp_path: Path
) -> None:
    path, _ = exported
    first, last = cached_layers(path)
    module = f"model.layers.{last}.mlp.down_proj"
    assert bisect(Given(model), Given(path)).first_divergence is None
    planting = Planting(path, tmp_path / "planted")
    scale_rows(planting, f"{module}.weight", 16, 48)
    divergence = bisect(Given(model), Given(planting.folder)).first_divergence
    assert divergence is not None
    assert divergence.stage == EMISSION and divergence.module == module
    assert any(f"{module}.weight[0:64]" in tensor for tensor in divergence.tensors)
    assert divergence.others == []
    gate = f"model.layers.{first}.mlp.gate_proj"
    planting = Planting(path, tmp_path / "planted too")
    scale_rows(planting, f"{gate.removesuffix('gate_proj')}gate_proj+up_proj.weight", 0, 64)
    divergence = bisect(Given(model), Given(planting.folder)).first_divergence
    assert divergence is not None and divergence.module == gate
    assert any(f"{gate}.weight[" in tensor for tensor in divergence.tensors)


def test_more_is_lost_than_the_budget_allows(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="after the pass drop_layers the program is too far from its source"):
        export(model, tmp_path / "never.bundle", recipe=recipe(prune=Pruning(layers=2), max_kl=0.01))
    with pytest.raises(PassError, match=r"leaves model\.layers\.0\.mlp\.down_proj none of its"):
        export(model, tmp_path / "never.bundle", recipe=recipe(prune=Pruning(channels=0.95)))
    assert list(tmp_path.iterdir()) == []
