"""The target is refused before any work if it can't be compiled, with a list of all that is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from enginewright.optimizer.export import export
from enginewright.plugins.doctor.machine import Machine
from enginewright.plugins.torch_tensorrt.compile import emitter
from enginewright.runtime.shared.errors import EnginewrightError, MissingDependencyError, TargetError
from tests.plugins.doctor.test_examine import PLAIN, WITH_GPU

CPU_TORCH = replace(PLAIN, packages={"torch": "2.13.0+cpu", "torch_tensorrt": "2.13.0"})


@pytest.mark.parametrize(
    ("machine", "error", "reasons"),
    [
        (
            replace(PLAIN, packages={"torch": "2.13.0+cpu"}),
            MissingDependencyError,
            ("without CUDA", "torch_tensorrt is"),
        ),
        (
            replace(WITH_GPU, packages={"torch": "2.13.0"}, torch_cuda="13.0"),
            MissingDependencyError,
            ("torch_tensorrt",),
        ),
        (CPU_TORCH, TargetError, ("2.13.0+cpu is a build without CUDA", "GPU")),
    ],
)
def test_it_is_refused_before_any_work(
    machine: Machine,
    error: type[EnginewrightError],
    reasons: tuple[str, ...],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(emitter, "look_at_machine", lambda: machine)
    with pytest.raises(error, match="target torch-tensorrt: it can't be compiled on this machine: ") as raised:
        export(tiny_folder, tmp_path / "a.bundle", targets=("cpu", "torch-tensorrt"))
    for reason in reasons:
        assert reason in raised.value.message
    assert raised.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_has_it_all_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"torch": "2.14.0", "torch_tensorrt": "2.14.0"}
    monkeypatch.setattr(emitter, "look_at_machine", lambda: replace(WITH_GPU, packages=packages, torch_cuda="13.0"))
    emitter.check_machine()
