"""The page of claims is made of what was measured, on a tiny bundle here."""

from __future__ import annotations

import json
from pathlib import Path

import claims
import pytest


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONTEXT", "BATCHED"):
        monkeypatch.setattr(claims, name, 64)
    monkeypatch.setattr(claims, "RESERVED", 3)
    monkeypatch.setattr(claims, "BATCH", 4)
    monkeypatch.setattr(claims, "LENGTHS", (8, 40))
    monkeypatch.setattr(claims, "STEPS", 2)


@pytest.mark.usefixtures("short")
def test_the_page_has_what_was_measured(tiny_bundle: Path, tmp_path: Path) -> None:
    found, page = tmp_path / "claims.json", tmp_path / "claims.md"
    common = [str(tiny_bundle), "--rounds", "1", "--requests", "12", "--threads", "1", "--json", str(found)]
    assert claims.main([*common, "--parts", "reservation", "batching"]) == 0
    assert claims.main([*common, "--parts", "cache", "formats", "--page", str(page)]) == 0
    figures = json.loads(found.read_text())
    reservation = figures["reservation"]
    assert 0 < reservation["blocks"]["waste"] < reservation["contexts"]["waste"] < 1
    assert reservation["blocks"]["mean_running"] >= reservation["contexts"]["mean_running"]
    assert figures["batching"]["speedup"] > 0
    assert set(figures["cache"]) == {"8", "40"}
    assert "formats" not in figures  # there is no source to export
    text = page.read_text()
    assert f"{reservation['blocks']['waste']:.1%}" in text
    for part in ("reservation", "batching", "cache"):
        assert f"(claims-{part}.svg)" in text
        assert (tmp_path / f"claims-{part}.svg").read_text().startswith("<svg")
    assert "claims-attention.svg" not in text


def test_attention_is_measured_in_a_process_of_its_own(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert claims.main([str(tiny_bundle), "--threads", "1", "--attention", "tiles", "40"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["seconds"] > 0 and measured["bytes"] >= 0
