from __future__ import annotations

import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.optimizer.verify.verify import DEFAULT_MAX_KL
from enginewright.plugins.emit.base import EmitOptions
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.plugins.onnx.compile.emitter import OnnxEmitter
from enginewright.plugins.onnx.kernels import library
from enginewright.plugins.onnx.recipe import OnnxSection
from enginewright.plugins.onnx.serve.executor import variant_io
from enginewright.plugins.steps.linear_io import LinearIo
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import target_groups
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.errors import MissingDependencyError
from enginewright.runtime.shared.progress import silent
from tests.conftest import make_tiny_model
from tests.passes.small_programs import decoder


def test_one_export_writes_both_targets_and_compares_both_with_the_source(tmp_path: Path) -> None:
    report = export(make_tiny_model("Mistral"), tmp_path / "b", recipe="f32", targets=("cpu", "onnx"))
    assert [(v.target, v.random_tokens.top1_agreement) for v in report.verification] == [("cpu", 1.0), ("onnx", 1.0)]
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.manifest.targets == ("cpu", "onnx") and "model.onnx" in bundle.files
    io = bundle.target("onnx").section(LinearIo)
    assert io is not None and io.file == "model.onnx" and io.variant == "standard"
    assert [(g.layers, g.window, g.mask) for g in io.cache_groups] == [((0, 1), 8, "mask_w8")]
    assert bundle.target("cpu").section(LinearIo) is None
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


@pytest.mark.parametrize(("family", "recipe"), [("Llama", "f32"), ("Mistral", "int8")])
def test_a_file_of_16_bits(family: str, recipe: str, tmp_path: Path) -> None:
    """Run on the CPU, whose provider has float16, it gives the source's logits within float16's rounding."""
    chosen = load_recipe(recipe).model_copy(update={"onnx": OnnxSection(floats="f16")})
    report = export(make_tiny_model(family), tmp_path / "b", recipe=chosen, targets=("onnx",))
    by_variant = {v.target: v for v in report.verification}
    assert set(by_variant) == {"onnx (f16)", "onnx (standard)"}
    assert by_variant["onnx (f16)"].max_kl == (DEFAULT_MAX_KL if recipe == "f32" else by_variant["onnx (f16)"].max_kl)
    assert by_variant["onnx (f16)"].random_tokens.kl_mean < by_variant["onnx (standard)"].random_tokens.kl_mean + 1e-4
    bundle = Bundle.open(tmp_path / "b")
    for provider, variant, dtype in (
        ("cpu", "standard", "f32"),
        ("cuda", "f16", "f16"),
        ("directml", "standard", "f32"),
    ):
        io = variant_io(bundle, "onnx", provider, None)
        assert (io.variant, {g.dtype for g in io.cache_groups}) == (variant, {dtype})
    wide, narrow = (target_groups(bundle, "onnx", 64, Placement(provider=p)) for p in ("cpu", "cuda"))
    assert [cache_block_bytes(g) for g in wide] == [2 * cache_block_bytes(g) for g in narrow]
    model = onnx.load(tmp_path / "b" / "model.f16.onnx", load_external_data=False)
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
    assert {kind for name, kind in kinds.items() if name.startswith(("past", "present"))} == {TensorProto.FLOAT16}
    assert kinds["logits"] == TensorProto.FLOAT
    matrices = [w for w in model.graph.initializer if ".weight.onnx" in w.name and len(w.dims) > 1]
    assert TensorProto.FLOAT not in {w.data_type for w in matrices} and (matrices or recipe == "int8")


def test_a_file_of_bf16_is_written_and_not_run(tmp_path: Path) -> None:
    chosen = load_recipe("f32").model_copy(update={"onnx": OnnxSection(floats="bf16")})
    report = export(make_tiny_model("Llama"), tmp_path / "b", recipe=chosen, targets=("onnx",))
    assert [v.target for v in report.verification] == ["onnx (standard)"]
    onnx.checker.check_model(tmp_path / "b" / "model.bf16.onnx", full_check=True)
    io = variant_io(Bundle.open(tmp_path / "b"), "onnx", "cuda", None)
    assert (io.file, {g.dtype for g in io.cache_groups}) == ("model.bf16.onnx", {"bf16"})


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "enginewright.plugins.graphs.emit_model", raising=False)
    monkeypatch.setitem(sys.modules, "onnx", None)
    for name in [name for name in sys.modules if name.startswith("enginewright.plugins.graphs.")]:
        monkeypatch.delitem(sys.modules, name)
    refusal = pytest.raises(MissingDependencyError, match="target onnx: writing it needs onnx")
    with BundleWriter(tmp_path / "b") as writer, refusal as error:
        OnnxEmitter().emit(decoder(), writer, silent)
    assert "enginewright[onnx]" in str(error.value)


def test_a_missing_library_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_operators", lambda: None)
    error = pytest.raises(MissingDependencyError, match=r"libenginewright_onnxruntime\.so, .* is missing")
    with BundleWriter(tmp_path / "b") as writer:
        with error:
            OnnxEmitter().emit(decoder(), writer, silent, EmitOptions(sections=(OnnxSection(kernels=True),)))
        assert not list(writer.folder.rglob("*.onnx"))
