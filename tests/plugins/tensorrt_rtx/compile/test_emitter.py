"""Exports of tiny models to engines: what is in the bundle, what is reported, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from enginewright.optimizer.check_bundle import check_bundle
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.plugins.engines.plan import HEADER_BYTES, PlanHeader
from enginewright.plugins.engines.section import TensorRtSection
from enginewright.plugins.steps.linear_io import LinearIo
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError, RecipeError, TargetError
from enginewright.runtime.shared.progress import ProgressEvent
from tests.conftest import make_tiny_model

pytest.importorskip("tensorrt_rtx")

PLAN = "targets/tensorrt-rtx/model.plan"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ProgressEvent]]:
    """A tiny Mistral for three targets: its windows need masks of their own."""
    events: list[ProgressEvent] = []
    path = tmp_path_factory.mktemp("rtx") / "m.bundle"
    export(
        make_tiny_model("Mistral"),
        path,
        targets=("cpu", "onnx", "tensorrt-rtx"),
        gpus=["sm89", "8.0,12.0"],
        recipe=Recipe.model_validate({"name": "r", "engines": {"context": 48, "requests": 8}}),
        progress=events.append,
    )
    return path, events


def test_one_export_writes_an_engine_beside_the_other_targets(exported: tuple[Path, list[ProgressEvent]]) -> None:
    path, events = exported
    bundle = Bundle.open(path)
    target = bundle.target("tensorrt-rtx")
    io, section = target.section(LinearIo), target.section(TensorRtSection)
    assert io is not None and section is not None
    assert (io.file, io.cache_groups[0].dtype, io.cache_groups[0].mask) == ("", "f16", "mask_w8")
    assert (section.flavour, section.form, section.dtype) == ("rtx", "whole", "f16")
    assert section.compute_capabilities == ("8.0", "8.9", "12.0")
    (engine,) = section.engines
    assert [(p.phase, p.B[2], p.S[2], p.C) for p in engine.profiles] == [("decode", 8, 1, 49), ("prefill", 4, 48, 49)]
    header = PlanHeader.parse((path / PLAN).read_bytes()[:HEADER_BYTES], PLAN)
    assert header.compute_capabilities == section.compute_capabilities
    assert (header.version, header.bytes) == (section.version, (path / PLAN).stat().st_size)
    # The graph and its weights were removed.
    assert {p.name for p in path.iterdir()} == {
        "manifest.json",
        "model.onnx",
        "weights",
        "targets",
        "report",
        "tokenizer",
    }
    assert {event.stage for event in events} >= {"emit", "engine", "verify"}
    report = json.loads((path / "report/report.json").read_text())
    (built,) = report["engines"]
    assert built["file"] == PLAN and built["file_bytes"] == header.bytes and built["attentions"] == 2
    assert built["seconds"] > 0 and built["peak_rss_bytes"] > 100 << 20
    assert [v["target"] for v in report["verification"]] == ["cpu", "onnx"]  # no GPU runs the third here


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"x", r"model.plan: magic: "),
        (24, b"\x09", r"model.plan: version: the plan's header has 9\.7"),
        (32, b"\x02", r"model.plan: compute capabilities: the plan's header has 8\.0, "),
        (-1, None, r"model.plan: [\d,]+ bytes, files"),
        (5000, b"\xaa\x55\xaa", r"model.plan: SHA-256"),
    ],
    ids=["magic", "version", "capabilities", "cut off", "inside"],
)
def test_verify_names_what_is_wrong_with_a_plan(
    exported: tuple[Path, Any], tmp_path: Path, place: int, value: bytes | None, message: str
) -> None:
    bundle = shutil.copytree(exported[0], tmp_path / "moved")
    check_bundle(bundle, targets=["cpu"])
    data = bytearray((bundle / PLAN).read_bytes())
    if value is None:
        del data[place:]
    else:
        data[place : place + len(value)] = value
    (bundle / PLAN).write_bytes(data)
    with pytest.raises(BundleError, match=message):
        check_bundle(bundle, targets=["cpu"])


@pytest.mark.parametrize(
    ("gpus", "engines", "error", "message"),
    [
        (["9.0"], {}, TargetError, r"TensorRT-RTX builds no engine for compute capability 9\.0"),
        (["8.8"], {}, TargetError, r"'8\.8' is not a GPU or a compute capability"),
        (["7.5", "8.0"], {"dtype": "bf16"}, TargetError, r"7\.5 has no bf16, .*\n.*--gpu 8\.0"),
        (["8.9"], {"context": 1000}, RecipeError, r"engines.context: slots of 1,000 tokens are longer"),
    ],
)
def test_what_is_refused(
    gpus: list[str], engines: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    recipe = Recipe.model_validate({"name": "r", "engines": engines})
    # GPUs are looked at before the source is; the model's context isn't known before.
    source = make_tiny_model("Llama") if error is RecipeError else tmp_path / "damaged.gguf"
    if error is not RecipeError:
        (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    with pytest.raises(error, match=message):
        export(source, tmp_path / "b", targets=("tensorrt-rtx",), gpus=gpus, recipe=recipe)
    assert {p.name for p in tmp_path.iterdir()} <= {"damaged.gguf"}


def test_the_same_export_gives_the_same_engine(tmp_path: Path) -> None:
    for name in ("a", "of-another-length"):
        export(make_tiny_model("Llama"), tmp_path / name, targets=("tensorrt-rtx",), gpus=["8.9"])
    assert (tmp_path / "a" / PLAN).read_bytes() == (tmp_path / "of-another-length" / PLAN).read_bytes()
    assert (tmp_path / "a/manifest.json").read_bytes() == (tmp_path / "of-another-length/manifest.json").read_bytes()
