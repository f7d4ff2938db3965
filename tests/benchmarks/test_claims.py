"""The page of claims is made of what was measured, on a tiny bundle here."""

from __future__ import annotations

import json
from pathlib import Path

import claims
import claims_page
import kv_rounding
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


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
    results, page = tmp_path / "claims.json", tmp_path / "claims.md"
    common = [str(tiny_bundle), "--rounds", "1", "--requests", "12", "--threads", "1", "--json", str(results)]
    assert claims.main([*common, "--parts", "reservation", "batching"]) == 0
    assert claims.main([*common, "--parts", "cache", "formats", "--page", str(page)]) == 0
    figures = json.loads(results.read_text())
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


@pytest.mark.parametrize("rounding", [of.keys for of in kv_rounding.CLAIMS.values()], ids=list(kv_rounding.CLAIMS))
def test_rounding_is_as_fine_as_it_says(rounding: kv_rounding.Rounding) -> None:
    x = torch.randn(7, 3, 64, generator=torch.Generator().manual_seed(1))
    apart = (rounding.of(x) - x).abs()
    rows = x.reshape(-1, rounding.group or 64)
    # Half a step; an offset is itself rounded to 11 bits.
    step = (rows.amax(1) - rows.amin(1)) if rounding.offset else 2 * rows.abs().amax(1)
    step = step / (2**rounding.bits - (1 if rounding.offset else 2))
    assert (apart.reshape(rows.shape).amax(1) <= 0.5 * step + 2**-10 * rows.abs().amax(1)).all()
    assert rounding.of(rounding.of(x)).sub(rounding.of(x)).abs().max() < 0.01


@pytest.mark.parametrize("size", [1, 8, 64])
def test_a_rotation_changes_no_product(size: int) -> None:
    turned = kv_rounding.hadamard(size)
    torch.testing.assert_close(turned @ turned.T, torch.eye(size))
    torch.testing.assert_close(turned.abs(), torch.full((size, size), size**-0.5))


def test_the_page_says_what_rounding_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    roundings = {name: kv_rounding.CLAIMS[name] for name in ("8 bits", "4 bits", "4 bits, rotated")}
    monkeypatch.setattr(kv_rounding, "CLAIMS", roundings)
    figures = kv_rounding.rounded(tmp_path, range(2, 90), 1)
    assert 0 < figures["8 bits"]["kl"] < figures["4 bits"]["kl"] and figures["4 bits"]["bits"] == 5
    assert f"| 4 bits, rotated | 5.0 | {figures['4 bits, rotated']['kl']:.2e} |" in claims_page.rounding(figures)
