"""Exports that search: bundles are within their budget, and can be made again without a search; or nothing is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.capture import capture
from enginewright.optimizer.cli.report import print_summary
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.sections import AutoSection, BudgetSection, CalibrationSection
from enginewright.optimizer.report.bundle_report import open_report
from enginewright.optimizer.search.compose import search_captured
from enginewright.optimizer.search.formats import FormatSearch, check_bytes
from enginewright.optimizer.search.report import RECIPE_FILE
from enginewright.optimizer.shared.storage import StoredBytes
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import RequestError, VerificationError
from enginewright.runtime.shared.progress import silent
from tests.optimizer.search.formats_prepared import random_tokens

MakeModel = Callable[..., PreTrainedModel]
INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
INT8 = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)


def recipe(**budget: float) -> Recipe:
    return Recipe(
        name="mine",
        weights=WeightFormats(method="awq"),
        budget=BudgetSection.model_validate(budget),
        auto=AutoSection(candidates=(INT4, INT8)),
        calibration=CalibrationSection(tokens=128, sequence_length=32),
    )


def test_what_was_chosen_can_be_exported_again_without_a_search(
    tiny_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("Llama")
    first, second = tmp_path / "first.bundle", tmp_path / "second.bundle"
    report = export(model, first, recipe=recipe(max_kl=0.004))
    assert report.auto is not None
    assert report.stages["search"] > 0
    assert {u.format for u in report.auto.units} == {str(INT4), str(INT8)}
    assert set(report.auto.measured_kl) == {"calibration tokens", "random tokens"}
    assert max(report.auto.measured_kl.values()) <= 0.004
    assert sum(s.nbytes for s in report.storage) == report.auto.chosen.bytes
    saved = json.loads((first / "report/report.json").read_text())
    assert saved["auto"]["chosen"]["bytes"] == report.auto.chosen.bytes
    print_summary(open_report(first))
    printed = capsys.readouterr().out
    assert "formats by cost, for at most KL 0.004:" in printed
    assert f"all {INT8}" in printed
    written = load_recipe(first / RECIPE_FILE)
    manifest = json.loads((first / "manifest.json").read_text())
    assert Recipe.model_validate(manifest["recipe"]) == written
    assert written.auto is None

    again = export(model, second, recipe=first / RECIPE_FILE)
    assert again.auto is None
    assert not (second / RECIPE_FILE).exists()
    for path in sorted(p.relative_to(first) for p in (first / "weights").iterdir()):
        assert (first / path).read_bytes() == (second / path).read_bytes()


def test_a_budget_that_nothing_meets_leaves_nothing(tiny_model: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"no choice of formats is within max_kl = 1e-09: .* KL is"):
        export(tiny_model("Llama"), tmp_path / "never.bundle", recipe=recipe(max_kl=1e-9))
    with pytest.raises(VerificationError, match=r"no choice of formats is within max_bytes = 10: .* takes \d"):
        export(tiny_model("Llama"), tmp_path / "never.bundle", recipe=recipe(max_bytes=10))
    assert list(tmp_path.iterdir()) == []


def test_one_sequence_is_too_few(tiny_model: MakeModel) -> None:
    captured = capture(tiny_model("Llama"))
    with pytest.raises(RequestError, match="there is only one"):
        context = PassContext(calibration=tuple(random_tokens(30)))
        search_captured(FormatSearch, captured, recipe(max_kl=0.01), context, silent)


def test_a_size_holds_without_a_search_too() -> None:
    stored = [StoredBytes(None, "a", "f32", 600), StoredBytes(0, "b", "i8", 401)]
    check_bytes(stored, Recipe(name="mine"))
    check_bytes(stored, Recipe(name="mine", budget=BudgetSection(max_bytes=1001)))
    with pytest.raises(VerificationError, match="the weights take 1,001 bytes, and max_bytes is 1,000"):
        check_bytes(stored, Recipe(name="mine", budget=BudgetSection(max_bytes=1000)))


def test_the_bundle_is_timed_where_the_budget_has_a_time(
    tiny_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timed.bundle"
    report = export(tiny_model("Llama"), path, recipe=recipe(max_ms_per_token=10_000, max_kl=0.5))
    assert report.auto is not None and report.auto.time is not None
    time = report.auto.time
    assert (time.budget, time.device) == (10_000, "cpu")
    assert time.measured is not None and min(time.measured, time.timed, time.predicted) > 0
    assert {u.format for u in report.auto.units} == {str(INT8)}, "there is time for the most exact one"
    print_summary(open_report(path))
    assert "milliseconds a token on cpu" in capsys.readouterr().out
    assert load_recipe(path / RECIPE_FILE).budget.max_ms_per_token == 10_000
    with pytest.raises(VerificationError, match=r"max_ms_per_token = 1e-06 on this machine: the fastest takes \d"):
        export(tiny_model("Llama"), tmp_path / "never.bundle", recipe=recipe(max_ms_per_token=1e-6))


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "dtype"), [("int3", "u3"), ("q4_k", "u4"), ("mxfp4", "fp4"), ("nvfp4", "fp4")])
def test_formats_that_files_have_are_written(name: str, dtype: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    few = CalibrationSection(tokens=128, sequence_length=32)
    chosen_recipe = load_recipe(name).model_copy(update={"calibration": few, "budget": BudgetSection(max_kl=20)})
    export(tiny_model("Llama", hidden_size=512), tmp_path / "a.bundle", recipe=chosen_recipe)
    tensors = Bundle.open(tmp_path / "a.bundle").index.tensors.values()
    assert dtype in {t.dtype for t in tensors}
    assert any(t.layout.startswith("blocks") for t in tensors) == (name != "mxfp4")
