"""Two exports are equal; what differs is named: files, fields, weights, bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from enginewright.optimizer import diff_bundles as module
from enginewright.optimizer.diff_bundles import FileDifference, diff_bundles
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.progress import ProgressEvent

BLOB = "weights/weights-00000.bin"


@pytest.fixture
def other(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "b.bundle"))


def test_copies_are_equal_whatever_their_reports_say(tiny_bundle: Path, other: Path) -> None:
    (other / "report/report.json").write_text("{}")
    (other / "report/more.txt").write_text("x")
    events: list[ProgressEvent] = []
    diff = diff_bundles(tiny_bundle, other, progress=events.append)
    assert diff.equal and diff.differences == ()
    files = [p for p in tiny_bundle.rglob("*") if p.is_file() and p.parent.name != "report"]
    assert (diff.files, diff.bytes) == (len(files), sum(p.stat().st_size for p in files))
    assert (events[-1].stage, events[-1].done, events[-1].total) == ("compare", diff.bytes, diff.bytes)
    assert json.loads(json.dumps(diff.to_json()))["equal"] is True


def test_a_weight_is_named_with_how_much_of_it_differs(tiny_bundle: Path, other: Path) -> None:
    name = next(n for n in Bundle.open(other).index.tensors if ".1.mlp.down_proj" in n)
    entry = Bundle.open(other).index.tensors[name]
    data = bytearray((other / BLOB).read_bytes())
    for at in (0, 5, entry.bytes - 1):
        data[entry.offset + at] ^= 1
    (other / BLOB).write_bytes(data)
    (difference,) = diff_bundles(tiny_bundle, other).differences
    assert difference == FileDifference(BLOB, len(data), len(data), (f"{name}: 3 of {entry.bytes:,} bytes",))


def test_a_field_is_named_with_both_values(tiny_bundle: Path, other: Path) -> None:
    path = other / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["toolchain"]["torch"] = "1.0"
    manifest["toolchain"]["more"] = "1"
    manifest["model"]["eos_token_ids"] = [*manifest["model"]["eos_token_ids"], 7]
    manifest["recipe"]["name"] = "x" * 100
    path.write_text(json.dumps(manifest))
    (difference,) = diff_bundles(tiny_bundle, other).differences
    was = json.loads((tiny_bundle / "manifest.json").read_text())["toolchain"]["torch"]
    assert difference.path == "manifest.json"
    ids, recipe, more, torch = difference.details
    assert ids.startswith("model.eos_token_ids: A [") and ids.endswith(", 7]")
    assert recipe.startswith("recipe.name: A 'f32', B 'xxx") and recipe.endswith("x...") and len(recipe) < 100
    assert (more, torch) == ("toolchain.more: only in B", f"toolchain.torch: A {was!r}, B '1.0'")


def test_files_that_one_of_them_lacks_and_bytes_of_the_others(tiny_bundle: Path, other: Path) -> None:
    (other / "tokenizer/chat_template.jinja").write_text("{{ other }}")
    (other / "notes.txt").write_text("x")
    path = other / "manifest.json"  # so that it opens
    manifest = json.loads(path.read_text())
    manifest["files"]["tokenizer/chat_template.jinja"]["bytes"] = len("{{ other }}")
    path.write_text(json.dumps(manifest))
    by_path = {d.path: d for d in diff_bundles(tiny_bundle, other).differences}
    assert set(by_path) == {"tokenizer/chat_template.jinja", "notes.txt", "manifest.json"}
    assert by_path["notes.txt"] == FileDifference("notes.txt", None, 1)
    assert by_path["tokenizer/chat_template.jinja"].details == ("from byte 3 on",)
    assert {d.path: d.bytes_b for d in diff_bundles(other, tiny_bundle).differences}["notes.txt"] is None


def test_no_more_than_a_few_fields_are_named(tiny_bundle: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = other / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["toolchain"] |= {f"tool{i}": "1" for i in range(5)}
    path.write_text(json.dumps(manifest))
    monkeypatch.setattr(module, "MOST_DETAILS", 3)
    (difference,) = diff_bundles(tiny_bundle, other).differences
    assert difference.details == (*(f"toolchain.tool{i}: only in B" for i in range(3)), "and 2 more")


def test_a_file_longer_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4)
    (tmp_path / "a").write_bytes(b"0123456789")
    for data, at in ((b"0123456789", None), (b"01234x6789", 5), (b"0123", 4), (b"0123456789a", 10), (b"", 0)):
        (tmp_path / "b").write_bytes(data)
        assert module._first_difference(tmp_path / "a", tmp_path / "b") == at


def test_what_is_no_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json is missing"):
        diff_bundles(tiny_bundle, tmp_path)
