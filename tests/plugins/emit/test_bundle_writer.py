"""A bundle appears whole or not at all, and the same input gives the same bytes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginewright.plugins.emit import bundle_writer as writer_module
from enginewright.plugins.emit.bundle_writer import BundleWriter
from enginewright.runtime.bundle import hashed_file
from enginewright.runtime.bundle.manifest import Manifest, TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import WeightsIndex
from enginewright.runtime.shared.errors import BundleError, CapacityError

Make = Callable[..., Path]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_same_input_gives_the_same_bytes_anywhere(make_bundle: Make) -> None:
    one, other = make_bundle("one.bundle"), make_bundle("deep/in/other.bundle")
    assert contents(one) == contents(other)
    assert set(contents(one)) >= {"manifest.json", "weights/index.json", "weights/weights-00000.bin"}


def test_only_the_bundle_is_left(make_bundle: Make, tmp_path: Path) -> None:
    make_bundle()
    assert [p.name for p in tmp_path.iterdir()] == ["toy.bundle"]


def test_reports_are_written_but_not_listed(make_bundle: Make) -> None:
    path = make_bundle()
    assert (path / "report/report.json").is_file()
    listed = set(Bundle.open(path).files)
    assert listed == set(contents(path)) - {"manifest.json", "targets/cpu/manifest.json", "report/report.json"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupted() -> Iterator[np.ndarray[Any, Any]]:
        yield np.zeros(10, np.float32)
        raise error

    with pytest.raises(error), BundleWriter(tmp_path / "x.bundle") as writer:
        writer.write_text("a/b.txt", "x")
        writer.weights().add("w", interrupted(), shape=(20,))
    assert list(tmp_path.iterdir()) == []


def test_a_complete_bundle_can_be_opened_before_it_has_its_name(make_bundle: Make, tmp_path: Path) -> None:
    expected = contents(make_bundle("a.bundle"))
    with BundleWriter(tmp_path / "b.bundle") as writer:
        writer.write_text("a/b.txt", "x")
        writer.complete(Manifest.from_json(expected["manifest.json"].decode()), {})
        assert Bundle.open(writer.folder).read_bytes("a/b.txt") == b"x"
        assert not (tmp_path / "b.bundle").exists()
        writer.write_text("report/report.json", "{}")
        writer.publish()
    assert set(Bundle.open(tmp_path / "b.bundle").files) == {"a/b.txt"}
    assert (tmp_path / "b.bundle/report/report.json").read_text() == "{}"


def test_a_complete_bundle_that_is_not_published_leaves_nothing(make_bundle: Make, tmp_path: Path) -> None:
    manifest = Manifest.from_json((make_bundle("a.bundle") / "manifest.json").read_text())
    with pytest.raises(RuntimeError), BundleWriter(tmp_path / "b.bundle") as writer:
        writer.complete(manifest, {})
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["a.bundle"]


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "x.bundle") as writer:
        writer.write_text("a.txt", "x")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_keeps_the_old_bundle(make_bundle: Make, manifest: Manifest, monkeypatch: Any) -> None:
    path = make_bundle()
    before = contents(path)
    rename, calls = os.rename, []

    def failing(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(KeyboardInterrupt), BundleWriter(path, overwrite=True) as writer:
        writer.commit(manifest, {})
    assert contents(path) == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("when", [1, 2])
def test_an_interruption_after_a_rename(make_bundle: Make, manifest: Manifest, monkeypatch: Any, when: int) -> None:
    path = make_bundle()
    before = contents(path)
    rename, calls = os.rename, []

    def interrupted(source: Any, target: Any) -> None:
        rename(source, target)
        calls.append(target)
        if len(calls) == when:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), BundleWriter(path, overwrite=True) as writer:
        writer.commit(manifest, {})
    assert (contents(path) == before) == (when == 1)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_interruption_while_it_begins(tmp_path: Path, monkeypatch: Any) -> None:
    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer_module, "_lock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        BundleWriter(tmp_path / "x.bundle").__enter__()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_bundle_is_replaced_only_if_asked(make_bundle: Make, manifest: Manifest) -> None:
    path = make_bundle()
    before = contents(path)
    with pytest.raises(BundleError, match=r"toy\.bundle exists\n.*overwrite=True"):
        make_bundle()
    assert contents(path) == before
    with BundleWriter(path, overwrite=True) as writer:
        writer.commit(manifest, {})
    assert set(contents(path)) == {"manifest.json"}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_bundle_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/precious.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("folder", "file"):
        with pytest.raises(BundleError, match=f"{name} exists and isn.t a bundle"):
            BundleWriter(tmp_path / name, overwrite=overwrite).__enter__()
    assert len(contents(tmp_path)) == 2


def test_an_empty_folder_is_filled(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "x.bundle").mkdir()
    with BundleWriter(tmp_path / "x.bundle") as writer:
        writer.commit(manifest, {})
    assert (tmp_path / "x.bundle/manifest.json").is_file()


KILLED = """
import os, sys
from enginewright.plugins.emit.bundle_writer import BundleWriter
with BundleWriter(sys.argv[1]) as writer:
    writer.write_text("a.txt", "x")
    os._exit(9)
