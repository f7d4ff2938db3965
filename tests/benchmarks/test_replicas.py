"""The benchmark of replicas at a small size."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import replicas


def test_processor_time_is_told_by_process() -> None:
    seconds = replicas.cpu_seconds([os.getpid()])
    assert seconds["front end"] > 0 and "replicas" not in seconds
    assert os.getpid() in replicas.below_of(os.getppid())


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra ray isn't installed")
def test_all_three_parts(tiny_bundle: Path, tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    small = ["--rounds", "1", "--clients", "2", "--requests", "24", "--prompt", "20", "--answer", "60"]
    small += ["--conversations", "3", "--turns", "2", "--shared", "100", "--json", str(result)]
    assert replicas.main([str(tiny_bundle), *small]) == 0
    result_json = json.loads(result.read_text())
    assert result_json["pair"]["share"] > 0 and result_json["pair"]["replicas"][0]["cpu_seconds"].keys() >= {
        "engines",
        "replicas",
    }
    assert result_json["kill"]["fine"] and result_json["kill"]["requests"] == 96
    assert all(row["cached_tokens"] for rows in result_json["routing"].values() for row in rows)
