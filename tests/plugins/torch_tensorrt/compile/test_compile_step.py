"""All but the library itself: something in memory takes what Torch-TensorRT would, and gives back what it was given."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from enginewright.optimizer.check_bundle import check_bundle
from enginewright.optimizer.export import export
from enginewright.optimizer.export import stages as export_stages
from enginewright.plugins.torch_tensorrt.compile import emitter
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import VerificationError
from tests.conftest import make_tiny_model
from tests.plugins.doctor.test_examine import WITH_GPU


class Compiled(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, off: float) -> None:
        super().__init__()
        self.module, self.off = module, off

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, *caches = self.module(*inputs)
        return (logits + self.off, *caches)


class Library(ModuleType):
    """Stands in the place of torch_tensorrt. ``off`` is added to the logits that it gives; ``static``: it saves one
    size."""

    __version__ = "2.14.0"

    def __init__(self, off: float = 0.0) -> None:
        super().__init__("torch_tensorrt")
        self.off, self.static = off, False
        self.compiled: dict[str, Any] = {}
        self.dynamo = SimpleNamespace(compile=self._compile)
        self.Input = SimpleNamespace

    def _compile(self, exported: torch.export.ExportedProgram, **options: Any) -> Any:
        self.compiled = options | {"exported": exported}
        return Compiled(exported.module(), self.off)

    def save(self, compiled: Any, path: str, **options: Any) -> None:
        """Traces it anew, as the real one does."""
        assert options["output_format"] == "exported_program"
        shapes = None if self.static else options.get("dynamic_shapes")
        with torch.no_grad():
            traced = torch.export.export(compiled, tuple(options["arg_inputs"]), dynamic_shapes=shapes, strict=False)
        torch.export.save(traced, path)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setitem(sys.modules, "torch_tensorrt", library)
    name = "enginewright.plugins.torch_tensorrt.compile.compile_step"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib.import_module(name), "DEVICE", "cpu")
    packages = {"torch": "2.14.0", "torch_tensorrt": "2.14.0"}
    monkeypatch.setattr(emitter, "look_at_machine", lambda: replace(WITH_GPU, packages=packages, torch_cuda="13.0"))
    monkeypatch.setattr(export_stages, "version", lambda name: "0")
    return library


def test_an_export_has_what_was_compiled(machine: Library, tmp_path: Path) -> None:
    report = export(make_tiny_model("Llama"), tmp_path / "b", recipe="f32", targets=("cpu", "torch-tensorrt"))
    assert [v.target for v in report.verification] == ["cpu"]  # nothing of ours runs the other
    bundle = Bundle.open(tmp_path / "b")
    bundle.verify_hashes()
    assert bundle.manifest.toolchain.keys() == {"enginewright", "torch", "transformers", "torch_tensorrt"}
    ids = next(i for i in machine.compiled["arg_inputs"] if i.dtype == torch.int32)
    assert (ids.min_shape, ids.opt_shape, ids.max_shape) == ((2,), (64,), (4096,))
    ops = {str(op) for op in machine.compiled["torch_executed_ops"]}
    assert ops == {"ew.kv_write.default", "ew.paged_attention.default"}
    assert machine.compiled["disable_tf32"] is True
    loaded = torch.export.load(tmp_path / "b" / "targets/torch-tensorrt/step.pt2")
    assert len(loaded.graph_signature.user_inputs) == 11
    reasons = {t.target: t.why_not for t in check_bundle(tmp_path / "b").targets}
    assert reasons["cpu"] is None and "this Enginewright runs" in str(reasons["torch-tensorrt"])


def test_a_file_of_one_size_ends_the_export(machine: Library, tmp_path: Path) -> None:
    machine.static = True
    message = r"torch_tensorrt 2\.14\.0 saved doesn't take a step of 21 tokens: "
    with pytest.raises(VerificationError, match=message):
        export(make_tiny_model("Llama"), tmp_path / "b", recipe="f32", targets=("torch-tensorrt",))
    assert list(tmp_path.iterdir()) == []


def test_other_logits_end_the_export(machine: Library, tmp_path: Path) -> None:
    machine.off = 1.0
    with pytest.raises(VerificationError, match=r"torch_tensorrt 2\.14\.0 compiled gives other logits than"):
        export(make_tiny_model("Llama"), tmp_path / "b", recipe="f32", targets=("torch-tensorrt",))
    assert list(tmp_path.iterdir()) == []
