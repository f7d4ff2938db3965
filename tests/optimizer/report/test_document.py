from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from enginewright.optimizer.report.document import DIFFS_PATH, REPORT_PATH, read_report
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Bundle:
    """A copy that may be damaged."""
    return Bundle.open(shutil.copytree(tiny_bundle, tmp_path / "a.bundle"))


def test_what_an_export_wrote_is_read(bundle: Bundle) -> None:
    saved = read_report(bundle)
    written = json.loads((bundle.path / REPORT_PATH).read_text())
    assert saved.document is not None
    assert [p.name for p in saved.document.passes] == [p["name"] for p in written["passes"]]
    assert saved.document.verification[0].target == "cpu"
    assert saved.document.rooflines[0].shapes[0].steps[0].cost.weights > 0
    assert sum(part.nbytes for part in saved.document.storage) > 0
    assert {d.name for d in saved.diffs} <= {p.name for p in saved.document.passes if p.matched}
    assert any(d.name == "fuse_qkv" for d in saved.diffs)


def test_what_is_missing_is_no_error(bundle: Bundle) -> None:
    (bundle.path / DIFFS_PATH).unlink()
    assert read_report(bundle).diffs == ()
    shutil.rmtree(bundle.path / "report")
    assert read_report(bundle).document is None


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        (REPORT_PATH, '{"passes": [{"name": "x"', "not JSON"),
        (REPORT_PATH, "[]", "the document"),
        (REPORT_PATH, '{"passes": [{"name": "x", "matched": "many"}]}', "passes.0.matched"),
        (REPORT_PATH, '{"rooflines": [{"target": "cpu"}]}', "rooflines.0.measured"),
        (REPORT_PATH, '{"stages": {"capture": "\\ud800"}}', "not JSON"),
        (DIFFS_PATH, '[{"number": 0}]', "0.name"),
    ],
)
def test_damage_is_named(path: str, text: str, named: str, bundle: Bundle) -> None:
    (bundle.path / path).write_text(text)
    with pytest.raises(BundleError, match=path) as error:
        read_report(bundle)
    assert named in error.value.message
    assert "Remove the file" in str(error.value.hint)


def test_a_report_that_is_no_file_is_an_error(bundle: Bundle) -> None:
    (bundle.path / REPORT_PATH).unlink()
    (bundle.path / REPORT_PATH).mkdir()
    with pytest.raises(BundleError, match=REPORT_PATH):
        read_report(bundle)
