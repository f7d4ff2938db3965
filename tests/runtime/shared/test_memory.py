"""Sizes are read and written as people do, free memory is what system and container say, and freed bytes go back."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from enginewright.runtime.shared.errors import CapacityError, RequestError
from enginewright.runtime.shared.memory import (
    check_free,
    default_budget,
    format_bytes,
    free_memory,
    parse_size,
    return_freed_memory,
)

PIECE = 4000  # less than what the C library maps by itself, more than what Python keeps in pools of its own


@pytest.mark.parametrize(
    ("text", "size"),
    [(12, 12), ("12", 12), ("512MiB", 512 << 20), ("1.5 GB", 1_500_000_000), ("2g", 2 * 10**9), ("512Mi", 512 << 20)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1", "1XB", "1.2.3", "MiB", "1ib", "4 GiB of it", "1e9", "inf", True])
def test_no_sizes(text: str) -> None:
    with pytest.raises(RequestError, match="memory: "):
        parse_size(text)


def test_the_least_size() -> None:
    assert parse_size("0", "max_memory") == 0
    for text in ("0", "0.1", 0):
        with pytest.raises(RequestError, match=r"max_memory: .* isn't a size"):
            parse_size(text, "max_memory", least=1)


def test_bytes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40, 5000 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 TiB",
        "5000.0 TiB",
    ]


def test_free_memory_is_the_lesser_of_system_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:  4000 kB\n")
    assert free_memory(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(meminfo, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("3000\n")
    assert free_memory(meminfo, tmp_path) == 2000
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 300\nactive_file 200\n")
    assert free_memory(meminfo, tmp_path) == 2300  # what files hold is dropped when it is wanted
    (tmp_path / "memory.max").write_text("500\n")
    assert free_memory(meminfo, tmp_path) == 0


def test_more_than_is_free_is_refused() -> None:
    check_free(1 << 20, "a KV cache")
    with pytest.raises(CapacityError, match=r"memory: a KV cache of 1024\.0 TiB is more than the .* that are free"):
        check_free(1 << 50, "a KV cache")


def test_free_memory_where_linux_does_not_say(tmp_path: Path) -> None:
    half = free_memory(tmp_path / "none", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == half > 1 << 20


def test_the_default_is_a_share() -> None:
    assert 0 < default_budget() < free_memory()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library can't be asked"
)
@pytest.mark.parametrize("mebibytes", [32, 96])
def test_freed_pieces_go_back(mebibytes: int) -> None:
    pieces = [bytes([i % 256]) * PIECE for i in range((mebibytes << 20) // PIECE)]
    pieces_held = pieces[:: len(pieces) // 8]  # among them, so that the library has no whole range to give back
    full = resident()
    del pieces
    return_freed_memory()
    assert full - resident() > (mebibytes << 20) * 3 // 4
    assert all(piece == piece[:1] * PIECE for piece in pieces_held)


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library can't be told"
)
@pytest.mark.parametrize("mebibytes", [5, 20])
def test_large_blocks_go_back_when_they_are_freed(mebibytes: int) -> None:
    """Runs in a process of its own: what the C library is told lasts."""
    program = f"""
import ctypes
from enginewright.runtime.shared.memory import return_large_blocks_at_once
from tests.runtime.shared.test_memory import resident
return_large_blocks_at_once()
bytes(32 << 20)  # freed: it raises the threshold of a library that wasn't told
before = resident()
blocks = [bytearray({mebibytes} << 20) for _ in range(4)]
del blocks[:3]  # the last one is the end of the heap, where it came from there
print(resident() - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
    assert grown < 1.5 * (mebibytes << 20)
