"""A table is put between its marks, and nothing else of the page changes; a page without both is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers.marked_table import END, MarkedTable, line

TABLE = MarkedTable("some.py")


def test_a_table_is_put_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    other = f"{MarkedTable('other.py').begin}\nother\n{END}"
    page.write_text(f"{other}\nbefore\n{TABLE.begin}\nold\n{END}\nafter\n")
    for text in ("new", line(["a", "b"])):
        TABLE.put(page, text)
        assert page.read_text() == f"{other}\nbefore\n{TABLE.begin}\n\n{text}\n\n{END}\nafter\n"
    assert line(["a", "b"]) == "| a | b |"


@pytest.mark.parametrize("text", ["nothing", TABLE.begin, f"{END}\n{TABLE.begin}\n"])
def test_a_page_without_both_marks(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(SystemExit, match="the marks"):
        TABLE.put(page, "new")
    assert page.read_text() == text
