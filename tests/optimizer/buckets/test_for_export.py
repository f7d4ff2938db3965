"""An export with buckets: what is in the bundle, and what the report says."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel
from typer.testing import CliRunner

from enginewright.optimizer.buckets.for_export import buckets_of
from enginewright.optimizer.check_bundle import check_bundle
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export import export
from enginewright.optimizer.export.report import ExportReport
from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.optimizer.report.bundle_report import open_report
from enginewright.runtime.bundle.buckets import BucketPlan
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError, RecipeError, RequestError
from tests.sealed import sealed

LENGTHS = {10: 50, 33: 20, 90: 9, 200: 1}
PLAN = BucketPlan.from_sizes((16, 40, 96, 200), (3, 6), 6)


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., PreTrainedModel]
) -> tuple[Path, ExportReport]:
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "h.json").write_text(json.dumps(LENGTHS))
    (folder / "mine.toml").write_text('name = "mine"\n[buckets]\nhistogram = "h.json"\nmost = 6\nmax_batch = 6\n')
    report = export(tiny_model("Llama"), folder / "a.bundle", recipe=folder / "mine.toml")
    return folder / "a.bundle", report


def test_the_bundle_has_the_sizes_and_one_program(exported: tuple[Path, ExportReport]) -> None:
    path, report = exported
    bundle = Bundle.open(path)
    assert bundle.buckets == {"cpu": PLAN}
    assert report.bucket_sizes is not None
    assert [k.chosen.sizes for k in report.bucket_sizes.kinds] == [(16, 40, 96, 200), (3, 6)]
    section = bundle.manifest.recipe["buckets"]
    assert isinstance(section, dict) and section["histogram"] is None  # nothing beside the manifest is needed to say it
    assert section["tokens"] == [16, 40, 96, 200] and section["batch"] == [3, 6]
    bundle.verify_hashes()
    in_target = {name for name in bundle.files if name.startswith("targets/")}
    assert in_target == {"targets/cpu/programs/decode.json", "targets/cpu/buckets/plan.json"}
    saved = json.loads((path / "report" / "report.json").read_text())
    assert saved["bucket_sizes"] == json.loads(json.dumps(report.to_json()["bucket_sizes"]))


def test_the_report_and_its_page_say_so(exported: tuple[Path, ExportReport], tmp_path: Path) -> None:
    opened = open_report(exported[0])
    first, second = opened.bucket_lines()
    assert first.startswith("cpu, tokens: 16, 40, 96, 200; padding ") and "with one size 8" in first
    assert second.startswith("cpu, batch: 3, 6; padding ")
    memory = opened.memory_lines()
    assert [line.partition(":")[0] for line in memory[2:]] == [f"bucket {b.name}" for b in PLAN.buckets]
    page = opened.page()
    assert "Sizes of target cpu" in page and "tokens-200" in page and "of what is computed" in page
    shutil.copytree(exported[0], tmp_path / "copy", ignore=shutil.ignore_patterns("report"))
    without = open_report(tmp_path / "copy")  # what the bundle itself says
    assert without.bucket_lines() == ["cpu, tokens: 16, 40, 96, 200", "cpu, batch: 3, 6"]
    assert "tokens-200" in without.page() and "of the lengths that" not in without.page()


def test_inspect_shows_the_sizes(exported: tuple[Path, ExportReport]) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(exported[0])]).stdout
    assert "buckets     cpu, tokens: 16, 40, 96, 200\n            cpu, batch: 3, 6\n" in shown
    data = json.loads(CliRunner().invoke(app, ["inspect", str(exported[0]), "--json"]).stdout)
    assert data["buckets"]["cpu"][0] == {"kind": "tokens", "tokens": 16, "requests": 7, "rows": 6}


def test_a_file_that_is_no_good_is_known_before_the_model(tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text("{}")
    (tmp_path / "mine.toml").write_text('name = "mine"\n[buckets]\nhistogram = "h.json"\nmost = 5\n')
    with pytest.raises(RequestError, match="the histogram is empty"):
        export(tmp_path / "no model", tmp_path / "a.bundle", recipe=tmp_path / "mine.toml")
    assert not (tmp_path / "a.bundle").exists()


def test_a_plan_that_is_missing(exported: tuple[Path, ExportReport], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(exported[0], copy)
    (copy / "targets/cpu/buckets/plan.json").unlink()
    with pytest.raises(BundleError, match=r"plan\.json"):
        Bundle.open(copy)
    listed = copy / "targets/cpu/manifest.json"
    manifest = json.loads(listed.read_text())
    del manifest["files"]["buckets/plan.json"]
    listed.write_text(sealed(manifest))
    assert Bundle.open(copy).buckets == {}


def test_what_lies_beside_a_plan_is_ignored(exported: tuple[Path, ExportReport], tmp_path: Path) -> None:
    """Older bundles had a program for each bucket next to the plan."""
    copy = tmp_path / "copy"
    shutil.copytree(exported[0], copy)
    (copy / "targets/cpu/buckets/batch-3.json").write_text("{}")
    listed = copy / "targets/cpu/manifest.json"
    manifest = json.loads(listed.read_text())
    manifest["files"]["buckets/batch-3.json"] = {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    listed.write_text(sealed(manifest))
    assert Bundle.open(copy).buckets == Bundle.open(exported[0]).buckets
    assert check_bundle(copy).files == len(Bundle.open(exported[0]).files) + 1


def test_two_exports_are_byte_equal(
    exported: tuple[Path, ExportReport], tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    recipe = load_recipe("f32").model_copy(
        update={
            "name": "mine",
            "description": "",
            "buckets": BucketsSection(tokens=(200, 40, 16, 96), batch=(3, 6), max_batch=6),
        }
    )
    export(tiny_model("Llama"), tmp_path / "b.bundle", recipe=recipe)
    first, second = Bundle.open(exported[0]), Bundle.open(tmp_path / "b.bundle")
    assert first.files == second.files and first.manifest.recipe["buckets"] == second.manifest.recipe["buckets"]


def test_sizes_the_context_cant_hold(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a bucket of 513 tokens is beyond the context of 512"):
        buckets_of(BucketsSection(tokens=(8, 513)), 512)
    (tmp_path / "h.json").write_text(json.dumps(LENGTHS))
    section = BucketsSection(histogram=str(tmp_path / "h.json"), most=4)
    assert buckets_of(section, 200).section.tokens[-1] == 200
    with pytest.raises(RequestError, match="1 of 80 lengths are beyond the context of 199"):
        buckets_of(section, 199)
