"""The kernels variant through the export, the bundle and the scheduler, with its library and without."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, with_cache
from enginewright.optimizer.recipes.sections import BudgetSection
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.plugins.onnx.kernels import library
from enginewright.plugins.onnx.recipe import OnnxSection
from enginewright.plugins.onnx.serve import executor as executors
from enginewright.plugins.steps.linear_io import KERNELS_FILE
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import BundleError, MissingDependencyError

from .test_onnx_contrib import check_tokens, opened
from .test_onnx_families import TOLERANCE
from .tiny_configs import tiny_family

BOTH = OnnxSection(contrib=True, kernels=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gemma2: layers with windows and without, a softcap, groups of two heads, a tied table."""
    folder = tmp_path_factory.mktemp("kernels") / "b"
    report = export(tiny_family("gemma2"), folder, recipe=Recipe(name="kernels", targets=("cpu", "onnx"), onnx=BOTH))
    assert [v.target for v in report.verification] == ["cpu", "onnx (standard)", "onnx (contrib)", "onnx (kernels)"]
    return folder


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the library of operators, as if enginewright were installed without it."""
    for module in (library, executors):
        monkeypatch.setattr(module, "find_operators", lambda: None)


def variant_of(llm: LLM) -> object:
    return llm.info()["executor"]["variant"]


def test_tokens_are_those_of_the_standard_file(path: Path) -> None:
    check_tokens(path, "kernels")


def test_as_many_threads_as_there_are(path: Path) -> None:
    """The products have the same bits; what onnxruntime's own operators have is within rounding."""
    prompt = np.random.default_rng(4).integers(3, 256, 30).tolist()
    logits = []
    for threads in (1, 2):
        with LLM(path, target="onnx", threads=threads, context=64) as llm:
            assert llm.info()["executor"]["threads"] == threads and variant_of(llm) == "kernels"
            logits.append(llm.logits(prompt))
    np.testing.assert_allclose(*logits, atol=TOLERANCE)


def test_without_the_library_the_next_variant_runs(path: Path, no_library: None) -> None:
    with opened(path, None) as llm:
        assert variant_of(llm) == "contrib"
        assert len(llm.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
    with pytest.raises(
        MissingDependencyError, match=r"libenginewright_onnxruntime\.so, .* is missing .*\n.*cmake --build build"
    ):
        opened(path, "kernels")


def test_kernels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(name="kernels", targets=("onnx",), onnx=OnnxSection(kernels=True))
    report = export(tiny_family("llama"), tmp_path / "b", recipe=recipe)
    assert [v.target for v in report.verification] == ["onnx (standard)", "onnx (kernels)"]
    assert (tmp_path / "b" / KERNELS_FILE).is_file() and not (tmp_path / "b/model.contrib.onnx").exists()
    with opened(tmp_path / "b", None) as llm:
        assert variant_of(llm) == "kernels"
    with pytest.raises(BundleError, match="has no variant 'contrib'; it has standard, kernels"):
        opened(tmp_path / "b", "contrib")
    monkeypatch.setattr(executors, "find_operators", lambda: None)
    with opened(tmp_path / "b", None) as llm:
        assert variant_of(llm) == "standard"


def check_panels_are_stored_once(path: Path) -> int:
    """The number of weights with panels in the onnx target's file; each must be the cpu target's bytes."""
    tensors = Bundle.open(path).index.tensors
    panels = {name: entry for name, entry in tensors.items() if name.endswith(".onnx.panels")}
    for name, entry in panels.items():
        of_cpu = tensors[name.removesuffix(".onnx.panels")]
        assert (entry.blob, entry.offset, entry.bytes) == (of_cpu.blob, of_cpu.offset, of_cpu.bytes), name
        assert (entry.layout, entry.dtype, entry.parts) == (of_cpu.layout, of_cpu.dtype, of_cpu.parts), name
    return len(panels)


def test_the_panels_are_the_cpu_targets(path: Path) -> None:
    assert check_panels_are_stored_once(path) == 9  # four in each of two layers, and the head
    used = {
        name
        for node in onnx.load(path / KERNELS_FILE, load_external_data=False).graph.node
        if node.op_type == "Linear"
        for name in node.input[1:]
    }
    assert len(used) == 9 and all(name.endswith(".onnx.panels") for name in used)


INT8 = WeightFormat(storage="int8", activation="int8")
INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
INT4_CHANNEL = WeightFormat(storage="int4", activation="int8")
BF16 = WeightFormat(storage="bf16", activation="bf16")


@pytest.mark.parametrize("weights", [INT8, INT4, INT4_CHANNEL, BF16], ids=lambda weights: weights.storage)
def test_narrow_formats_have_the_cpu_targets_logits(weights: WeightFormat, tmp_path: Path) -> None:
    recipe = Recipe(
        name="narrow",
        targets=("cpu", "onnx"),
        onnx=BOTH,
        weights=WeightFormats(default=weights),
        budget=BudgetSection(max_kl=1.0),  # a random model's
    )
    export(tiny_family("llama"), tmp_path / "b", recipe=with_cache(recipe, "f32"))  # as the onnx target's always is
    assert check_panels_are_stored_once(tmp_path / "b") >= 9
    prompt = np.random.default_rng(5).integers(3, 256, 40).tolist()
    logits = {}
    for target in ("cpu", "onnx"):
        with LLM(tmp_path / "b", target=target, threads=1, context=64) as llm:
            logits[target] = llm.logits(prompt)
    with opened(tmp_path / "b", "standard") as llm:  # which rounds no activations
        floats = llm.logits(prompt)
    # Attention and norms in 32-bit floats are not bit for bit the same, after which an activation may be rounded the
    # other way: from that token on logits are some hundredths off. Without rounding they are from the first token on.
    close = np.abs(logits["onnx"] - logits["cpu"]).max(-1) < TOLERANCE
    assert close.mean() > 0.25
    assert not (np.abs(floats - logits["cpu"]).max(-1) < TOLERANCE).any()


def test_a_damaged_file(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "b")
    file = tmp_path / "b" / KERNELS_FILE
    data = file.read_bytes()
    file.write_bytes(b"\xff" * 64 + data[64:])
    with pytest.raises(BundleError, match=r"model\.kernels\.onnx: onnxruntime .* can't load it: .*\n.*optimize verify"):
        opened(tmp_path / "b", None)
    with opened(tmp_path / "b", "contrib") as llm:  # whose file is as it was
        assert variant_of(llm) == "contrib"


def test_a_weight_of_another_size(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "b")
    file = tmp_path / "b" / KERNELS_FILE
    model, size = onnx.load(file, load_external_data=False), file.stat().st_size
    head = [node for node in model.graph.node if node.op_type == "Linear"][-1]
    (rows,) = (attribute for attribute in head.attribute if attribute.name == "n")
    rows.i -= 32
    file.write_bytes(model.SerializeToString(deterministic=True))
    assert file.stat().st_size in (size, size - 1)
    file.write_bytes(file.read_bytes().ljust(size, b"\0"))
    with pytest.raises(BundleError, match=r"model\.kernels\.onnx: .*weight has 65536 bytes, and not 57344\n"):
        opened(tmp_path / "b", None)
