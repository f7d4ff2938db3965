"""Wheels that benchmarks/gpu_truth.py carries: what is downloaded, and what is unpacked on the other machine."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_wheels


@pytest.mark.parametrize("pythons", [("3.12",), ("3.12", "3.13")])
def test_wheels_for_other_pythons(pythons: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    gpu_wheels.download(tmp_path, pythons)
    assert [command[command.index("--python-version") + 1] for command in commands[::2]] == list(pythons)
    assert all("--only-binary" in command for command in commands)
    assert all({"msgspec", "pydantic"} < set(command) and "--no-deps" not in command for command in commands[::2])
    assert all({"ml-dtypes", "--no-deps"} < set(command) for command in commands[1::2])
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=1, stderr="no such wheel"))
    with pytest.raises(ValueError, match=r"wheels for Python 3\.12: no such wheel"):
        gpu_wheels.download(tmp_path, pythons)


@pytest.mark.parametrize("missing", [True, False])
def test_what_is_missing_is_unpacked(missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = gpu_wheels.own_python().replace(".", "")
    for name in (
        f"msgspec-1-cp{version}-cp{version}-x.whl",
        "msgspec-1-cp27-cp27-x.whl",
        "pydantic-2-py3-none-any.whl",
    ):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"{name.partition('-')[0]}/__init__.py", f"of = {name!r}\n")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if missing and n == "msgspec" else find_spec(n))
    environment = {"PYTHONPATH": "src"}
    unpacked = gpu_wheels.unpack(tmp_path, tmp_path / "to", environment)
    assert environment["PYTHONPATH"].split(":") == ([str(tmp_path / "to"), "src"] if missing else ["src"])
    if not missing:
        assert unpacked == [] and not (tmp_path / "to").exists()
        return
    assert unpacked == [f"msgspec-1-cp{version}-cp{version}-x.whl", "pydantic-2-py3-none-any.whl"]
    assert f"cp{version}" in (tmp_path / "to/msgspec/__init__.py").read_text()
