"""Nothing is read but regular files of a bounded size, in the folder that they should be in."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from enginewright.runtime.bundle import regular_file
from enginewright.runtime.bundle.regular_file import open_regular, read_regular


def refused(path: Path, match: str, *, most: int = 100, within: Path | None = None) -> None:
    with pytest.raises(OSError, match=match) as caught:
        read_regular(path, most=most, within=within)
    assert caught.value.strerror


def test_a_regular_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc")
    assert read_regular(path, most=3, within=tmp_path) == b"abc"
    refused(path, "it has 3 bytes, more than the 2 that are read", most=2)
    with open_regular(path) as file:
        assert file.read() == b"abc" and not os.get_inheritable(file.fileno())
    refused(tmp_path / "none", "No such file")


def test_a_small_file_takes_no_more_memory_than_it_has_bytes(tmp_path: Path) -> None:
    """However many bytes such a file may have: Python makes room for what a read asks for before it reads."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc")
    tracemalloc.start()
    try:
        assert read_regular(path, most=512 << 20) == b"abc"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_is_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "pipe", "it is a pipe, not a regular file")
    refused(tmp_path / "folder", "it is a folder")
    refused(tmp_path / "zero", "it is a device")
    refused(tmp_path / "loop", "Too many levels")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        refused(tmp_path / "pipe", "it is a pipe")
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_that_lead_out(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out.txt").write_text("x")
    (tmp_path / "in/own.txt").write_text("x")
    (tmp_path / "in/link").symlink_to("../out.txt")
    (tmp_path / "in/up").symlink_to("..")
    (tmp_path / "in/inner").symlink_to("own.txt")
    (tmp_path / "also-in").symlink_to("in")
    refused(tmp_path / "in/link", "a link to a file outside of the folder", within=tmp_path / "in")
    refused(tmp_path / "in/up/out.txt", "outside of the folder", within=tmp_path / "in")
    assert read_regular(tmp_path / "in/link", most=1) == b"x"
    assert read_regular(tmp_path / "in/inner", most=1, within=tmp_path / "also-in") == b"x"


def test_a_file_that_grows_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 100)
    monkeypatch.setattr(regular_file, "_check", lambda *_: None)
    refused(tmp_path / "a", "more than the 5", most=5)


def test_what_a_shell_pipes_in_is_read_where_a_user_names_the_file() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"piped")
    os.close(writing)
    try:
        with pytest.raises(OSError, match="No such file"):
            read_regular(f"/dev/fd/{reading}", most=5)
        assert read_regular(f"/dev/fd/{reading}", most=5, piped=True) == b"piped"
    finally:
        os.close(reading)
