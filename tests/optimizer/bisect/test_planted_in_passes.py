"""Bugs planted in a pass are found: the pass is named, and the layer and the tensor."""

from __future__ import annotations

import pytest

from enginewright.optimizer.bisect import FirstDivergence, Given, Options, bisect
from enginewright.optimizer.pipeline import pipeline
from enginewright.passes.framework.base import Pass
from tests.optimizer.bisect.buggy_passes import (
    buggy,
    buggy_quantization,
    drop_bias,
    scale_weight,
    shift_rope,
    swap_gate_up,
)
from tests.passes.captured import tiny

pytestmark = pytest.mark.usefixtures("captured_once")

LAYER = "model.layers.1"


def put(monkeypatch: pytest.MonkeyPatch, new: Pass, *, behind: str | None = None) -> None:
    """``new`` goes behind the first pass of a name, or in place of that of its own."""
    passes = pipeline.default_pipeline()
    at = next(i for i, p in enumerate(passes) if p.name == (behind or new.name))
    passes[at : at + 1] = [passes[at], new] if behind else [new]
    monkeypatch.setattr(pipeline, "default_pipeline", lambda: passes)


def divergence(family: str, recipe: str, name: str) -> FirstDivergence:
    first = bisect(Given(tiny(family)[0]), Given(tiny(family)[0]), Options(recipe=recipe)).first_divergence
    assert first is not None
    assert first.pass_name == name and first.stage == f"the pass {name}"
    assert first.layer == LAYER
    assert first.error > 0 and first.others_count < 4
    return first


@pytest.mark.parametrize(
    ("behind", "family", "recipe"),
    [("normalize_linear", "Qwen2", "int8"), ("fuse_gate_up", "Qwen2", "f32"), ("fuse_gate_up", "Gemma2", "int4")],
)
def test_a_weight_times_1_01(behind: str, family: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, buggy(scale_weight, f"{LAYER}.mlp.down_proj"), behind=behind)
    first = divergence(family, recipe, "polish")
    assert first.value_name == f"output of {LAYER}.mlp.down_proj"
    assert "1.0100 times" in first.reasons[0] and f"{LAYER}.mlp.down_proj.weight" in first.reasons[0]
    assert any(call.startswith("node ") and "linear" in call for call in first.calls)


@pytest.mark.parametrize("family", ["Qwen2", "Gemma2"])
def test_gate_and_up_swapped(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, buggy(swap_gate_up, f"{LAYER}.mlp"), behind="fuse_gate_up")
    first = divergence(family, "f32", "polish")
    assert first.value_name == f"input of {LAYER}.mlp.down_proj"
    assert any("gate_proj and" in reason and "up_proj are swapped" in reason for reason in first.reasons)


@pytest.mark.parametrize(("family", "recipe"), [("Qwen2", "int8"), ("Gemma2", "f32")])
def test_a_rope_one_position_off(family: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, buggy(shift_rope, f"{LAYER}.self_attn"), behind="fuse_add_norm")
    first = divergence(family, recipe, "polish")
    assert first.value_name == f"key, as attention gets it, of {LAYER}.self_attn"
    assert "position that rope has is off by +1" in first.reasons[0]


def test_a_dropped_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, buggy(drop_bias, f"{LAYER}.self_attn.v_proj"), behind="normalize_linear")
    first = divergence("Qwen2", "int8", "polish")
    assert first.value_name == f"output of {LAYER}.self_attn.v_proj"
    assert any("doesn't add the bias" in r and f"{LAYER}.self_attn.v_proj.bias" in r for r in first.reasons)


@pytest.mark.parametrize(("bug", "recipe"), [(scale_weight, "int8"), (drop_bias, "int8"), (drop_bias, "int4")])
def test_a_pass_that_rounds_has_a_bug(bug: object, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 % is less than what rounding makes of a product, and is found all the same: it is the same everywhere."""
    put(monkeypatch, buggy_quantization(bug, f"{LAYER}.self_attn.q_proj"))  # type: ignore[arg-type]
    first = divergence("Qwen2", recipe, "quantize_linears")
    assert first.value_name == f"output of {LAYER}.self_attn.q_proj"
    expected = "1.01" if bug is scale_weight else "doesn't add the bias"
    assert any(expected in reason for reason in first.reasons)


@pytest.mark.parametrize(("family", "recipe"), [("Qwen2", "bf16"), ("Gemma2", "int8"), ("GPT2", "int4")])
def test_passes_as_they_are_agree_with_the_source(family: str, recipe: str) -> None:
    report = bisect(Given(tiny(family)[0]), Given(tiny(family)[0]), Options(recipe=recipe))
    assert report.first_divergence is None
    assert report.largest_error is not None and report.largest_error < 8e-3  # keys and values in bf16 are 2^-8 apart
