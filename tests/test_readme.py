"""The README's commands and its Python, and what ``make demo`` says to try next, run as printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_snippets import run_python, script_of

REPOSITORY = Path(__file__).resolve().parent.parent
README = REPOSITORY / "README.md"
MINUTES = 2
WORDS_A_MINUTE = 300
"""That people read a technical text with; tables and code count in full here."""


def commands() -> list[str]:
    """The lines of the README's ``sh`` blocks."""
    return [line for line in script_of(README.read_text(encoding="utf-8"), "sh").splitlines() if line]


def run(command: str, folder: Path, said: str = "") -> str:
    """What a line of shell prints in ``folder``."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"TERM": "dumb", "MAKEFLAGS": ""}
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        input=said,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_it_takes_two_minutes_to_read() -> None:
    assert (
        len(README.read_text(encoding="utf-8").split()) <= MINUTES * WORDS_A_MINUTE + 100
    )  # 100 are of two tables' rules


def test_its_links_lead_somewhere() -> None:
    for page in (README, REPOSITORY / "docs" / "README.md"):
        for target in {part.split(")")[0].split("#")[0] for part in page.read_text(encoding="utf-8").split("](")[1:]}:
            assert not target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_its_make_targets_exist() -> None:
    made = [line.partition("#")[0].strip() for line in commands() if line.startswith("make ")]
    assert made == ["make demo", "make test"]
    for command in made:
        run(f"{command} -n", REPOSITORY)


@pytest.mark.matrix
def test_its_commands_run_as_printed(tmp_path: Path, smollm2_gguf: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    said = run("\n".join(line for line in commands() if not line.startswith("make ")), tmp_path)
    assert "ocean" in said
    assert "ocean" in run_python(README, tmp_path, {}).stdout

    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "smollm2.bundle").symlink_to(tmp_path / "smollm2.bundle")
    printed = run("make --silent try", REPOSITORY)
    tried = [line.strip() for line in printed.splitlines() if line.startswith("  ")]
    assert len(tried) >= 3
    for command in tried:
        assert run(command, tmp_path, "What is water made of?\n").strip(), command
