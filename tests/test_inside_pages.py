"""The pages of docs/inside: files and names that they mention exist; the list of architecture.md has the counts of
the pages in docs/inside/adding.

A step there is ``1. `PATH`: text``, with several paths or "(new)" before the colon.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
INSIDE = REPOSITORY / "docs" / "inside"
PAGES = sorted((INSIDE / "adding").glob("*.md"))
STEP = re.compile(r"^\d+\. ((?:`[\w./-]+`(?: \(new\))?(?:, )?)+): ", re.M)
PATH = re.compile(r"(?<![\w/.-])(?:benchmarks|docs|examples|optimizer|passes|plugins|runtime|src|tests)/[\w./-]*\w")
COUNT = re.compile(r"^Files touched: (\d+)( more)?(?:, (\d+) of them new)?$", re.M)
NAME = re.compile(r"`(_*[A-Za-z]\w*(?:\.\w+)*)`")
ROW = re.compile(r"^- \[[^\]]+\]\(adding/([\w-]+)\.md\): .*$", re.M)


def sections(page: Path) -> list[tuple[str, str]]:
    """Returns (heading, text) of each section of a page that has steps."""
    parts = re.split(r"^#+ (.*)\n", page.read_text(encoding="utf-8"), flags=re.M)[1:]
    return [(heading, text) for heading, text in zip(parts[::2], parts[1::2], strict=True) if STEP.search(text)]


def steps(text: str) -> list[tuple[str, bool]]:
    """Returns (path, True if the step makes it) of every file of a section's steps."""
    heads = STEP.findall(text)
    return [(path, bool(new)) for head in heads for path, new in re.findall(r"`([^`]+)`( \(new\))?", head)]


def row(page: Path) -> str:
    """Returns a page's line of the list: its name, and the number of files of its first section."""
    title, first = sections(page)[0]
    count = COUNT.search(first)
    assert count is not None, title
    return f"- [{title.removeprefix('Add ')}](adding/{page.name}): {count[1]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_counts_its_files_and_they_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    absent = set()
    assert sections(page)
    for heading, section in sections(page):
        files = steps(section)
        count = COUNT.search(section)
        assert count is not None, heading
        assert (len({path for path, _ in files}), sum(new for _, new in files)) == (int(count[1]), int(count[3] or 0))
        absent |= {path for path, new in files if new}
    assert not [path for path in absent if (REPOSITORY / path).exists()]
    missing = [path for path in PATH.findall(text) if path not in absent and not (REPOSITORY / path).exists()]
    assert missing == []


@pytest.mark.parametrize("page", [*PAGES, INSIDE / "finding-files.md"], ids=lambda page: page.stem)
def test_the_names_on_a_page_are_in_its_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = [REPOSITORY / path for path in PATH.findall(text)]
    code = "\n".join(
        file.read_text(encoding="utf-8")
        for path in files
        for file in ([path] if path.is_file() else path.rglob("*.py") if path.is_dir() else ())
    )
    names = {name for name in NAME.findall(text) if not (REPOSITORY / name).exists()}
    assert {name for name in names if not all(re.search(rf"\b{part}\b", code) for part in name.split("."))} == set()


def test_the_list_has_every_page_and_its_count(request: pytest.FixtureRequest) -> None:
    table = INSIDE / "architecture.md"
    text = table.read_text(encoding="utf-8")
    rows = {page.stem: row(page) for page in PAGES}
    assert sorted(match[1] for match in ROW.finditer(text)) == sorted(rows)
    expected = ROW.sub(lambda match: rows[match[1]], text)
    if request.config.getoption("--update-golden"):
        table.write_text(expected, encoding="utf-8")
    else:
        assert text == expected


@pytest.mark.parametrize("page", sorted(INSIDE.glob("*.md")), ids=lambda page: page.stem)
def test_the_paths_on_a_page_exist(page: Path) -> None:
    paths = PATH.findall(page.read_text(encoding="utf-8"))
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_the_architecture_page_is_a_few_screens() -> None:
    assert len((INSIDE / "architecture.md").read_text(encoding="utf-8").split()) <= 2800