"""


def test_what_a_killed_export_left_is_removed_by_the_next(make_bundle: Make, tmp_path: Path) -> None:
    # Read from the tree: an installed package needs no path, and one of the tree is found by it.
    root = Path(writer_module.__file__).parents[4]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    for name in ("toy.bundle", "other.bundle"):
        killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / name)], env=environment, check=False)
        assert killed.returncode == 9
    assert len(list(tmp_path.glob(".*.partial-*"))) == 2
    make_bundle()
    (left,) = tmp_path.glob(".*.partial-*")
    assert left.name.startswith(".other.bundle.partial-")


def test_a_running_export_is_left_alone(make_bundle: Make, tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "toy.bundle") as writer:
        writer.write_text("a.txt", "x")
        make_bundle()
        writer.write_text("b.txt", "x")
        assert len(list(tmp_path.glob(".*.partial-*"))) == 1
    assert Bundle.open(tmp_path / "toy.bundle").model.name == "toy"


def test_a_bundle_that_a_killed_overwrite_moved_away_comes_back(make_bundle: Make, tmp_path: Path) -> None:
    path = make_bundle()
    before = contents(path)
    path.rename(tmp_path / ".toy.bundle.replaced-0123456789ab")
    with pytest.raises(BundleError, match=r"toy\.bundle exists"):
        make_bundle()
    assert contents(path) == before
    (tmp_path / ".toy.bundle.replaced-0123456789ab").mkdir()
    make_bundle(overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["toy.bundle"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(tmp_path: Path, monkeypatch: Any, code: int) -> None:
    class FullFile:
        def __init__(self, *_: Any) -> None:
            pass

        def write(self, data: Any) -> int:
            if len(data):
                raise OSError(code, os.strerror(code))
            return 0

        def close(self) -> None:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(hashed_file, "open", FullFile, raising=False)
    with (
        pytest.raises(CapacityError, match=r"weights-00000\.bin: no space for 8,000,000 more bytes"),
        BundleWriter(tmp_path / "x.bundle") as writer,
    ):
        writer.weights().add("w", np.zeros(2_000_000, np.float32))  # more than is held back
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_only_when_synced(tmp_path: Path, monkeypatch: Any) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(CapacityError, match=r"a\.txt: no space for 3 more bytes"),
        BundleWriter(tmp_path / "x.bundle") as writer,
    ):
        writer.write_text("a.txt", "xyz")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match=r"x\.bundle. cannot be written: Not a directory"):
        BundleWriter(tmp_path / "file" / "x.bundle").__enter__()

    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(BundleError, match=r"y\.bundle: cannot be written: Permission denied"):
        BundleWriter(tmp_path / "y.bundle").__enter__()
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_every_tensor_is_aligned_and_blobs_end(tmp_path: Path, manifest: Manifest, monkeypatch: Any) -> None:
    monkeypatch.setattr(writer_module, "BLOB_BYTES", 300)
    arrays = {f"w{n}": np.random.default_rng(n).standard_normal(n).astype(np.float32) for n in (1, 17, 70, 3, 100)}
    with BundleWriter(tmp_path / "x.bundle") as writer:
        for name, array in arrays.items():
            assert writer.weights().add(name, array).offset % 64 == 0
        writer.commit(manifest, {})
    bundle = Bundle.open(tmp_path / "x.bundle")
    assert len(bundle.index.blobs) == 2
    for name, array in arrays.items():
        np.testing.assert_array_equal(bundle.weight(name), array)
        assert bundle.weight(name).ctypes.data % 64 == 0
    bundle.verify_hashes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": np.zeros(4, np.float64)}, "a chunk is float64, not f32"),
        ({"data": np.zeros(4, np.float32), "shape": (5,)}, "16 bytes given, f32 .* has 20"),
        ({"data": [np.zeros(4, np.float32)]}, "shape is needed"),
        ({"data": np.zeros((2, 2), np.float32), "layout": "panel32"}, "shape is needed"),
        ({"data": np.zeros((2, 2), np.float32), "layout": "panel32", "shape": (2, 2)}, "16 bytes given, .* has 256"),
    ],
)
def test_wrong_tensors(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), BundleWriter(tmp_path / "x.bundle") as writer:
        writer.weights().add("w", **arguments)


def test_names_and_paths_are_used_once(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "x.bundle") as writer:
        writer.weights().add("w", np.zeros(1, np.float32))
        with pytest.raises(ValueError, match="tensor w was added before"):
            writer.weights().add("w", np.zeros(1, np.float32))
        writer.write_text("a.txt", "x")
        for path in ("a.txt", "manifest.json"):
            with pytest.raises(ValueError, match="was written before"):
                writer.write_text(path, "x")
        with pytest.raises(ValueError, match="not a path inside"):
            writer.write_text("../a.txt", "x")


def test_bytes_that_are_there_are_not_stored_again(tmp_path: Path, manifest: Manifest) -> None:
    one, other = np.arange(64, dtype=np.float32), np.arange(1, 65, dtype=np.float32)
    with BundleWriter(tmp_path / "x.bundle") as writer:
        weights = writer.weights()
        weights.add("odd", np.ones(3, np.float32))
        first = weights.add("a", one)
        again = weights.add("b", iter([one[:10], one[10:]]), shape=(8, 8))
        last = weights.add("c", other)
        writer.commit(manifest, {})
    assert (again.blob, again.offset, again.shape) == (first.blob, first.offset, (8, 8))
    assert last.offset == first.offset + 256  # nothing of the second is left between them
    bundle = Bundle.open(tmp_path / "x.bundle")
    bundle.verify_hashes()
    assert bundle.index.blobs[0].bytes == last.offset + 256
    for name, array in (("a", one), ("b", one.reshape(8, 8)), ("c", other)):
        np.testing.assert_array_equal(bundle.weight(name), array)
    assert list(bundle.index.stored_once()) == ["a", "c", "odd"]


def test_bytes_of_an_earlier_blob_are_found(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "BLOB_BYTES", 100)
    array = np.arange(64, dtype=np.float32)
    with BundleWriter(tmp_path / "x.bundle") as writer:
        for name in ("a", "b", "c"):
            writer.weights().add(name, array + (name == "b"))
        writer.commit(manifest, {})
    bundle = Bundle.open(tmp_path / "x.bundle")
    bundle.verify_hashes()
    assert [bundle.tensor(name).blob for name in "abc"] == [0, 1, 0]
    np.testing.assert_array_equal(bundle.weight("c"), array)


def test_a_file_is_moved_into_the_bundle(tmp_path: Path, manifest: Manifest) -> None:
    source = tmp_path / "engine"
    source.write_bytes(b"abc")
    with BundleWriter(tmp_path / "b") as writer:
        section = writer.adopt("targets/t/engine.plan", source)
        assert not source.exists() and section.bytes == 3
        source.write_bytes(b"d")
        with pytest.raises(ValueError, match="was written before"):
            writer.adopt("targets/t/engine.plan", source)
        with pytest.raises(BundleError, match=r"targets/t/other.plan: cannot be written: No such file"):
            writer.adopt("targets/t/other.plan", tmp_path / "nothing")
        writer.commit(manifest, {"t": TargetManifest()})
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.files["targets/t/engine.plan"] == section
    bundle.verify_hashes()


class _Failed(Exception):
    pass


def test_what_a_target_wrote_is_taken_back(manifest: Manifest, tmp_path: Path) -> None:
    """The bundle is the one of the other targets, byte for byte, also where they read the same tensors."""
    shared, own_array = np.arange(300, dtype=np.float32), np.arange(77, dtype=np.float32)

    def write(name: str, *, failing: bool) -> dict[str, bytes]:
        with BundleWriter(tmp_path / name) as writer:
            if failing:
                with pytest.raises(_Failed), writer.undone_by_error("onnx"):
                    writer.write_text("targets/onnx/model.txt", "half")
                    writer.write_text("code/onnx.txt", "half")
                    writer.weights().add("shared.onnx", shared)
                    writer.weights().add("own.onnx", own_array)
                    raise _Failed
            writer.write_text("targets/cpu/program.txt", "whole")
            writer.weights().add("shared.cpu", shared)
            writer.weights().add("own.onnx", own_array[:5])
            writer.commit(manifest, {"cpu": TargetManifest()})
        return contents(tmp_path / name)

    assert write("failing.bundle", failing=True) == write("other.bundle", failing=False)


def test_a_complete_blob_keeps_its_bytes(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BLOB_BYTES", 100)
    with BundleWriter(tmp_path / "a.bundle") as writer:
        writer.weights().add("first", np.arange(5, dtype=np.float32))
        with pytest.raises(_Failed), writer.undone_by_error("onnx"):
            for i in range(4):
                writer.weights().add(f"lost{i}", np.full(30, i, np.float32))
            raise _Failed
        writer.weights().add("last", np.arange(9, dtype=np.float32))
        writer.commit(manifest, {"cpu": TargetManifest()})
    bundle = Bundle.open(tmp_path / "a.bundle")
    index = WeightsIndex.from_json((tmp_path / "a.bundle/weights/index.json").read_text())
    assert sorted(index.tensors) == ["first", "last"]
    np.testing.assert_array_equal(bundle.weight("first"), np.arange(5))
    np.testing.assert_array_equal(bundle.weight("last"), np.arange(9))
