from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "a.bundle"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_summary(bundle: Path) -> None:
    before = contents(bundle)
    result = CliRunner().invoke(app, ["report", str(bundle)])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("The bundle computes what the source does: logits differ by ")
    assert "fuse_qkv" in result.stdout
    assert "normalize_complex" not in result.stdout  # it changed nothing
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line and not line.startswith(" ")}
    assert "f32" in lines["size"]
    assert "target cpu, compared with the source" in lines["quality"]
    assert "are alive at once" in lines["memory"]
    assert "tokens/s" in lines["speed"]
    assert "capture" in lines["export"]
    assert lines["page"].endswith("report/report.html")
    assert contents(bundle) == before


def test_json_is_the_report(bundle: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(bundle), "--json"])
    assert json.loads(result.stdout) == json.loads((bundle / "report/report.json").read_text())


def test_measured_again_and_written(bundle: Path, tmp_path: Path) -> None:
    before = contents(bundle)
    page = tmp_path / "page.html"
    arguments = ["report", str(bundle), "--measure", "--threads", "1", "-o", str(page), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (roofline,) = json.loads(result.stdout)["rooflines"]
    assert roofline["measured"] == "report"
    assert roofline["machine"]["threads"] == 1
    assert "taken during the export" not in page.read_text()
    assert contents(bundle) == before


def test_a_bundle_without_a_report(bundle: Path) -> None:
    shutil.rmtree(bundle / "report")
    result = CliRunner().invoke(app, ["report", str(bundle)])
    assert result.exit_code == 0, result.output
    assert "fuse_qkv" in result.stdout  # of the manifest
    assert "this bundle has no report" in result.stdout
    assert "multiply-adds" in result.stdout  # predicted
    document = json.loads(CliRunner().invoke(app, ["report", str(bundle), "--json"]).stdout)
    assert set(document) == {"storage", "rooflines", "arena"}


def test_an_old_report(bundle: Path) -> None:
    """A report from before there were comparisons, measurements and diffs."""
    report = json.loads((bundle / "report/report.json").read_text())
    old = {key: report[key] for key in ("path", "recipe", "targets", "seconds", "peak_rss_bytes", "stages")}
    old["passes"] = [{key: p[key] for key in ("name", "matched", "rejected", "seconds")} for p in report["passes"]]
    shutil.rmtree(bundle / "report")
    (bundle / "report").mkdir()
    (bundle / "report/report.json").write_text(json.dumps(old))
    result = CliRunner().invoke(app, ["report", str(bundle)])
    assert result.exit_code == 0, result.output
    assert "fuse_qkv" in result.stdout
    assert "quality" not in result.stdout


def test_damage_is_an_error(bundle: Path) -> None:
    (bundle / "report/report.json").write_text('{"stages": 3}')
    result = CliRunner().invoke(app, ["report", str(bundle), "--json"])
    assert result.exit_code == 7
    error = json.loads(result.stdout)["error"]
    assert "report/report.json: stages" in error["message"]
    assert "Remove the file" in error["hint"]


def test_where_a_page_cannot_be_written(bundle: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(bundle), "-o", str(tmp_path / "absent" / "page.html")])
    assert result.exit_code == 7
    assert "cannot be written" in result.stderr


def test_threads_are_for_measuring(bundle: Path) -> None:
    assert CliRunner().invoke(app, ["report", str(bundle), "--threads", "2"]).exit_code == 2
