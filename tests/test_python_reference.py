"""docs/use/python-reference.md is made from the docstrings of what ``enginewright`` exports.

After a change of these: ``pytest tests/test_python_reference.py --update-golden``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import enginewright

HEAD = """# Python reference

Every public name, from its docstring. [Python API](python-api.md) is the guide. Made by
`tests/test_python_reference.py`.
"""
SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")


def signature(name: str, value: object) -> str:
    """``name(parameters) -> result``, a parameter a line where that is long; a class has no result."""
    parameters = inspect.signature(value)  # type: ignore[arg-type]
    rows: list[str] = []
    for p in parameters.parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in rows and not any(row.startswith("*") for row in rows):
            rows.append("*")
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        default = "" if p.default is p.empty else f" = {p.default!r}"
        rows.append(f"{stars}{p.name}: {p.annotation}{default}")
    result = "" if inspect.isclass(value) else f" -> {parameters.return_annotation}"
    line = f"{name}({', '.join(rows)}){result}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {row},\n" for row in rows) + f"){result}"


def markdown(docstring: str) -> Iterator[str]:
    """A docstring in Google's style: its sections as lists."""
    inside = False
    for line in re.sub(r"``(.*?)``", r"`\1`", inspect.cleandoc(docstring)).splitlines():
        if line in SECTIONS:
            inside = True
            yield f"**{line.rstrip(':')}**\n"
        elif inside and re.match(r"    \S", line):
            entry, colon, rest = line.strip().partition(": ")
            yield f"- `{entry}`: {rest}" if colon else f"- {entry}"
        elif inside and line:
            yield f"  {line.strip()}"
        else:
            inside = inside and not line
            yield line


def entries() -> Iterator[tuple[str, str, object]]:
    """(heading, name, value) of every public name, and of the public methods of classes of ours."""
    for name in sorted(set(enginewright.__all__) - {"__version__"}, key=lambda n: (n.endswith("Error"), n.lower())):
        value = getattr(enginewright, name)
        yield f"## {name}", name, value
        for method, function in vars(value).items() if inspect.isclass(value) else ():
            function = getattr(function, "__func__", function)
            if not method.startswith("_") and inspect.isfunction(function) and function.__doc__:
                yield f"### {name}.{method}", f"{name}.{method}", function


def reference() -> str:
    """The page."""
    parts = [HEAD]
    for heading, name, value in entries():
        parts.append(heading + "\n")
        if not (inspect.isclass(value) and issubclass(value, Exception)):
            parts.append(f"```text\n{signature(name, value)}\n```\n")
        parts.append("\n".join(markdown(value.__doc__ or "")) + "\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


def test_the_page_is_what_docstrings_say(repository: Path, pytestconfig: pytest.Config) -> None:
    page = repository / "docs" / "use" / "python-reference.md"
    if pytestconfig.getoption("--update-golden"):
        page.write_text(reference(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == reference(), "make it anew: --update-golden"


def test_it_has_every_name_and_what_each_raises() -> None:
    text = reference()
    for name in set(enginewright.__all__) - {"__version__"}:
        assert f"\n## {name}\n" in text
    assert "\n### LLM.generate\n" in text and "**Raises**" in text and "- `temperature`: " in text
    assert "object at 0x" not in text and str(Path.home()) not in text
