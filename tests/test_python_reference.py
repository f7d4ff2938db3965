"""docs/use/python-reference.md is made from the docstrings of what ``enginewright`` exports.

After a change of these: ``pytest tests/test_python_reference.py --update-golden``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import enginewright

HEAD = """# Python reference

This page describes all public names; [Python API](python-api.md) is an introduction. Signatures show the types of
required arguments, and the defaults of optional ones. The methods of classes other than `LLM` are left out, because
they are internal and may change. `tests/test_python_reference.py` generates this page from docstrings.
"""
LISTS = ("Args:", "Attributes:", "Raises:")
TEXTS = ("Returns:", "Yields:")
ENTRY = re.compile(r"    (?P<names>\w[\w, ]*?)(?P<note> \(.*?\))?: (?P<text>.*)")
WITH_METHODS = ("LLM",)
FOR_EVENT_LOOPS = ("from_executor", "prepare", "submit", "after_step", "abort", "pulse")
"""Methods of `LLM` that the page only names."""
COROUTINES = """### Coroutines

These methods don't block the event loop: {}. `agenerate` has the arguments of `generate`, except `progress` and
`use_tqdm`; the others correspond to a method in the same way. Requests end if the asyncio task is cancelled, or if
`aclose` of a stream is called.

### For event loops

Programs with their own event loop, such as the server, use these methods, which have docstrings: {}.
"""


def default_of(parameter: inspect.Parameter) -> str:
    """``=DEFAULT`` of a parameter; the fields of a record are left out."""
    if repr(parameter.default) == "<factory>":  # all of them make a dictionary
        return "={}"
    record = dataclasses.is_dataclass(parameter.default)
    return f"={type(parameter.default).__name__}(...)" if record else f"={parameter.default!r}"


def signature(name: str, value: object) -> str:
    """``name(parameters) -> result``, a parameter a line where that is long; a class has no result.

    An optional parameter has its default and no type, since its description names the values.
    """
    parameters = inspect.signature(value)  # type: ignore[arg-type]
    rows: list[str] = []
    for p in parameters.parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in rows and not any(row.startswith("*") for row in rows):
            rows.append("*")
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        if stars:
            rows.append(f"{stars}{p.name}")
        elif p.default is p.empty:
            rows.append(f"{p.name}: {p.annotation}")
        else:
            rows.append(f"{p.name}{default_of(p)}")
    result = "" if inspect.isclass(value) else f" -> {parameters.return_annotation}"
    line = f"{name}({', '.join(rows)}){result}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {row},\n" for row in rows) + f"){result}"


def markdown(docstring: str) -> Iterator[str]:
    """A docstring in Google's style: its sections as lists or texts."""
    section = ""
    for line in re.sub(r"``(.*?)``", r"`\1`", inspect.cleandoc(docstring)).splitlines():
        if line in LISTS + TEXTS:
            section = line
            yield f"**{line.rstrip(':')}**\n"
            continue
        if line and not line.startswith("    "):
            section = ""
        entry = ENTRY.fullmatch(line) if section in LISTS else None
        if entry is not None:
            yield f"- `{entry['names']}`{entry['note'] or ''}: {entry['text']}"
        elif section in LISTS and line:
            yield f"  {line.strip()}"
        else:
            yield line.strip() if section else line


def blocking_twin(owner: type, method: str) -> Any:
    """The method whose coroutine this is, such as ``embed`` of ``aembed``; None if it isn't a coroutine."""
    return vars(owner).get(method[1:]) if method.startswith("a") else None


def check_arguments(function: Any, twin: Any) -> None:
    """Fails if a coroutine's arguments aren't its twin's, except those that the page names."""
    here, there = (inspect.signature(f).parameters.keys() for f in (function, twin))
    assert here <= there and there - here <= {"progress", "use_tqdm"}, function.__name__


def sections() -> Iterator[str]:
    """The parts of the page for every public name, and for the public methods of some classes."""
    for name in sorted(set(enginewright.__all__) - {"__version__"}, key=lambda n: (n.endswith("Error"), n.lower())):
        value = getattr(enginewright, name)
        yield f"## {name}\n"
        if not (inspect.isclass(value) and issubclass(value, Exception)):
            yield f"```text\n{signature(name, value)}\n```\n"
        yield "\n".join(markdown(value.__doc__ or "")) + "\n"
        coroutines: list[str] = []
        for method, function in vars(value).items() if name in WITH_METHODS else ():
            function = getattr(function, "__func__", function)
            if method.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
                continue
            if (twin := blocking_twin(value, method)) is not None:
                check_arguments(function, twin)
                coroutines.append(method)
            elif method not in FOR_EVENT_LOOPS:
                yield f"### {name}.{method}\n"
                yield f"```text\n{signature(f'{name}.{method}', function)}\n```\n"
                yield "\n".join(markdown(function.__doc__)) + "\n"
        if coroutines:
            yield COROUTINES.format(*(", ".join(f"`{n}`" for n in names) for names in (coroutines, FOR_EVENT_LOOPS)))


def reference() -> str:
    """The page."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join((HEAD, *sections())))


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
