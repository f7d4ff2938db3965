"""One export for every target that can be made here: the bundle moves, verifies, and is the same bytes again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from enginewright.optimizer.check_bundle import check_bundle
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.tvm.recipe import TvmOptions
from enginewright.runtime.bundle.reader import Bundle
from tests.acceptance.test_reproducible import contents
from tests.conftest import make_tiny_model

TARGETS = ("cpu", "onnx", "tensorrt-rtx", "tensorrt", "cuda", "stablehlo", "tvm")


@pytest.fixture(autouse=True)
def _tools() -> None:
    for package in ("onnx", "tensorrt_rtx", "triton", "jaxlib", "tvm"):
        pytest.importorskip(package, reason=f"{package} is not installed")


def test_a_bundle_of_all_targets(tmp_path: Path) -> None:
    recipe = Recipe(
        name="f32",
        targets=TARGETS,
        buckets=BucketsSection(tokens=(8,), batch=(1,)),
        engines=EnginesSection(gpus=("8.9",), context=63, requests=1, prompts=1, chunk=8),
        tvm=TvmOptions(levels=("v3",)),
    )
    records = []
    for folder in ("one", "two"):
        export(make_tiny_model("Llama"), tmp_path / folder / "b", recipe=recipe)
        records.append(contents(tmp_path / folder / "b"))
    first, second = records
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    moved = tmp_path / "elsewhere" / "b"
    moved.parent.mkdir()
    shutil.move(tmp_path / "one" / "b", moved)
    checks = {check.target: check for check in check_bundle(moved, trust="code").targets}
    assert set(checks) == set(TARGETS)
    ran = {name for name, check in checks.items() if check.why_not is None}
    assert {"cpu", "onnx", "stablehlo", "tvm"} <= ran
    assert set(Bundle.open(moved).buckets) == {"cpu", "cuda"}  # whose steps are padded to them
    assert all(check.why_not for name, check in checks.items() if name not in ran)
