"""Tables of Markdown that a script keeps on a page, between two marks of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

END = "<!-- end of table -->"


def line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(cells) + " |"


@dataclass(frozen=True)
class MarkedTable:
    """The table that ``script`` makes."""

    script: str

    @property
    def begin(self) -> str:
        """The mark before the table."""
        return f"<!-- table: benchmarks/{self.script} -->"

    def split(self, page: Path) -> tuple[str, str]:
        """Splits a page into the text before and after its table. Exits if the page lacks one of the two marks."""
        before, begin, rest = page.read_text(encoding="utf-8").partition(self.begin)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise SystemExit(f"{page}: the marks {self.begin} and {END} are not there")
        return before, after

    def put(self, page: Path, table: str) -> None:
        """Replaces what is between the marks."""
        before, after = self.split(page)
        page.write_text(f"{before}{self.begin}\n\n{table}\n\n{END}{after}", encoding="utf-8")
