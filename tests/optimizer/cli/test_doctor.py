from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.plugins.doctor import machine as doctor_machine
from enginewright.plugins.doctor.machine import Machine
from tests.plugins.doctor.test_examine import PLAIN, WITH_GPU


def run(monkeypatch: pytest.MonkeyPatch, machine: Machine, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(doctor_machine, "look_at_machine", lambda: machine)
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.stdout


def test_a_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    code, printed = run(monkeypatch, PLAIN)
    assert code == 0
    assert "tensorrt_rtx    not installed" in printed
    assert "no NVIDIA driver" in printed
    code, printed = run(monkeypatch, WITH_GPU)
    assert code == 0
    assert "driver          580.95.05, CUDA up to 13.0" in printed
    assert "NVIDIA RTX 4090, compute capability 8.9" in printed


def test_json(monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path) -> None:
    code, printed = run(monkeypatch, WITH_GPU, str(tiny_bundle), "--json")
    assert code == 0
    data = json.loads(printed)
    assert data["bundle"]["path"] == str(tiny_bundle)
    assert data["machine"]["gpus"][0]["capability"] == "8.9"
    assert data["targets"][0]["target"] == "cpu"
    assert data["targets"][0]["verdict"] == "runs"


def test_the_exit_code(monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path, tmp_path: Path) -> None:
    bare = replace(PLAIN, instruction_sets=(), problems={"enginewright": "no such symbol"})
    for machine, arguments, exit_code in (
        (PLAIN, [str(tiny_bundle)], 0),
        (PLAIN, [str(tiny_bundle), "--target", "cpu"], 0),
        (PLAIN, [str(tiny_bundle), "--target", "cpu", "--target", "tensorrt-rtx"], 15),
        (bare, [str(tiny_bundle)], 15),
        (PLAIN, ["--target", "rocket"], 2),
        (PLAIN, [str(tmp_path)], 7),
    ):
        code, printed = run(monkeypatch, machine, *arguments)
        assert code == exit_code, arguments
        if machine is bare:
            assert "no such symbol" in printed
