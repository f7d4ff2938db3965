"""Reports to show: a real one of a tiny model, and one in which everything that a report may have is made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.optimizer.report.document import ReportDocument
from enginewright.runtime.bundle.reader import Bundle

HOSTILE = "<script>alert('&\"')</script>"
"""A module name that a model's maker may choose."""


@pytest.fixture(scope="module")
def int8_bundle(tiny_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tiny Llama of three layers in int8, without a tokenizer."""
    path = tmp_path_factory.mktemp("report") / "int8.bundle"
    export(tiny_model("Llama", num_hidden_layers=3), path, recipe="int8")
    return Bundle.open(path)


def _figures(names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {"where": f"model.layers.{layer}.{kind}", "name": name, "value": 0.01 * (layer + 1)}
        for name in names
        for layer in range(4)
        for kind in ("mlp.down_proj", f"self_attn.{HOSTILE}")
    ] + [{"where": "lm_head", "name": name, "value": 0.5} for name in names]


@pytest.fixture
def document() -> ReportDocument:
    """A report that has every section, with hostile names in all of them."""
    measurement = {"tokens": 300, "max_logit_error": 0.1, "largest_logit": 30.0, "kl_mean": 0.002, "kl_max": 0.1}
    measurement |= {"top1_agreement": 0.99, "perplexity": None, "source_perplexity": None, "seconds": 0.1}
    option = [{"format": f"{HOSTILE}{i}", "bytes": 100, "predicted_kl": 0.001 * i} for i in range(3)]
    point = {"bytes": 1000, "predicted_kl": 0.01, "measured_kl": 0.02}
    comparison = {"tokens": 82, "max_logit_error": 1.0, "largest_logit": 33.0, "kl_mean": 0.004, "kl_max": 0.1}
    comparison["top1_agreement"] = 0.96
    text = comparison | {"text": "built in", "window": 512, "windows": 2, "windows_in_text": 24}
    text |= {"perplexity": 20.5, "source_perplexity": 20.4}
    ranges = [{"where": f"model.layers.{i}.{HOSTILE}", "largest": 1.0 + i} for i in range(4)]
    coverage = {"sequences": 8, "tokens": 999, "distinct_tokens": 50, "vocabulary_share": 0.01}
    return ReportDocument.model_validate(
        {
            "seconds": 227.4,
            "peak_rss_bytes": 1 << 30,
            "bundle_bytes": 145_000_000,
            "source_bytes": 290_000_000,
            "exported": {
                "date": "2026-11-23T07:50:12+00:00",
                "processor": f"A processor of {HOSTILE}",
                "cores": 2,
            },
            "stages": {"capture": 18.6, "passes": 21.0, "nothing": 0.0},
            "passes": [
                {
                    "name": "fuse_qkv",
                    "matched": 3,
                    "seconds": 0.5,
                    "rejected": [{"node": f"n{i}", "where": HOSTILE, "reason": f"no {HOSTILE}"} for i in range(20)],
                    "measurement": measurement | {"perplexity": 20.0, "source_perplexity": 19.9},
                    "figures": _figures(("relative error", "largest input")),
                },
                {"name": "remove_noops", "matched": 0, "seconds": 0.0, "measurement": measurement},
                {"name": HOSTILE, "matched": 1, "seconds": 0.1, "target": "cpu"},
            ],
            "pass_verification": {
                "origin": HOSTILE,
                "sequences": 2,
                "tokens": 300,
                "exact_tokens": 100,
                "relative_tolerance": 1e-4,
                "max_kl": 0.05,
                "captured": measurement,
                "measured": 2,
                "seconds": 1.0,
            },
            "auto": {
                "max_kl": 0.02,
                "max_bytes": 2000,
                "tokens": 512,
                "together": "one by one",
                "chosen": point,
                "measured_kl": {HOSTILE: 0.015},
                "tried": [point],
                "curve": [point, {"bytes": 500, "predicted_kl": 0.0}],
                "single": {HOSTILE: point},
                "units": [
                    {"where": f"model.layers.{i}.{HOSTILE}", "format": f"{HOSTILE}{i % 3}", "options": option}
                    for i in range(4)
                ]
                + [{"where": "lm_head", "format": f"{HOSTILE}1", "options": option}],
                "seconds": 9.0,
                "time": {"budget": 5.0, "device": HOSTILE, "predicted": 4.9, "timed": 4.8, "measured": 5.12},
            },
            "fusion_effects": [
                {
                    "target": "cpu",
                    "context": 64,
                    "prefill_tokens": 128,
                    "effects": [
                        {"fusion": HOSTILE, "matched": 3, "decode_without": 2000.0, "decode_with": 1900.0}
                        | {"prefill_without": 9000.0, "prefill_with": 9100.0, "decode_saves": [0.042, 0.058]},
                        {"fusion": "none", "matched": 0},
                    ],
                    "decode_noise": 0.011,
                    "prefill_noise": 0.023,
                },
                {"target": "cpu", "context": 64, "prefill_tokens": 0, "effects": [], "skipped": HOSTILE},
            ],
            "calibration": {
                "origin": f"sampled {HOSTILE}",
                "coverage": coverage | {"warnings": [f"too little {HOSTILE}"], "ranges": ranges},
            },
            "quantization": {"values": 10**8, "saturated": 1, "vanished": 2, "affected": []},
            "verification": [
                {"target": "cpu", "exact": False, "seed": 0, "random_tokens": comparison, "tolerance": None}
                | {"max_kl": 0.05, "text": text, "text_omitted": None, "seconds": 2.0, "peak_rss_bytes": 1 << 30}
                | {"source_speed": {"threads": 2, "context": 32, "decode": 38.2}}
            ],
        }
    )
