"""What runs the blocks of a page of documentation, and the pages."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from enginewright.runtime.requests.sampling import SamplingParams
from tests.doc_snippets import run_python, script_of

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
    page, given = tmp_path / "page.md", tmp_path / "given"
    page.write_text(PAGE)
    given.write_text("text")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert run_python(page, folder, {"name": given}).stdout == "2 text\n"


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


def test_the_page_on_python_names_every_parameter_and_its_default(repository: Path) -> None:
    text = (repository / "docs" / "use" / "python-api.md").read_text(encoding="utf-8")
    section = text.partition("\n## Parameters\n")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.M)
    values = {
        "none": (),
        **{str(default): default for default in (None, False, 0, 1, 256)},
    }
    assert {name: values[default.strip()] for name, default in documented} == {
        field.name: field.default for field in fields(SamplingParams)
    }
