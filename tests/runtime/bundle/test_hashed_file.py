"""Files that are hashed as they are written: what is on disk, what was hashed, and in which pieces it is written."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest

from enginewright.runtime.bundle import hashed_file
from enginewright.runtime.bundle.hashed_file import HashedBeside, HashedFile

BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_file, "_BLOCK", BLOCK)


def some_bytes(count: int) -> bytes:
    return np.random.default_rng(count).bytes(count)


@pytest.mark.parametrize("sizes", [(1,), (64,), (65,), (10, 200, 3, 0, 51), (128, 1, 63), (300,)])
def test_a_file_has_what_was_written_and_its_hash(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    pieces = [some_bytes(size) for size in sizes]
    file = HashedFile(tmp_path / "a" / "x", Path("x"))
    for piece in pieces:
        file.write(memoryview(piece), needed=len(piece))
    file.sync()
    file.close()
    whole = b"".join(pieces)
    assert (tmp_path / "a" / "x").read_bytes() == whole
    assert (file.bytes, file.digest()) == (len(whole), hashlib.sha256(whole).hexdigest())


def test_the_system_gets_whole_blocks_at_multiples_of_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = HashedFile(tmp_path / "x", Path("x"))
    written: list[int] = []
    write = file._file.write
    monkeypatch.setattr(file._file, "write", lambda data: (written.append(len(data)), write(data))[1], raising=False)
    for size in (10, 200, 3, 51):
        file.write(some_bytes(size), needed=size)
    assert written == [BLOCK] * 4
    file.write(b"end", needed=3)
    file.sync()
    assert written == [*[BLOCK] * 4, 264 + 3 - 4 * BLOCK]
    file.close()


@pytest.mark.parametrize("kept", [0, 5, 64, 100])
@pytest.mark.parametrize("dropped", [1, 60, 70, 300])
def test_what_is_taken_back_leaves_nothing(tmp_path: Path, kept: int, dropped: int) -> None:
    file = HashedFile(tmp_path / "x", Path("x"))
    file.write(some_bytes(kept), needed=kept)
    mark = file.mark()
    file.write(some_bytes(dropped), needed=dropped)
    file.rewind(mark)
    file.write(b"after", needed=5)
    file.sync()
    file.close()
    whole = some_bytes(kept) + b"after"
    assert (tmp_path / "x").read_bytes() == whole
    assert (file.bytes, file.digest()) == (len(whole), hashlib.sha256(whole).hexdigest())


@pytest.mark.parametrize("change", ["", "written over", "renamed into place"])
def test_what_is_open_is_hashed_beside(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle that takes the place of one that is open is nothing to whoever has that one open."""
    began, run = threading.Event(), HashedBeside._run

    def later(beside: HashedBeside) -> None:
        began.wait()
        run(beside)

    monkeypatch.setattr(HashedBeside, "_run", later)
    path, content = tmp_path / "x", some_bytes(300)
    path.write_bytes(content)
    beside = HashedBeside(tmp_path, {"x": hashlib.sha256(content).hexdigest()})
    if change == "written over":
        path.write_bytes(some_bytes(301))
    elif change:
        (tmp_path / "y").write_bytes(some_bytes(301))
        (tmp_path / "y").rename(path)
    began.set()
    beside.wait()
    assert beside.altered == ("x" if change == "written over" else None)
