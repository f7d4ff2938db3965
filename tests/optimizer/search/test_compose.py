"""One budget for what goes of a model and for formats: the smaller of two candidates, and made again as it was."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.capture import capture
from enginewright.optimizer.cli.report import print_summary
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.sections import CalibrationSection
from enginewright.optimizer.report.bundle_report import open_report
from enginewright.optimizer.search.compose import (
    FORMATS_ALONE,
    SHAPES_TOO,
    Searching,
    search,
    search_captured,
    search_shapes,
)
from enginewright.optimizer.search.kv_heads import KvHeadSearch
from enginewright.optimizer.search.report import RECIPE_FILE, KvSearchReport
from enginewright.optimizer.search.search import Found, NothingToChooseError, Task
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.kv_options import KvOptions
from enginewright.passes.framework.pruning import Pruning
from enginewright.runtime.shared.errors import RequestError, VerificationError
from enginewright.runtime.shared.progress import silent
from tests.conftest import make_tiny_model
from tests.optimizer.search.formats_prepared import random_tokens
from tests.optimizer.search.test_pruning import model_with_less


def smallest(**changes: object) -> Recipe:
    """The built-in recipe with the candidates of a quick search, calibrated on little."""
    recipe = load_recipe("smallest")
    assert recipe.auto is not None
    assert recipe.auto.candidates is not None
    few = recipe.auto.model_copy(update={"candidates": (recipe.auto.candidates[0], recipe.auto.candidates[4])})
    weights = recipe.weights.model_copy(update={"method": "nearest"})
    small = CalibrationSection(tokens=256, sequence_length=32)
    return recipe.model_copy(update={"auto": few, "weights": weights, "calibration": small, **changes})


def searching(model: PreTrainedModel, scratch: Path | None = None) -> Searching:
    return Searching(capture(model), random_tokens(32, 32, 32, 32), scratch, None, silent)


@pytest.mark.matrix
def test_what_is_not_missed_goes_and_the_bundle_is_smaller_than_by_formats_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path, again = model_with_less(), tmp_path / "smallest.bundle", tmp_path / "again.bundle"
    report = export(model, path, recipe=smallest())
    candidates = {c.name: c for c in report.ways}
    assert set(candidates) == {FORMATS_ALONE, SHAPES_TOO} and candidates[SHAPES_TOO].taken
    size = sum(s.nbytes for s in report.storage)
    alone = candidates[FORMATS_ALONE].bytes
    assert candidates[SHAPES_TOO].bytes == size and alone is not None
    assert size < 0.8 * alone  # a third of the layers, and half of a network
    assert report.auto is not None and report.pruning is not None
    # All of it from the source: shapes have their share, formats the rest.
    assert report.auto.shapes_kl <= 0.007 < max(report.auto.measured_kl.values()) <= 0.02
    assert report.verification[0].random_tokens.kl_mean <= 0.02
    print_summary(open_report(path))
    printed = capsys.readouterr().out
    assert "less of the model, then formats" in printed and "formats alone" in printed

    written = load_recipe(path / RECIPE_FILE)
    assert not written.searched and written.prune is not None
    assert written.prune.multiple == 64  # the groups of all candidates, whichever were chosen
    repeated = export(model, again, recipe=written)
    assert repeated.ways == [] and sum(s.nbytes for s in repeated.storage) == size
    for file in sorted(p.name for p in (path / "weights").iterdir()):
        assert (path / "weights" / file).read_bytes() == (again / "weights" / file).read_bytes()


def test_where_everything_is_missed_it_is_what_formats_alone_make() -> None:
    inputs, tight = searching(make_tiny_model("Llama")), Pruning(channels=0.5, heads=0.5, max_kl=1e-6)
    result = search(smallest(prune=tight), inputs)
    auto = search(smallest(prune=None), inputs)
    assert result.recipe == auto.recipe.model_copy(update={"name": "smallest"}) and result.recipe.prune is None
    assert result.auto is not None and auto.auto is not None
    assert result.auto.chosen == auto.auto.chosen and auto.candidates == ()
    nowhere = {c.name: c for c in result.candidates}[SHAPES_TOO]
    assert nowhere.bytes is None and "nothing that may go is within max_kl = 1e-06" in nowhere.reason
    # One head in each attention, and networks that are nobody's: nothing to search for isn't an error.
    bare = searching(make_tiny_model("Llama", num_key_value_heads=1, num_attention_heads=1, head_dim=64))
    heads = KvOptions(max_kl=0.001)
    result = search(smallest(prune=None, attention=heads), bare)
    assert (
        result.recipe.attention is None
        and "can be grouped" in {c.name: c for c in result.candidates}[SHAPES_TOO].reason
    )


def test_heads_and_channels_each_have_a_share() -> None:
    model = make_tiny_model("Llama", num_key_value_heads=4)
    with torch.no_grad():  # heads 0 and 1 of layer 0 are the same, and so are 2 and 3; layer 1 adds nothing
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = model.get_submodule(f"model.layers.0.self_attn.{name}").weight.view(4, 16, 64)
            weight[1::2] = weight[::2]
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.get_submodule(f"model.layers.1.{name}").weight.mul_(1e-4)
    shapes = {"prune": Pruning(layers=1, max_kl=0.002), "attention": KvOptions(max_kl=0.002)}
    result = search_shapes(smallest(**shapes), searching(model))
    assert result.recipe.prune is not None and result.recipe.prune.drop == ("model.layers.1",)
    assert result.recipe.attention is not None
    assert [(o.layers, o.kv_heads) for o in result.recipe.attention.overrides] == [("model.layers.0.self_attn", 2)]


def test_what_a_recipe_demands_is_not_a_candidate_to_give_up() -> None:
    inputs = searching(make_tiny_model("Llama", num_key_value_heads=4))
    demanded = KvOptions(max_kl=1e-6, max_cache_bytes_per_token=256)
    with pytest.raises(VerificationError, match="within both max_kl = 1e-06 and max_cache_bytes_per_token = 256"):
        search(smallest(prune=None, attention=demanded), inputs)
    # Numbers that are given aren't a search: formats are measured on the model that they make.
    grouped = smallest(prune=None, attention=KvOptions(kv_heads=2))
    grouped = grouped.model_copy(update={"budget": grouped.budget.model_copy(update={"max_kl": 1.0})})
    result = search(grouped, inputs)
    assert result.candidates == () and result.auto is not None and result.auto.shapes_kl > 0
    assert result.auto.shapes_kl < result.auto.chosen.measured_kl <= 1.0
    with pytest.raises(VerificationError, match=r"\(of which its shape costs \d"):
        search(grouped.model_copy(update={"budget": grouped.budget.model_copy(update={"max_kl": 0.001})}), inputs)


class Recorder(KvHeadSearch):
    """Keeps what it is given, and finds nothing."""

    tasks: ClassVar[list[Task]] = []

    def run(self) -> Found[KvSearchReport]:
        self.tasks.append(self.task)
        raise NothingToChooseError("none")


def test_units_are_measured_with_one_half_and_choices_checked_with_the_other() -> None:
    captured, tokens = capture(make_tiny_model("Llama")), random_tokens(20, 21, 22, 23)
    recipe = Recipe(name="mine", attention=KvOptions(max_kl=0.1))
    with pytest.raises(NothingToChooseError):
        search_captured(Recorder, captured, recipe, PassContext(calibration=tuple(tokens)), silent)
    (task,) = Recorder.tasks
    assert (task.program, task.recipe) == (captured.program, recipe)
    assert task.parameters == captured.model_info.parameters
    assert [len(s) for s in task.sequences] == [20, 22]
    assert [len(s) for s in task.checks[0].sequences] == [21, 23]
    assert [c.origin for c in task.checks][-1] == "random tokens"
    assert len(task.context.calibration) == 4
    with pytest.raises(RequestError, match="there is only one"):
        search_captured(Recorder, captured, recipe, PassContext(calibration=tuple(tokens[:1])), silent)
