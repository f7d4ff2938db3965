"""Files of engines are written anew with what was in them, and small ones are left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from peers.pages import PIECE, write_anew


@pytest.mark.parametrize("more", [0, 5])
def test_large_files_are_written_anew_and_small_ones_stay(tmp_path: Path, more: int) -> None:
    large, small = tmp_path / "sub" / "weights.bin", tmp_path / "config.json"
    large.parent.mkdir()
    content = os.urandom(1 << 10) * (PIECE >> 10) + b"x" * more
    large.write_bytes(content)
    large.chmod(0o640)
    small.write_bytes(b"{}")
    before = {path: path.stat().st_ino for path in (large, small)}
    assert write_anew(tmp_path) == len(content)
    assert large.read_bytes() == content and large.stat().st_mode & 0o777 == 0o640
    assert large.stat().st_ino != before[large] and small.stat().st_ino == before[small]
    assert {path.name for path in tmp_path.rglob("*")} == {"sub", "weights.bin", "config.json"}


def test_a_model_of_one_file(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(PIECE))
    assert write_anew(model) == PIECE and model.read_bytes() == bytes(PIECE)
