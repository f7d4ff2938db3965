from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from enginewright.optimizer.buckets.choose import BucketSource, choose
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.recipes.recipe import load_recipe


def buckets(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["buckets", *arguments])


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "h.csv").write_text("length,count\n10,50\n33,20\n90,9\n200,1\n")
    return str(tmp_path / "h.csv")


def test_what_it_prints_last_is_a_recipe_s_section(file: str, tmp_path: Path) -> None:
    result = buckets("--histogram", file, "--most", "5", "--max-batch", "6")
    assert result.exit_code == 0, result.output
    chosen = choose(BucketSource(histogram=file, most=5, max_batch=6))
    (tmp_path / "r.toml").write_text('name = "r"\n' + result.stdout[result.stdout.index("[buckets]") :])
    recipe = load_recipe(tmp_path / "r.toml")
    assert recipe.buckets is not None
    assert (recipe.buckets.tokens, recipe.buckets.batch) == (chosen.tokens, chosen.batch)
    assert re.search(r"powers of two, as many +4 sizes +\d+\.\d% of what is computed is padding", result.stdout)


def test_json_and_every_option(file: str, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("1\n1\n4\n")
    options = ("--batch-sizes", str(tmp_path / "b.txt"), "--multiple", "16", "--chunk", "96", "--context", "200")
    result = buckets("--histogram", file, *options, "-n", "4", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    source = BucketSource(histogram=file, batches=str(tmp_path / "b.txt"), multiple=16, chunk=96, most=4)
    chosen = choose(source, 200)
    assert tuple(data["tokens"]) == chosen.tokens and tuple(data["batch"]) == chosen.batch
    assert [kind["kind"] for kind in data["kinds"]] == ["tokens", "batch"] and data["most"] == 4
    (tmp_path / "t.jsonl").write_text('{"prompt_tokens": 9, "completion_tokens": 2}\n')
    traced = json.loads(buckets("--trace", str(tmp_path / "t.jsonl"), "--max-batch", "2", "--json").stdout)
    assert traced["tokens"] == [16] and traced["batch"] == [1, 2] and traced["generated"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "give one of --histogram, --trace and --default"),
        (("--default", "chat", "--trace", "x"), 2, "not 2 of them"),
        (("--histogram", "none.csv"), 8, "none.csv: can't be read"),
        (("--default", "chat", "--most", "0"), 2, "--most: 0"),
        (("--default", "chat", "--most", "many"), 2, "Invalid value"),
        (("--default", "books"), 2, "Defaults: chat, documents, code"),
    ],
)
def test_errors(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = buckets(*arguments)
    assert result.exit_code == code and message in result.output


def test_an_error_as_json(file: str) -> None:
    result = buckets("--histogram", file, "--context", "100", "--json")
    assert result.exit_code == 8
    assert "1 of 80 lengths are beyond the context of 100" in json.loads(result.stdout)["error"]["message"]
