from __future__ import annotations

import sys
from pathlib import Path

import pytest

from enginewright.optimizer.emit.onnx.emitter import OnnxEmitter
from enginewright.optimizer.emit.shared.base import EmitOptions
from enginewright.optimizer.emit.shared.bundle_writer import BundleWriter
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.target_sections import OnnxSection
from enginewright.optimizer.shared.progress import silent
from enginewright.plugins.onnxruntime import library
from enginewright.plugins.shared.errors import MissingDependencyError
from enginewright.runtime.bundle.reader import Bundle
from tests.conftest import make_tiny_model
from tests.passes.small_programs import decoder


def test_one_export_writes_both_targets_and_compares_both_with_the_source(tmp_path: Path) -> None:
    report = export(make_tiny_model("Mistral"), tmp_path / "b", recipe="f32", targets=("cpu", "onnx"))
    assert [(v.target, v.random_tokens.top1_agreement) for v in report.verification] == [("cpu", 1.0), ("onnx", 1.0)]
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.manifest.targets == ("cpu", "onnx") and "model.onnx" in bundle.files
    io = bundle.target("onnx").io
    assert io is not None and io.file == "model.onnx" and io.variant == "standard"
    assert [(g.layers, g.window, g.mask) for g in io.cache_groups] == [((0, 1), 8, "mask_w8")]
    assert bundle.target("cpu").io is None
    assert {"enginewright", "torch", "transformers", "onnx"} == bundle.manifest.toolchain.keys()
    # What both read in the same order is stored once.
    norm, again = (bundle.tensor(f"model.norm.weight{suffix}") for suffix in ("", ".onnx"))
    assert (norm.blob, norm.offset) == (again.blob, again.offset)
    shared = bundle.index.tensors.keys() - bundle.index.stored_once().keys()
    assert shared and all(name.endswith(".onnx") for name in shared)
    # Each number is of the source, also where it is stored the other way round.
    entry = bundle.index.tensors["model.layers.0.self_attn.o_proj.weight.onnx.columns"]
    assert entry.shape == (64, 64) and [(p.source, p.axis) for p in entry.parts] == [
        ("model.layers.0.self_attn.o_proj.weight", 1)
    ]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "enginewright.optimizer.emit.onnx.emit_model", raising=False)
    monkeypatch.setitem(sys.modules, "onnx", None)
    for name in [name for name in sys.modules if name.startswith("enginewright.optimizer.emit.onnx.")]:
        monkeypatch.delitem(sys.modules, name)
    wanted = pytest.raises(MissingDependencyError, match="target onnx: writing it needs onnx")
    with BundleWriter(tmp_path / "b") as writer, wanted as error:
        OnnxEmitter().emit(decoder(), writer, silent)
    assert "enginewright[onnx]" in str(error.value)


def test_a_missing_library_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_operators", lambda: None)
    wanted = pytest.raises(MissingDependencyError, match=r"libenginewright_onnxruntime\.so, .* is missing")
    with BundleWriter(tmp_path / "b") as writer:
        with wanted:
            OnnxEmitter().emit(decoder(), writer, silent, EmitOptions(onnx=OnnxSection(kernels=True)))
        assert not list(writer.folder.rglob("*.onnx"))
