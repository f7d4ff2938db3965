"""An export with buckets: what is in the bundle, what the report says, and programs that compute the same bits."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel
from typer.testing import CliRunner

from enginewright.optimizer.buckets.for_export import buckets_of, check_programs
from enginewright.optimizer.check_bundle import check_bundle
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export import export
from enginewright.optimizer.export.report import ExportReport
from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.optimizer.report.bundle_report import bucket_lines, open_report
from enginewright.plugins.cpu.executable import CpuProgram
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.errors import BundleError, RecipeError, RequestError, VerificationError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from tests.sealed import sealed

LENGTHS = {10: 50, 33: 20, 90: 9, 200: 1}


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., PreTrainedModel]
) -> tuple[Path, ExportReport]:
    folder = tmp_path_factory.mktemp("buckets")
    (folder / "h.json").write_text(json.dumps(LENGTHS))
    (folder / "mine.toml").write_text('name = "mine"\n[buckets]\nhistogram = "h.json"\nmost = 6\nmax_batch = 6\n')
    report = export(tiny_model("Llama"), folder / "a.bundle", recipe=folder / "mine.toml")
    return folder / "a.bundle", report


def test_the_bundle_has_the_sizes_and_their_programs(exported: tuple[Path, ExportReport]) -> None:
    path, report = exported
    bundle = Bundle.open(path)
    plan = bundle.buckets["cpu"]
    (found,) = report.buckets
    assert found.sizes is not None and [k.chosen.sizes for k in found.sizes.kinds] == [(16, 40, 96, 200), (3, 6)]
    assert [b.name for b in plan.buckets] == ["tokens-16", "tokens-40", "tokens-96", "tokens-200", "batch-3", "batch-6"]
    own = bundle.manifest.recipe["buckets"]
    assert isinstance(own, dict) and own["histogram"] is None  # nothing beside the manifest is needed to say it
    assert own["tokens"] == [16, 40, 96, 200] and own["batch"] == [3, 6]
    bundle.verify_hashes()
    for bucket, program in zip(plan.buckets, found.programs, strict=True):
        assert (program.tokens, program.requests, program.rows) == (bucket.tokens, bucket.requests, bucket.rows)
        assert program.file_bytes == bundle.files[f"targets/cpu/{bucket.file}"].bytes
        assert program.checked == 1 and program.seconds >= 0
        assert program.arena_bytes == bundle.bucket_program("cpu", bucket).arena_bytes.constant
        assert program.arena_bytes <= program.arena_bytes_any
    assert report.stages["buckets"] >= 0
    saved = json.loads((path / "report" / "report.json").read_text())
    assert saved["buckets"] == json.loads(json.dumps(report.to_json()["buckets"]))


def test_the_report_and_its_page_say_so(exported: tuple[Path, ExportReport]) -> None:
    opened = open_report(exported[0])
    assert opened.saved.document is not None
    first, second, last = bucket_lines(opened.saved.document)
    assert first.startswith("cpu, tokens: 16, 40, 96, 200; padding ") and "with one size 8" in first
    assert second.startswith("cpu, batch: 3, 6; padding ")
    assert last.startswith("cpu: 6 programs in ") and last.endswith("; 6 run, with the same bits")
    page = opened.page()
    assert "Programs of target cpu" in page and "tokens-200" in page and "of what is computed" in page


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


def test_verify_looks_at_the_programs(exported: tuple[Path, ExportReport], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(exported[0], copy)
    assert check_bundle(copy).files == len(Bundle.open(copy).files)
    path = copy / "targets/cpu/buckets/batch-3.json"
    text = path.read_text().replace('"op":"linear"', '"op":"lineal"')  # as many bytes
    path.write_text(text)
    listed = copy / "targets/cpu/manifest.json"
    manifest = json.loads(listed.read_text())
    manifest["files"]["buckets/batch-3.json"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    listed.write_text(sealed(manifest))
    with pytest.raises(BundleError, match=r"bucket batch-3 of cpu: .*lineal"):
        check_bundle(copy)


def test_a_program_takes_its_own_sizes_and_none_above(exported: tuple[Path, ExportReport]) -> None:
    bundle = Bundle.open(exported[0])
    weights = {use.name: bundle.weight(use.name) for use in bundle.program("cpu").weights}
    for bucket in bundle.buckets["cpu"].buckets[1:5:3]:
        program = CpuProgram(bundle.bucket_program("cpu", bucket), weights, blocks={"full": 40})
        positions = np.arange(bucket.tokens + 1, dtype=np.int32)

        def step(tokens: int, positions: np.ndarray = positions) -> StepInput:
            return StepInput(
                ids=np.zeros(tokens, np.int32),
                positions=positions[:tokens],
                q_start=np.asarray([0, tokens], np.int32),
                kv_len=np.asarray([tokens], np.int32),
                block_tables={"full": np.arange(-(-tokens // 32), dtype=np.int32)[None]},
                slots={"full": positions[:tokens]},
                rows=np.zeros(1, np.int32),
                return_logits=True,
            )

        assert program.run(step(bucket.tokens)).logits is not None
        with pytest.raises(RequestError):
            program.run(step(bucket.tokens + 1))


def test_a_program_that_computes_something_else_ends_the_export(
    exported: tuple[Path, ExportReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, report = exported
    bundle = Bundle.open(path)
    (found,) = report.buckets
    fresh = [replace(p, checked=0) for p in found.programs]
    assert check_programs(bundle, "cpu", found.sizes, fresh) == found
    assert check_programs(bundle, "other", None, fresh).programs == fresh
    assert check_programs(bundle, "cpu", None, fresh, seconds=-1).programs == fresh
    some = check_programs(
        bundle, "cpu", None, fresh, memory_budget=max(p.arena_bytes + p.arena_bytes_any for p in fresh) - 1
    )
    assert [p.checked for p in some.programs] == [1, 1, 1, 0, 1, 1]

    def wrong(self: Bundle, target: str, bucket: object) -> LoweredProgram:
        program = self.program(target)
        scale = next(i for i, s in enumerate(program.steps) if s.op == "paged_attention")
        step = program.steps[scale].model_copy(update={"attrs": program.steps[scale].attrs | {"scale": 0.9}})
        return program.model_copy(update={"steps": (*program.steps[:scale], step, *program.steps[scale + 1 :])})

    monkeypatch.setattr(Bundle, "bucket_program", wrong)
    with pytest.raises(VerificationError, match="bucket batch-3 computes other logits"):
        check_programs(bundle, "cpu", found.sizes, found.programs)


@pytest.mark.parametrize("file", ["plan.json", "tokens-40.json"])
def test_a_file_that_is_missing(file: str, exported: tuple[Path, ExportReport], tmp_path: Path) -> None:
    listed = json.loads((exported[0] / "targets/cpu/manifest.json").read_text())
    copy = tmp_path / "copy"
    shutil.copytree(exported[0], copy)
    (copy / "targets/cpu/buckets" / file).unlink()
    with pytest.raises(BundleError, match=file):
        Bundle.open(copy)
    del listed["files"][f"buckets/{file}"]
    (copy / "targets/cpu/manifest.json").write_text(json.dumps(listed))
    if file == "plan.json":
        assert Bundle.open(copy).buckets == {}  # nothing says that the others mean anything
    else:
        with pytest.raises(BundleError, match=r"tokens-40.json of a bucket is not listed"):
            Bundle.open(copy)


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
