from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe, with_partitions
from enginewright.plugins.cpu.recipe import CpuOptions
from enginewright.runtime.shared.errors import RecipeError, RequestError
from tests.acceptance.tiny_configs import tiny_family


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_family("llama")


def test_a_model_that_is_fit_for_its_partitions(model: PreTrainedModel, tmp_path: Path) -> None:
    partitions = ["2", "tensor=2,pipeline=2"]
    export(model, tmp_path / "one.bundle", partitions=partitions)
    export(model, tmp_path / "other.bundle")
    programs = [
        (tmp_path / name / "targets" / "cpu" / "programs" / "decode.json").read_bytes()
        for name in ("one.bundle", "other.bundle")
    ]
    assert programs[0] == programs[1]


def test_one_that_is_not_leaves_no_bundle(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="more than the 4 query heads"):
        export(model, tmp_path / "one.bundle", partitions=["tensor=5"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["rows=2", "tensor=0", ""])
def test_what_is_no_partition(text: str) -> None:
    with pytest.raises(RecipeError, match="partition"):
        with_partitions(load_recipe("int8"), [text])


def test_a_recipe_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text('name = "one"\n[cpu]\npartitions = ["tensor=2"]\n')
    assert CpuOptions(partitions=("tensor=2",)) in load_recipe(file).target_tables()
    file.write_text('name = "one"\n[cpu]\npartitions = ["tensor=none"]\n')
    with pytest.raises(RecipeError, match="isn't understood"):
        load_recipe(file)
