"""The benchmark of ranks at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks


def test_memory_is_counted_of_all_processes() -> None:
    assert 1 << 20 < ranks.pss("self") < 1 << 36


@pytest.mark.matrix
def test_ratios_and_shares(tiny_bundle: Path, tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    small = ["--rounds", "1", "--prompt", "16", "--context", "16", "--json", str(result)]
    assert ranks.main([str(tiny_bundle), *small]) == 0
    (row,) = json.loads(result.read_text())["bundles"]
    assert row["ratios"]["tensor=2"].keys() == {"prefill", "decode_1", "decode_16", "pss"}
    assert all(0 < share < 1 for shares in row["waited"].values() for share in shares.values())
