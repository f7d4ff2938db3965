"""The parts to remove within a KL budget: least contributions go first, the real KL is met, the choice is exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.cli.report import print_summary
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.sections import BudgetSection, CalibrationSection
from enginewright.optimizer.report.bundle_report import open_report
from enginewright.optimizer.search.pruning_sensitivity import measure_layers
from enginewright.optimizer.search.report import RECIPE_FILE
from enginewright.passes.framework.pruning import Pruning
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import RecipeError, VerificationError
from tests.conftest import make_tiny_model
from tests.optimizer.search.formats_prepared import random_tokens
from tests.passes.captured import normalized


def recipe(**prune: object) -> Recipe:
    return Recipe(
        name="mine",
        prune=Pruning.model_validate(prune),
        calibration=CalibrationSection(tokens=256, sequence_length=32),
    )


def model_with_less() -> PreTrainedModel:
    """Layer 1 adds next to nothing; in layer 2 half of the channels and a head of each group do."""
    model = make_tiny_model("Llama", num_hidden_layers=3)
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.get_submodule(f"model.layers.1.{name}").weight.mul_(1e-4)
        model.get_submodule("model.layers.2.mlp.down_proj").weight[:, ::2] *= 1e-4
        model.get_submodule("model.layers.2.self_attn.o_proj").weight[:, 16:48] *= 1e-4
    return model


@pytest.mark.matrix
def test_what_adds_the_least_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_with_less()
    first, second = tmp_path / "first.bundle", tmp_path / "second.bundle"
    report = export(model, first, recipe=recipe(channels=0.5, heads=0.5, layers=1, max_kl=0.001))
    pruning = report.pruning
    assert pruning is not None
    assert set(pruning.measured_kl) == {"calibration tokens", "random tokens"}
    assert max(pruning.measured_kl.values()) <= 0.001
    zeroth, dropped, halved = pruning.layers
    assert dropped.layer == "model.layers.1" and dropped.dropped
    assert (halved.channels, halved.heads, halved.dropped) == (0.5, 0.5, False)
    assert not zeroth.parameters and zeroth.kl_channels is not None and zeroth.kl_channels > 0.001
    assert report.parameters == sum(p.numel() for p in model.parameters()) - pruning.parameters_removed
    print_summary(open_report(first))
    printed = capsys.readouterr().out
    assert "model.layers.1: dropped" in printed
    assert "model.layers.2: 50% of its heads and 50% of its channels" in printed

    written = load_recipe(first / RECIPE_FILE)
    assert written.prune is not None and written.prune.max_kl is None
    again = export(model, second, recipe=first / RECIPE_FILE)
    assert again.pruning is None and again.parameters == report.parameters
    assert Bundle.open(second).model.parameters == report.parameters


def test_a_budget_that_nothing_meets_says_how_near_it_came(tmp_path: Path) -> None:
    model = make_tiny_model("Llama")
    with pytest.raises(VerificationError, match=r"nothing that may go is within max_kl = 1e-09 of \[prune\]: without "):
        export(model, tmp_path / "never.bundle", recipe=recipe(channels=0.5, max_kl=1e-9))
    with pytest.raises(RecipeError, match="nothing of this model can go within these shares"):
        export(model, tmp_path / "never.bundle", recipe=recipe(channels=0.05, max_kl=1.0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layers", [2, 3])
def test_one_layer_has_to_stay_whatever_the_recipe_allows(layers: int) -> None:
    program, _ = normalized("Llama", num_hidden_layers=layers)
    prunable, _ = measure_layers(program, Pruning(layers=8), random_tokens(20), lambda *_: None, 1 << 20)
    assert sum(layer.whole is not None for layer in prunable) == layers - 1


def test_a_budget_within_another() -> None:
    with pytest.raises(ValueError, match=r"max_kl is 0\.2 in \[prune\], and all together may cost 0\.1 by \[budget\]"):
        Recipe(name="m", prune=Pruning(channels=0.5, max_kl=0.2), budget=BudgetSection(max_kl=0.1))
