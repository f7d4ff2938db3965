from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.optimizer.recipes.recipe import load_recipe


def test_the_list_has_a_line_for_each() -> None:
    result = CliRunner().invoke(app, ["recipes"])
    assert result.exit_code == 0
    assert any(line.startswith("f32  ") for line in result.output.splitlines())


@pytest.mark.parametrize("arguments", [["f32"], ["--show", "f32"]])
def test_what_is_shown_is_a_recipe(arguments: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["recipes", *arguments])
    path = tmp_path / "mine.toml"
    path.write_text(result.output)
    assert load_recipe(path) == load_recipe("f32")


@pytest.mark.parametrize("arguments", [["recipes", "--json"], ["recipes", "--show", "f32", "--json"]])
def test_json(arguments: list[str]) -> None:
    data = json.loads(CliRunner().invoke(app, arguments).output)
    recipe = data if "--show" in arguments else next(r for r in data if r["name"] == "f32")
    assert recipe["weights"]["default"]["storage"] == "f32"


def test_two_names_are_one_too_many() -> None:
    assert CliRunner().invoke(app, ["recipes", "f32", "--show", "int8"]).exit_code == 2


def test_an_unknown_name() -> None:
    result = CliRunner().invoke(app, ["recipes", "f23", "--json"])
    assert result.exit_code == 5
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "RecipeError"
    assert error["hint"] == "Did you mean 'f32'?"
