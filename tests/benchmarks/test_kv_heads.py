"""The page on key/value heads has the table of the figures that are committed, and these say what the page says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_page_has_the_newest_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    spec = importlib.util.spec_from_file_location("kv_heads", REPOSITORY / "benchmarks" / "kv_heads.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kv_heads", module)
    spec.loader.exec_module(module)
    newest = sorted((REPOSITORY / "benchmarks" / "results").glob("kv-heads-*.json"))[-1]
    result = json.loads(newest.read_text())
    page = (REPOSITORY / "benchmarks" / "notes" / "quantization.md").read_text()
    assert f"{module.TABLE.begin}\n\n{module._table(result)}\n\n<!-- end of table -->" in page
    kl = {(row["method"], row["grouping"]): row["kl"] for row in result["rows"]}
    assert kl["calibrated", "neighbours"] < kl["mean", "neighbours"]
