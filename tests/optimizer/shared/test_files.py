"""A file that a user asks for is there whole or as it was, and is never one of a bundle's."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from enginewright.optimizer.shared.files import write_output
from enginewright.plugins.emit.finished_bundle import hash_files
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError, RequestError
from enginewright.runtime.shared.progress import ProgressEvent


def test_it_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    for text in ("one", "é two"):
        write_output(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    write_output(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "x"


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_output(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=write_output, args=(tmp_path / "pipe", "x"))
    writer.start()
    assert (tmp_path / "pipe").read_text() == "x"
    writer.join()
    assert (tmp_path / "pipe").is_fifo()
    write_output(Path(os.devnull), "x")
    assert Path(os.devnull).is_char_device()


@pytest.mark.parametrize("name", ["no/such/folder", "file/x", "a\0b", os.fsdecode(b"\xff/x"), "n" * 300, "."])
def test_what_can_t_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written"):
        write_output(tmp_path / name, "x", RequestError)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["manifest.json", "notes.txt", "weights/weights-00000.bin", "report/../manifest.json"])
def test_no_file_of_a_bundle_is_written(tiny_bundle: Path, tmp_path: Path, name: str) -> None:
    before = {p: p.stat().st_mtime_ns for p in tiny_bundle.rglob("*")}
    (tmp_path / "link").symlink_to(tiny_bundle)
    for bundle in (tiny_bundle, tmp_path / "link"):
        with pytest.raises(BundleError, match="it would be a file of the bundle"):
            write_output(bundle / name, "x")
    assert {p: p.stat().st_mtime_ns for p in tiny_bundle.rglob("*")} == before


def test_all_bytes_are_told(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    events: list[ProgressEvent] = []
    total = hash_files(bundle, events.append)
    assert total == sum((tiny_bundle / name).stat().st_size for name in bundle.files)
    assert {event.stage for event in events} == {"hash"}
    done = [event.done for event in events]
    assert done == sorted(done)
    assert done[-1] == total


def test_an_altered_file_is_named(tiny_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "b")
    weights = tmp_path / "b" / "weights" / "weights-00000.bin"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BundleError, match=r"weights-00000\.bin"):
        hash_files(Bundle.open(tmp_path / "b"), lambda event: None)
