"""The README's commands and its Python, and what ``make demo`` says to try next, run as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_snippets import run_python, script_of
from tests.waiting import HANG, wait_until

REPOSITORY = Path(__file__).resolve().parent.parent
README = REPOSITORY / "README.md"
EVALUATION_TEXT = REPOSITORY / "optimizer" / "measure" / "evaluation_text.txt"
MINUTES = 2
WORDS_A_MINUTE = 300
"""Words a minute that people read in a technical text; tables and code count in full here."""


def commands() -> list[str]:
    """The lines of the README's ``sh`` blocks."""
    return [line for line in script_of(README.read_text(encoding="utf-8"), "sh").splitlines() if line]


def prose_commands() -> list[str]:
    """The whole commands that stand in the README's prose: those with a bundle or a model."""
    return [
        line for line in re.findall(r"`(optimize [^`]+)`", README.read_text(encoding="utf-8")) if len(line.split()) > 2
    ]


def serve(command: str, folder: Path) -> None:
    """Starts the server of a command at a free port, and ends it once it serves."""
    log = folder / "server.log"
    shell = ["bash", "-ec", f"source .venv/bin/activate; exec {command} --port 0"]
    with log.open("w") as file, subprocess.Popen(shell, cwd=folder, stdout=file, stderr=file) as server:
        try:
            wait_until(lambda: "serving at" in log.read_text() or server.poll() is not None)
            assert server.poll() is None, log.read_text()
        finally:
            server.terminate()
        assert server.wait(HANG) == 0, log.read_text()


def run(command: str, folder: Path, said: str = "") -> str:
    """The output of a line of shell in ``folder``."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"TERM": "dumb", "MAKEFLAGS": ""}
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        input=said,
        capture_output=True,
        text=True,
        timeout=HANG,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_it_takes_two_minutes_to_read() -> None:
    tables = r"begin -->.*?<!-- [^>]*: end|<!-- table:.*?<!-- end of table"
    text = re.sub(tables, "", README.read_text(encoding="utf-8"), flags=re.S)  # tables and
    text = re.sub(r"<[^>]+>", "", text)  # pictures are looked at
    assert sum(any(c.isalnum() for c in word) for word in text.split()) <= MINUTES * WORDS_A_MINUTE


def test_pictures_are_there_in_light_and_dark_and_small() -> None:
    text = README.read_text(encoding="utf-8")
    elements = re.findall(r"<picture>.*?</picture>", text, re.S)
    assert len(elements) == 2 and all("prefers-color-scheme: dark" in one for one in elements)
    pictures = [REPOSITORY / name for name in re.findall(r'(?:src|srcset)="([^"]+)"', text)]
    assert len(pictures) == 4
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 200_000


def anchor(heading: str) -> str:
    """The link target that GitHub makes for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lstrip("#").strip().lower()).replace(" ", "-")


def test_links_of_all_pages_lead_somewhere() -> None:
    pages = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]
    pages += sorted((REPOSITORY / "benchmarks" / "notes").glob("*.md"))
    assert len(pages) > 40
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            target, _, place = link.partition("#")
            path = (page.parent / target) if target else page
            assert "://" in link or path.exists(), f"{page.name}: {link}"
            if place and "://" not in link:
                lines = path.read_text(encoding="utf-8").splitlines()
                assert place in [anchor(line) for line in lines if line.startswith("#")], f"{page.name}: {link}"


def test_the_index_has_every_page() -> None:
    """The pages on adding something are in the tables of architecture.md."""
    docs = REPOSITORY / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    index += (docs / "inside" / "architecture.md").read_text(encoding="utf-8").replace("](adding/", "](inside/adding/")
    for page in sorted(docs.glob("*/**/*.md")):
        assert f"]({page.relative_to(REPOSITORY / 'docs')})" in index, page


def test_its_make_targets_exist() -> None:
    targets = [line.partition("#")[0].strip() for line in commands() if line.startswith("make ")]
    assert targets == ["make demo", "make test"]
    for command in targets:
        run(f"{command} -n", REPOSITORY)


def test_a_demo_installs_no_more_than_it_needs() -> None:
    """Not what developing needs, which is twice as much."""
    lines = run("make --dry-run --always-make demo", REPOSITORY).splitlines()
    installed = [line for line in lines if " install " in line and "[dev]" in line]
    assert not installed


def test_a_demo_says_what_goes_on() -> None:
    """A line for each phase, with the seconds since its start: a slow machine takes minutes for some."""
    output = run("make --dry-run --always-make demo .venv/.export", REPOSITORY)
    for phase in ("installing what builds need", "installing PyTorch", "are installed", "are compiled", "exporting"):
        assert phase in output


def test_a_wheel_needs_what_builds_need_alone() -> None:
    installed = [line for line in run("make --dry-run --always-make wheel", REPOSITORY).splitlines() if "pip" in line]
    assert installed and not any(word in line for line in installed for word in ("[dev]", "torch", "--editable"))


def test_a_wheel_is_for_more_than_the_machine_that_made_it() -> None:
    assert "auditwheel repair --plat manylinux_" in run("make --dry-run wheel", REPOSITORY)


@pytest.mark.matrix
def test_its_commands_run_as_printed(tmp_path: Path, smollm2_gguf: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "short.txt").write_text("\n".join(EVALUATION_TEXT.read_text(encoding="utf-8").splitlines()[:40]))
    lines = [line for line in commands() if not line.startswith("make ")]
    (at,) = (i for i, line in enumerate(lines) if line.startswith("optimize eval "))
    evaluate, _, comment = lines[at].partition("#")
    lines[at] = f"{evaluate} --text short.txt  # {comment}"  # of the package's 9,000 tokens the source takes a minute
    output = run("\n".join(lines), tmp_path)
    assert "ocean" in output and "KL" in output
    assert "ocean" in run_python(README, tmp_path, {}).stdout

    question = "What is water made of?\n"
    for command in prose_commands():
        if command.startswith("optimize serve "):
            serve(command, tmp_path)
        else:
            assert run(f"source .venv/bin/activate; model={smollm2_gguf}; {command}", tmp_path, question).strip(), (
                command
            )

    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "smollm2.bundle").symlink_to(tmp_path / "smollm2.bundle")
    printed = run("make --silent try", REPOSITORY)
    tried = [line.strip() for line in printed.splitlines() if line.startswith("  ")]
    assert len(tried) >= 3
    for command in tried:
        if command.startswith(".venv/bin/optimize bench "):  # without options it measures more sizes, for minutes
            command += " --prompt 64 --batch 1,4 --context 64 --steps 8 --rounds 1"
        assert run(command, tmp_path, "What is water made of?\n").strip(), command
