"""``make check``: lint, types, and the tests of what has changed, in a minute and a half.

    python tests/check.py [FILE ...]        # without files: those that differ from the last commit

A file's tests are those that mirror it (passes/fusion/fuse_qkv.py has tests/passes/fusion/test_fuse_qkv.py), or those
of its folder where there are none; one export comes with them. ``make test`` runs all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PARTS = ("optimizer", "passes", "plugins", "runtime", "benchmarks", "examples")
ALWAYS = ("tests/test_architecture.py", "tests/optimizer/export/test_run.py::test_a_recipe_object_is_taken_too")
CPP = (".cpp", ".h")
LONG = 600
"""Lines of a file that is worth a second look."""


def mirrored_tests(file: Path, repository: Path = REPOSITORY) -> Path | None:
    """The tests of one file of the repository, a file or a folder; None where it has none. Paths are relative."""
    if file.parts[0] == "tests":
        return file if file.name.startswith("test_") and (repository / file).is_file() else None
    if file.parts[0] not in PARTS:
        return None
    mirrored = Path("tests") / file.parent / f"test_{file.stem}.py"
    if (repository / mirrored).is_file():
        return mirrored
    folder = mirrored.parent
    while len(folder.parts) > 2 and not (repository / folder).is_dir():
        folder = folder.parent
    return folder if (repository / folder).is_dir() and len(folder.parts) > 2 else None


def changed_files(repository: Path = REPOSITORY) -> list[Path]:
    """The files that differ from the last commit, new ones too."""
    listed = subprocess.run(
        ["git", "-C", repository, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [Path(entry[3:]) for entry in listed.split("\0") if entry]


def commands(files: Sequence[Path], repository: Path = REPOSITORY) -> Iterable[list[str]]:
    """The commands to run, in order."""
    there = [file for file in files if (repository / file).is_file()]
    python = [str(file) for file in there if file.suffix == ".py"]
    cpp = [str(file) for file in there if file.suffix in CPP]
    module = [sys.executable, "-m"]
    if python:
        yield [*module, "ruff", "check", "--quiet", *python]
        yield [*module, "ruff", "format", "--check", "--quiet", *python]
        yield [*module, "mypy"]
    if cpp:
        yield [str(Path(sys.executable).with_name("clang-format")), "--dry-run", "--Werror", *cpp]
        yield ["make", "--no-print-directory", "test-cpp"]
    tests = dict.fromkeys(str(path) for file in files if (path := mirrored_tests(file, repository)) is not None)
    every = ["-m", "not soak"] if all(test.endswith(".py") for test in tests) else []  # of a folder the quick tier
    yield [*module, "pytest", "-q", "-n", "2", "--dist", "loadfile", *every, *tests, *ALWAYS]


def main(arguments: Sequence[str]) -> int:
    """Runs all, stops at the first that fails, and returns its exit status."""
    files = [Path(a).resolve().relative_to(REPOSITORY) for a in arguments] or changed_files()
    if missing := [str(file) for file in files if arguments and not (REPOSITORY / file).exists()]:
        print(f"check: there is no {', '.join(missing)}", file=sys.stderr)
        return 2
    for file in files:
        if file.suffix in (".py", *CPP) and (REPOSITORY / file).is_file():
            lines = len((REPOSITORY / file).read_text(encoding="utf-8").splitlines())
            if lines > LONG:
                print(f"check: {file} has {lines} lines: is it one thing?", flush=True)
    for command in commands(files):
        print("+", " ".join(command[1:] if command[0] == sys.executable else command), flush=True)
        if status := subprocess.run(command, check=False, cwd=REPOSITORY).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
