from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.check import REPOSITORY, changed_files, commands, main, mirrored_tests
from tests.conftest import TIERS, left_out


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("passes/fusion/fuse_qkv.py", "tests/passes/fusion/test_fuse_qkv.py"),
        ("optimizer/cli/console.py", "tests/optimizer/cli/test_console.py"),
        ("plugins/native/executor.cpp", "tests/plugins/native"),
        ("plugins/cpu/kernels/norm.h", "tests/plugins/cpu"),
        ("runtime/executors/__init__.py", "tests/runtime/executors"),
        ("tests/runtime/engine/test_llm.py", "tests/runtime/engine/test_llm.py"),
        ("tests/conftest.py", None),
        ("docs/README.md", None),
        ("README.md", None),
    ],
)
def test_the_tests_of_a_file(file: str, expected: str | None) -> None:
    assert mirrored_tests(Path(file)) == (None if expected is None else Path(expected))


def test_what_has_changed_is_found(tmp_path: Path) -> None:
    for command in (["init", "-q"], ["config", "user.email", "a@b"], ["config", "user.name", "a"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes/one.py").write_text("")
    (tmp_path / "gone.py").write_text("")
    subprocess.run(["git", "-C", tmp_path, "add", "-A"], check=True)
    subprocess.run(["git", "-C", tmp_path, "commit", "-qm", "a"], check=True)
    assert changed_files(tmp_path) == []
    (tmp_path / "passes/one.py").write_text("x")
    (tmp_path / "passes/a new one.py").write_text("")
    (tmp_path / "gone.py").unlink()
    assert sorted(map(str, changed_files(tmp_path))) == ["gone.py", "passes/a new one.py", "passes/one.py"]
    lines = [" ".join(c[1:]) for c in commands(changed_files(tmp_path), tmp_path)]
    assert [line.split()[1] for line in lines] == ["ruff", "ruff", "mypy", "pytest"]
    assert "gone.py" not in lines[0] and "passes/one.py" in lines[0]


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(REPOSITORY / "passes/nothing.py")]) == 2
    assert "there is no passes/nothing.py" in capsys.readouterr().err


def test_a_tier_leaves_out_what_it_says_and_never_the_first() -> None:
    cases = [f"case {i}]" for i in range(300)]
    selected = [c for c in cases if left_out(3, 1, c, first=c == cases[0]) is None]
    assert cases[0] in selected and 60 < len(selected) < 140
    assert {left_out(3, 1, c, first=False) for c in cases} == {None, "matrix"}
    marks = [left_out(0, 2, c, first=c == cases[0]) for c in cases]
    assert marks[0] == "matrix" and set(marks) == {"matrix", "soak"}
    assert left_out(0, 1, "", first=True) == "matrix" and left_out(3, 1, "", first=False) is None


def test_tiers_name_tests_that_there_are() -> None:
    for name in TIERS:
        file, _, test = name.partition("::")
        path = REPOSITORY / file
        assert path.exists(), name
        assert not test or f"def {test}(" in path.read_text(encoding="utf-8"), name
