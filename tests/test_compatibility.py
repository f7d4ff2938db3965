"""Pages have the numbers, extras and required packages of the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from enginewright.plugins.native.executable import NUMERICS_VERSION
from enginewright.runtime.bundle import manifest, weights
from enginewright.runtime.shared import lowered_program

REPOSITORY = Path(__file__).resolve().parent.parent
USE = REPOSITORY / "docs" / "use"
PAGE = (USE / "compatibility.md").read_text(encoding="utf-8")
INSTALL = (USE / "install.md").read_text(encoding="utf-8")
SERVICE = (REPOSITORY / "docs" / "build" / "service.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FIRST_INSTALL = re.compile(r"pip install (?:-\S+ )*['\"]?enginewright(?!-)")
"""An index has no such package yet, so these lines work only where it is installed already."""


def row(name: str) -> str:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {name}") or line.startswith(f"| [{name}")]
    return line


def test_numbers_of_formats_are_those_of_the_code() -> None:
    assert f"manifest {manifest.FORMAT_VERSION}, weights {weights.FORMAT_VERSION} |" in row("format of bundles")
    assert f"| {lowered_program.FORMAT_VERSION}; {lowered_program.OLDEST_FORMAT_VERSION} " in row("lowered program")
    assert row("order of sums").endswith(f"| {NUMERICS_VERSION} |")


def test_versions_of_python_and_packages_are_those_of_pyproject() -> None:
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", c)]
    assert row("Python |").split("|")[2].strip() == ", ".join(named)
    required = {r.name: str(r.specifier) for r in map(Requirement, PROJECT["optional-dependencies"]["export"][1:])}
    assert ">=2.13" in required["torch"] and "2.13 or later" in row("torch")
    minor = re.search(r">=(\d+\.\d+)", required["transformers"])
    assert minor is not None and f"| {minor[1]} |" in row("transformers")
    (onnxruntime,) = [r for r in PROJECT["optional-dependencies"]["onnx"] if r.startswith("onnxruntime")]
    assert ">=1.25" in onnxruntime and "1.25 or later" in row("onnxruntime")


def test_the_page_on_installing_has_every_extra() -> None:
    table = INSTALL.partition("## Extras")[2].partition("\n## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`([\w-]+)`", " ".join(first))) == PROJECT["optional-dependencies"].keys()


def test_the_list_of_the_runtime_is_what_it_requires() -> None:
    lines = (REPOSITORY / "examples" / "runtime.txt").read_text(encoding="utf-8").splitlines()
    listed = {Requirement(line).name: line for line in lines if line and not line.startswith("#")}
    required = {Requirement(r).name: r for r in PROJECT["dependencies"]}
    assert {name: str(Requirement(line)) for name, line in listed.items() if name in required} == {
        name: str(Requirement(r)) for name, r in required.items()
    }
    assert listed.keys() - required.keys() == {"markupsafe"}  # jinja2 requires it
    for name in listed:
        assert re.search(rf"^\| .*\b{name}\b.* \| [\d.]+ \| \w", SERVICE, re.M), name


def test_no_page_installs_from_an_index_that_has_no_such_package() -> None:
    """Help texts do, which an installed command prints."""
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    pages.remove(USE / "command-reference.md")
    lines = [
        (page.name, line)
        for page in pages
        for line in page.read_text(encoding="utf-8").splitlines()
        if FIRST_INSTALL.search(line)
    ]
    assert [name for name, _ in lines] == ["install.md"]
    assert "is installed already" in lines[0][1]
