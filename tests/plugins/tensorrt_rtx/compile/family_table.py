"""Tables in benchmarks/notes with a row for each family that the onnx target takes, which tests make and compare."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.families import working_families

UNTRIED = frozenset(
    [
        "bart",
        "bert",
        "big_bird",
        "blenderbot",
        "blenderbot-small",
        "bloom",
        "codegen",
        "electra",
        "ernie",
        "falcon",
        "gpt_neo",
        "gpt_neox_japanese",
        "gptj",
        "marian",
        "mbart",
        "megatron-bert",
        "mpt",
        "mvp",
        "openai-gpt",
        "pegasus",
        "plbart",
        "rembert",
        "roformer",
        "trocr",
        "xglm",
    ]
)
"""Families that write their attention or their positions out, which nobody has tried on these targets yet."""


def families() -> list[str]:
    """The families that the cpu target takes and that were tried on these."""
    return [name for name in working_families(recurrent=False) if name not in UNTRIED]


@dataclass(frozen=True)
class FamilyTable:
    """The table at the end of a page of benchmarks/notes that begins with ``head``."""

    page: str
    head: str

    def rows(self) -> dict[str, str]:
        """The table's rows by family."""
        return self._rows(self._path.read_text())

    def hold(self, family: str, row: str, config: pytest.Config) -> None:
        """Asserts that the page has this row of a family; with ``--update-golden`` writes it there."""
        if not config.getoption("--update-golden"):
            assert self.rows()[family] == row, (
                f"benchmarks/notes/{self.page} is stale: run these tests with -m matrix --update-golden"
            )
            return
        with open(self._path, "r+", encoding="utf-8") as file:  # workers wait for one another
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read()
            rows = {f: r for f, r in self._rows(text).items() if f in families()} | {family: row}
            file.seek(0)
            file.truncate()
            file.write(text.partition(self.head)[0] + self.head + "".join(rows[f] + "\n" for f in sorted(rows)))

    @property
    def _path(self) -> Path:
        return REPOSITORY / "benchmarks" / "notes" / self.page

    def _rows(self, text: str) -> dict[str, str]:
        lines = text.partition(self.head)[2].splitlines()
        return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
