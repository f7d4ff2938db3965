"""The runner of the code blocks on a page of documentation, and the pages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main

from enginewright.optimizer.cli.app import app
from enginewright.runtime.server.http.options import ServerOptions
from tests.doc_snippets import BLOCK, run_python, run_with_server, script_of
from tests.waiting import HANG

PAGE = """\
# A page

```python
x = 1
```

```sh
exit 1
```

<!-- not run: another library's -->
```python
import nothing_like_it
```

```python
print(x + 1, open("name").read())
```
"""


def test_blocks_stay_on_their_lines() -> None:
    lines = script_of(PAGE).splitlines()
    assert [(i, line) for i, line in enumerate(lines, 1) if line] == [
        (4, "x = 1"),
        (17, 'print(x + 1, open("name").read())'),
    ]
    with pytest.raises(ValueError, match="isn't closed"):
        script_of("```python\nx = 1\n")


def test_blocks_run_together(tmp_path: Path) -> None:
    page, marker = tmp_path / "page.md", tmp_path / "given"
    page.write_text(PAGE)
    marker.write_text("text")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert run_python(page, folder, {"name": marker}).stdout == "2 text\n"


def test_a_block_that_fails_is_named_by_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nraise KeyError(3)\n```\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(AssertionError, match=r"line 4(.|\n)*KeyError: 3"):
        run_python(page, folder, {})


def test_the_page_on_python(tiny_bundle: Path, repository: Path, tmp_path: Path) -> None:
    page = repository / "docs" / "use" / "python-api.md"
    done = run_python(page, tmp_path, {"smollm2.bundle": tiny_bundle})
    assert "prompts[0]: 'Hello' at place 0 isn't a token id" in done.stdout
    assert "[1, 1]" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["migration", "speculation", "structured-output"])
def test_a_page_with_python(name: str, tiny_bundle: Path, repository: Path, tmp_path: Path) -> None:
    names = ("smollm2.bundle", "smollm2-f32.bundle", "smollm2-int8.bundle")
    done = run_python(repository / "docs" / "use" / f"{name}.md", tmp_path, dict.fromkeys(names, tiny_bundle))
    assert done.stdout and done.stderr == ""


def test_the_page_on_prefixes(
    tiny_bundle: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    page = repository / "docs" / "use" / "prefix-cache.md"
    done = run_python(page, tmp_path, {"smollm2.bundle": tiny_bundle})
    assert re.match(r"0 of 37\d prompt tokens were cached\n36\d of", done.stdout), done.stdout
    assert done.stderr == "" and list((tmp_path / "kept-prefixes").glob("*.kv"))


def test_the_page_on_ranks(tiny_bundle: Path, repository: Path, tmp_path: Path) -> None:
    done = run_python(repository / "docs" / "use" / "ranks.md", tmp_path, {"smollm2.bundle": tiny_bundle})
    assert "'ranks': 2, 'partition': 'tensor=2'" in done.stdout


def test_the_page_on_scheduling(tiny_bundle: Path, repository: Path, tmp_path: Path) -> None:
    done = run_python(repository / "docs" / "use" / "scheduling.md", tmp_path, {"smollm2.bundle": tiny_bundle})
    assert "'refused': 0" in done.stdout and done.stderr == ""


USE = Path(__file__).resolve().parent.parent / "docs" / "use"
SERVE = USE / "commands" / "serve.md"


def test_the_page_on_serving(tiny_bundle: Path, tmp_path: Path) -> None:
    bundles = dict.fromkeys(("smollm2.bundle", "smollm2-f32.bundle"), tiny_bundle)
    (answers,) = run_with_server(SERVE, tmp_path, bundles)
    (choice,) = json.loads(answers)["choices"]
    assert isinstance(choice["message"]["content"], str) and choice["finish_reason"] in ("stop", "length")


def test_the_page_on_the_server_s_api(tiny_bundle: Path, tmp_path: Path) -> None:
    colour, props = run_with_server(USE / "server-api.md", tmp_path, {"smollm2.bundle": tiny_bundle})
    assert json.loads(colour) in ("red", "green", "blue")
    assert {name: one["exact"] for name, one in json.loads(props)["models"].items()} == {"smollm2": True}


def test_the_page_on_access_to_the_server(tiny_bundle: Path, tmp_path: Path) -> None:
    _, models, _, health = run_with_server(USE / "server-access.md", tmp_path, {"smollm2.bundle": tiny_bundle})
    assert [row["id"] for row in json.loads(models)["data"]] == ["smollm2"]
    assert json.loads(health)["status"] == "ok"


@pytest.mark.parametrize("page", [SERVE, USE / "server-api.md"], ids=lambda page: page.stem)
def test_a_page_on_serving_asks_the_model_of_its_first_line_for_the_likeliest_tokens(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    first = re.search(r"^optimize serve (\w+)\.bundle$", text, re.M)
    assert first is not None
    blocks = [code for _, code in BLOCK.findall(text) if "messages" in code]
    assert blocks
    for code in blocks:
        assert set(re.findall(r"""model["']?[=:] ?["'](\w+)["']""", code)) <= {first[1]}, code
        assert re.search(r"temperature\"?[=:] ?0\b", code), f"a small model answers nonsense at temperature 1:\n{code}"


def test_the_page_on_serving_has_a_file_of_options() -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", SERVE.read_text(encoding="utf-8"), re.M | re.S)
    section_toml = tomllib.loads(next(block for block in blocks if "[models]" in block))
    defaults = ServerOptions(models=section_toml.pop("models"))
    llm = section_toml.pop("llm")
    assert set(section_toml.pop("aliases").values()) <= set(defaults.models)
    assert section_toml == {name: getattr(defaults, name) for name in section_toml}
    flags = {p.name for p in typer.main.get_command(app).commands["serve"].params}  # type: ignore[attr-defined]
    assert set(llm) <= flags


def test_the_tutorial_runs(tiny_folder: Path, repository: Path, tmp_path: Path) -> None:
    page = repository / "docs" / "use" / "tutorial.md"
    (tmp_path / "SmolLM2-135M-Instruct").symlink_to(tiny_folder)
    lines = [line for line in script_of(page.read_text(encoding="utf-8"), "sh").splitlines() if line]
    assert {line.split("optimize ")[1].split()[0] for line in lines} == {
        "export", "generate", "chat", "eval", "bench", "verify", "bisect"
    }  # fmt: skip
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    command = ["bash", "-ec", "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "KL" in done.stdout and "they agree" in done.stdout
    folder = tmp_path / "python"
    folder.mkdir()
    run_python(page, folder, {"smollm2.bundle": tmp_path / "smollm2.bundle"})
