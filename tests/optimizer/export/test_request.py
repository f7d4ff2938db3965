"""The requests that an export refuses before it looks at the model, and the options that override a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from enginewright.optimizer.export.check_arguments import ExportArguments
from enginewright.optimizer.export.request import ExportRequest
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.targets import TARGETS
from enginewright.runtime.shared.errors import EnginewrightError, RecipeError, RequestError, SourceError
from enginewright.runtime.shared.progress import silent
from tests.optimizer.capture.gguf.test_header import quantized_file


def asked(**given: Any) -> ExportRequest:
    return ExportRequest.from_arguments(ExportArguments(source="no model is looked at", **given), None, silent)


def test_what_is_said_beside_a_recipe_counts_more() -> None:
    plain = asked()
    assert plain.recipe == load_recipe("f32") and plain.targets == ("cpu",) and plain.context_length is None
    mine = Recipe(name="mine", targets=("cpu",), context_length=128)
    assert asked(recipe=mine).context_length == 128
    assert asked(recipe=mine, context_length=64).context_length == 64
    anywhere = tuple(name for name in TARGETS if name != "torch-tensorrt")
    assert asked(recipe="int8", targets=anywhere).targets == anywhere
    assert asked(max_memory="64GiB").limit.report() is not None and plain.limit.report() is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"recipe": "f23"}, RecipeError, "there is no recipe 'f23'"),
        ({"targets": ["gpu"]}, RecipeError, "target: there is no 'gpu'"),
        ({"targets": []}, RecipeError, "no target is given"),
        (
            {"recipe": Recipe(name="mine", passes={"fuse_everything": True})},
            RecipeError,
            r"recipe mine: passes\.fuse_everything: there is no pass of that name",
        ),
        ({"max_memory": "much"}, RequestError, "much"),
        ({"recovered": Path("nowhere")}, SourceError, "nowhere isn't a recovery"),
    ],
)
def test_what_is_refused(given: dict[str, Any], error: type[EnginewrightError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        asked(**given)
    assert caught.value.hint


def test_a_file_that_is_fetched_decides_where_no_recipe_is_named(tmp_path: Path) -> None:
    path = quantized_file(tmp_path / "a.gguf")
    options: dict[str, Any] = {
        "kv_cache": "int8",
        "partitions": ["tensor=2"],
        "context_length": 64,
        "targets": ["onnx"],
    }
    before = asked(**{**options, "targets": ["cpu"]})
    request = before.of(path)
    assert (before.recipe.name, request.recipe.name, request.recipe_from) == ("f32", "gguf", "gguf")
    assert request.source.path == path and request.recipe.weights.keep_blocks
    assert (
        request.recipe.kv_cache.dtype == "int8"
        and request.recipe.target_tables() == before.recipe.target_tables() != ()
    )
    assert request.context_length == 64 and request.on_progress is silent
    assert asked(targets=["onnx"]).of(path).targets == ("onnx",)
    for other in (asked(recipe="f32"), asked(recipe=Recipe(name="mine"))):
        assert other.of(path).recipe == other.recipe and other.of(path).source.path == path
    assert asked().of(quantized_file(tmp_path / "b.gguf", kind="F16")).recipe.name == "f32"
    assert asked().of(tmp_path).recipe.name == "f32"
