"""Wrong arguments are told before torch, transformers or scipy are imported: in a child, which has imported nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from enginewright.optimizer.export.check_arguments import ExportArguments, check_arguments, check_model, with_own_recipe
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.runtime.shared.errors import BundleError, EnginewrightError, RecipeError, RequestError, SourceError
from enginewright.runtime.shared.progress import ProgressEvent
from tests.optimizer.capture.gguf.test_header import quantized_file

CHILD = """
import json, sys
from typer.testing import CliRunner
from enginewright.optimizer.cli.app import app
found = []
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments)
    heavy = sorted({"torch", "transformers", "scipy"} & set(sys.modules))
    found.append([done.exit_code, done.stderr, heavy])
print(json.dumps(found))
"""

WRONG = [
    (["export", "nope"], 3, "nope doesn't exist"),
    (["export", "empty"], 3, "empty is empty"),
    (["export", "files"], 3, "Pass the file: files/a.gguf, or another of the 2 there"),
    (["export", "folder.gguf"], 3, "folder.gguf is a folder, and no GGUF file is in it"),
    (["generate", "folder.gguf", "Hello"], 3, "folder.gguf is a folder, and no GGUF file is in it"),
    (["chat", "files"], 3, "files is a folder of GGUF files, and a model is one of them"),
    (["export", "text.gguf"], 3, "text.gguf isn't a GGUF file"),
    (["export", "no.bundle"], 3, "is a bundle already"),
    (["export", "MODEL", "--revision", "main"], 3, "revision 'main' is for models of the Hub"),
    (["export", "MODEL", "--recipe", "int7"], 5, "there is no recipe 'int7'"),
    (["export", "MODEL", "--recipe", "wrong.toml"], 5, "wrong.toml:2: nonsense: unknown key"),
    (["export", "MODEL", "--target", "hexagon"], 2, "there is no 'hexagon'"),
    (["export", "MODEL", "--gpu", "h1000"], 15, "h1000"),
    (["export", "MODEL", "--kv-cache", "f8"], 2, "--kv-cache: "),
    (["export", "MODEL", "--max-memory", "lots"], 2, "--max-memory: "),
    (["export", "MODEL", "--calibration", "nope.txt"], 8, "nope.txt can't be read"),
    (["export", "MODEL", "-o", "no.bundle"], 7, "no.bundle exists"),
    (["export", "MODEL", "-o", "empty/../folder", "--force"], 7, "isn't a bundle"),
    (["export", "MODEL", "--nonsense"], 2, "--nonsense"),
    (["plan", "nope"], 3, "nope doesn't exist"),
    (["plan", "empty"], 3, "empty is empty"),
    (["plan", "MODEL", "--recipe", "int7"], 5, "there is no recipe 'int7'"),
    (["plan", "MODEL", "--gpu", "h1000"], 15, "h1000"),
    (["eval", "nope"], 7, "nope doesn't exist"),
    (["bisect", "nope"], 3, "nope doesn't exist"),
    (["bisect", "MODEL", "nope"], 3, "nope doesn't exist"),
    (["bisect", "MODEL", "--recipe", "int7"], 5, "there is no recipe 'int7'"),
    (["recover", "nope", "-r", "int4", "-o", "new"], 3, "nope doesn't exist"),
    (["recover", "MODEL", "-r", "int7", "-o", "new"], 5, "there is no recipe 'int7'"),
    (["tune", "nope"], 7, "nope doesn't exist"),
    (["buckets", "--default", "what"], 2, "--default: there is no 'what'"),
]


@pytest.mark.matrix
def test_nothing_heavy_is_imported_to_say_what_is_wrong(tiny_folder: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    for name in ("empty", "folder", "folder.gguf", "files"):
        (tmp_path / name).mkdir()
    for path in ("folder.gguf/notes.txt", "files/a.gguf", "files/b.GGUF"):
        (tmp_path / path).write_bytes(b"GGUF")
    (tmp_path / "folder/mine.txt").write_text("not a bundle's")
    (tmp_path / "text.gguf").write_text("text")
    (tmp_path / "wrong.toml").write_text('name = "wrong"\nnonsense = 1\n')
    shutil.copytree(tiny_bundle, tmp_path / "no.bundle")
    before = sorted(p.name for p in tmp_path.iterdir())
    commands = [[str(tiny_folder) if word == "MODEL" else word for word in words] for words, _, _ in WRONG]
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(commands)],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    for (words, code, message), (exit_code, stderr, heavy) in zip(WRONG, json.loads(done.stdout), strict=True):
        assert exit_code == code and message in stderr, (words, exit_code, stderr)
        assert heavy == [], words
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"source": "nope"}, SourceError),
        ({"recipe": "int7"}, RecipeError),
        ({"targets": []}, RecipeError),
        ({"targets": ["cpu", "hexagon"]}, RecipeError),
        ({"kv_cache": "f8"}, RecipeError),
        ({"max_memory": 0}, RequestError),
        ({"output": "/"}, BundleError),
    ],
)
def test_what_is_refused(
    options: dict[str, object], error: type[EnginewrightError], tiny_folder: Path, tmp_path: Path
) -> None:
    options = dict(options)
    with pytest.raises(error) as caught:
        output = options.pop("output", tmp_path / "a.bundle")
        arguments = ExportArguments(**{"source": tiny_folder, **options})  # type: ignore[arg-type]
        check_arguments(arguments, output)
        check_model(arguments)
    assert caught.value.hint


def test_a_recipe_is_read_once(tiny_folder: Path, tmp_path: Path) -> None:
    """It may come from a pipe."""
    mine = Recipe(name="mine")
    for recipe, loaded in ((mine, mine), ("int8", load_recipe("int8")), (None, None)):
        arguments = ExportArguments(source=tiny_folder, recipe=recipe)
        assert check_arguments(arguments, tmp_path / "a.bundle") == loaded
    assert check_arguments(ExportArguments(source=tiny_folder, recipe=mine), tmp_path / "a.bundle") is mine


def test_a_quantized_file_names_its_recipe_where_nobody_else_does(tiny_folder: Path, tmp_path: Path) -> None:
    path, heard = quantized_file(tmp_path / "a.gguf"), list[ProgressEvent]()
    for source in (path, str(path)):
        arguments = with_own_recipe(ExportArguments(source=source, kv_cache="f32"), heard.append)
        assert arguments == ExportArguments(source=source, kv_cache="f32", recipe="gguf")
    assert [(e.stage, e.detail) for e in heard] == [("recipe", "gguf, as the file is quantized")] * 2
    assert check_arguments(arguments, tmp_path / "a.bundle") == load_recipe("gguf")
    others = (
        ExportArguments(source=path, recipe="f32"),
        ExportArguments(source=path, recipe=Recipe(name="mine")),
        ExportArguments(source=path, recovered=tmp_path),  # it has the recipe that it was trained for
        ExportArguments(source=quantized_file(tmp_path / "b.gguf", kind="F16")),
        ExportArguments(source=tiny_folder),
        ExportArguments(source="org/name:Q4_K_M"),  # not on this disk yet
    )
    for changes in others:
        assert with_own_recipe(changes, heard.append) is changes
    assert len(heard) == 2
