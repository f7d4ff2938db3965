"""The frontier of KV caches: what is simulated, and the page that is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import kv_frontier
import pytest
import torch
from kv_rounding import EIGHT, Cache, RoundedModel, Rounding, attention_in_steps, hadamard
from transformers import LlamaConfig, LlamaForCausalLM

from enginewright.passes.ops.quantized_cache import round_to_few_bits


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_the_built_formats_are_the_simulated_ones(bits: int) -> None:
    torch.manual_seed(bits)
    x, turned = torch.randn(1, 2, 40, 64), hadamard(64)
    rounding = Rounding(bits, rotated=True, elements="normal" if bits == 4 else "odd")
    simulated = rounding.of(x @ turned) @ turned
    built = round_to_few_bits(x[0].transpose(0, 1), bits).transpose(0, 1)[None]
    # One divides by the scale as it is rounded, by 2^-12 or less, the other before that: codes up to 63 move by 0.015
    # at most, and by a quarter of that in the mean, so that one in 250 falls to the other side. That is a whole step,
    # whose square is 12 times the mean square error.
    assert (simulated - built).square().mean() < 12 / 250 * (built - x).square().mean()


@pytest.mark.parametrize("window", [None, 70])
def test_attention_in_steps_is_attention(window: int | None) -> None:
    q, k, v = (torch.randn(1, heads, 300, 16) for heads in (4, 2, 2))
    at = torch.arange(300)
    seen = (at <= at[:, None]) & (at > at[:, None] - (window or 300))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)
    got = attention_in_steps(q, (k, v), (k, v), Cache(), 0.3, window)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_tokens_are_seen_with_8_bits_by_their_positions() -> None:
    """Values tell which of the two kinds a query read: few bits are 1 there, and 8 bits 0."""
    q, ones = torch.zeros(1, 1, 512, 8), torch.ones(1, 1, 512, 8)
    few, wide = (ones, ones), (ones, 0 * ones)
    share = attention_in_steps(q, few, wide, Cache(first=128, recent=128), 1.0, None)[0, 0, :, 0]
    assert not share[:384].any()  # the first step, the step before and the query's own have 8 bits
    torch.testing.assert_close(share[511], torch.tensor(128 / 512))


def test_a_choice_by_layer_keeps_the_budget() -> None:
    alone = {(layer, c): kl for layer in (0, 1) for c, kl in {"4": 0.1 * (layer + 1), "8": 0.0}.items()}
    assert kv_frontier.cheapest(alone, {"4": 4.0, "8": 8.0}, 2, 6.0) == ["4", "8"]
    assert kv_frontier.cheapest(alone, {"4": 4.0, "8": 8.0}, 2, 4.0) == ["4", "4"]


def test_the_page_has_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model, ids = RoundedModel(tmp_path), list(range(2, 90))
    exact = model.hidden(ids, Cache())
    rows = []
    for name, cache in {"16, 16": Cache(), "8, 8": Cache(EIGHT, EIGHT), "4, 4": kv_frontier.FORMATS["4, 4"]}.items():
        bits = cache.bits_a_number(32)
        distance = model.compare(exact, model.hidden(ids, cache), ids)
        rows.append({"model": "tiny", "head": 32, "tokens": 88, "format": name, "bits": bits, **distance})
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-7) and rows[1]["kl"] < rows[2]["kl"]
    result = tmp_path / "kv.json"
    result.write_text(json.dumps({"rows": rows, "processor": "p", "date": "d", "commit": ""}))
    page = tmp_path / "page.md"
    page.write_text("<!-- table: benchmarks/kv_frontier.py -->\n<!-- end of table -->\n")
    monkeypatch.setattr(kv_frontier, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["kv_frontier.py", "--page", str(result)])
    kv_frontier.main()
    assert f"| 4, 4 | 4.50 | {rows[2]['kl']:.4f} |" in page.read_text().replace("**", "")
    assert "\np; d.\n" in page.read_text()
    assert page.with_suffix(".svg").read_text().startswith("<svg")
