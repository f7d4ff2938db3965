"""What was freed goes back to the system, and what is in use stays."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from enginewright.runtime.kv_cache.cache_groups import return_freed_memory

PIECE = 4000  # less than what the C library maps by itself, more than what Python keeps in pools of its own


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library can't be asked"
)
@pytest.mark.parametrize("mebibytes", [32, 96])
def test_freed_pieces_go_back(mebibytes: int) -> None:
    pieces = [bytes([i % 256]) * PIECE for i in range((mebibytes << 20) // PIECE)]
    kept = pieces[:: len(pieces) // 8]  # among them, so that the library has no whole range to give back
    full = resident()
    del pieces
    return_freed_memory()
    assert full - resident() > (mebibytes << 20) * 3 // 4
    assert all(piece == piece[:1] * PIECE for piece in kept)
