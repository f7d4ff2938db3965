"""Pairs that can be compared besides a model and its bundle, and pairs that are refused."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from enginewright.optimizer.bisect import Given, Options, bisect
from enginewright.plugins.native.executable import isas
from enginewright.runtime.shared.errors import BundleError, ComparisonError, RequestError
from enginewright.runtime.shared.progress import ProgressEvent
from tests.conftest import make_tiny_model
from tests.optimizer.bisect.planting import Bundles, Planting, emit_bundle, scale_rows
from tests.passes.captured import tiny

pytestmark = pytest.mark.usefixtures("replayed_once")

QKV = "model.layers.0.self_attn.q_proj+k_proj+v_proj.weight"


def model_of(family: str) -> Given:
    return Given(tiny(family)[0])


@pytest.mark.parametrize("recipe", ["f32", "int8"])
def test_two_instruction_sets_of_a_bundle_agree(recipe: str, bundles: Bundles) -> None:
    bundle = bundles("Qwen2", recipe)
    report = bisect(Given(bundle), Given(bundle, isa="portable"))
    assert report.first_divergence is None and report.values_compared > 30
    assert report.a.endswith(f"({isas()[0]})") and report.b.endswith("(portable)")
    # Float32 sums with and without fma.
    assert report.largest_error is not None and report.largest_error < 1e-5


def test_two_bundles_differ_where_one_was_changed(bundles: Bundles, tmp_path: Path) -> None:
    planting = Planting(bundles("Qwen2", "f32"), tmp_path / "other")
    scale_rows(planting, QKV, 96, 128)
    divergence = bisect(Given(bundles("Qwen2", "f32")), Given(planting.folder)).first_divergence
    assert divergence is not None and divergence.stage == "" and divergence.pass_name is None
    assert divergence.value_name == "output of model.layers.0.self_attn.v_proj"
    assert "1.0100 times" in divergence.reasons[0]


def test_bundles_of_other_formats_are_allowed_what_rounding_does(bundles: Bundles) -> None:
    report = bisect(Given(bundles("Qwen2", "f32")), Given(bundles("Qwen2", "bf16")))
    assert report.first_divergence is None and "other formats" in report.notes[0]
    strict = bisect(Given(bundles("Qwen2", "f32")), Given(bundles("Qwen2", "bf16")), Options(tolerance=1e-5))
    assert strict.first_divergence is not None and strict.first_divergence.tolerance == 1e-5


def test_two_models_differ_where_one_was_changed() -> None:
    original = tiny("Qwen2")[0]
    changed = copy.deepcopy(original)
    with torch.no_grad():
        changed.get_submodule("model.layers.1.self_attn.o_proj").weight.mul_(1.01)
    divergence = bisect(Given(original), Given(changed)).first_divergence
    assert divergence is not None and divergence.layer == "model.layers.1"
    assert divergence.value_name == "output of model.layers.1.self_attn.o_proj"
    assert divergence.gain == pytest.approx(1.01, rel=1e-4)
    same = bisect(Given(original), Given(copy.deepcopy(original)))
    assert same.first_divergence is None and same.largest_error == 0


@pytest.mark.parametrize("dropped_in", ["A", "B"])
def test_a_bias_that_one_of_two_models_has(dropped_in: str) -> None:
    original = tiny("Qwen2")[0]
    changed = copy.deepcopy(original)
    name = "model.layers.1.self_attn.q_proj"
    with torch.no_grad():
        changed.get_submodule(name).bias.zero_()
    a, b = (changed, original) if dropped_in == "A" else (original, changed)
    divergence = bisect(Given(a), Given(b)).first_divergence
    assert divergence is not None and divergence.value_name == f"output of {name}"
    assert not any("inf" in reason for reason in divergence.reasons)
    if dropped_in == "A":
        assert divergence.reasons[0].startswith(f"A adds no bias there, as it is all zeros; B adds {name}.bias")
    else:
        assert divergence.reasons[0].startswith(f"B doesn't add the bias {name}.bias")
        assert divergence.reasons[0].endswith("it is all zeros")


@pytest.mark.parametrize(
    ("other", "overrides", "message"),
    [
        ("Llama", {}, "architecture Qwen2ForCausalLM and LlamaForCausalLM"),
        ("Qwen2", {"vocab_size": 300}, "vocabulary 256 tokens and 300 tokens"),
        ("Qwen2", {"num_hidden_layers": 3}, "layers 2 and 3"),
        ("Qwen2", {"num_key_value_heads": 4}, "key and value heads 2 and 4"),
    ],
)
def test_two_different_models_are_refused(
    other: str, overrides: dict[str, int], message: str, bundles: Bundles, tmp_path: Path
) -> None:
    bundle = emit_bundle(make_tiny_model(other, **overrides), tmp_path / "other")
    with pytest.raises(ComparisonError, match=message):
        bisect(model_of("Qwen2"), Given(bundle))
    with pytest.raises(ComparisonError, match=message):
        bisect(Given(bundles("Qwen2", "f32")), Given(bundle))


def changed_recipe(bundle: Path, folder: Path, **changes: object) -> Path:
    shutil.copytree(bundle, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["recipe"] |= changes
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_recipe_that_cannot_be_repeated_is_refused(bundles: Bundles, tmp_path: Path) -> None:
    folder = changed_recipe(bundles("Qwen2", "f32"), tmp_path / "newer", frobnicate=3)
    with pytest.raises(BundleError, match=r"manifest\.json: recipe\.frobnicate"):
        bisect(model_of("Qwen2"), Given(folder))
    weights = {"default": {"storage": "int4", "group_size": 32, "activation": "int8", "activation_group_size": 32}}
    folder = changed_recipe(bundles("Qwen2", "f32"), tmp_path / "gptq", weights=weights | {"method": "gptq"})
    (folder / "report").mkdir()
    (folder / "report" / "report.json").write_text(json.dumps({"calibration": {"origin": "my.txt"}}))
    with pytest.raises(ComparisonError, match=r"without the file my\.txt") as caught:
        bisect(model_of("Qwen2"), Given(folder))
    assert "--calibration" in str(caught.value.hint)


def test_a_recipe_that_searches_is_no_pass() -> None:
    for recipe in ("auto", "smallest"):
        with pytest.raises(ComparisonError, match=f"recipe {recipe} searches"):
            bisect(model_of("Qwen2"), model_of("Qwen2"), Options(recipe=recipe))


def test_bad_tokens_and_targets(bundles: Bundles) -> None:
    bundle = Given(bundles("Qwen2", "f32"))
    for tokens, message in (
        ([[]], "no tokens"),
        ([[1, 256]], "token 256 is not one of the model's 256"),
        ([[-1]], "token -1"),
        ([[1] * 513], "513 tokens"),
        ([[1] * 400, [2] * 200], "600 tokens"),
    ):
        with pytest.raises(RequestError, match=message):
            bisect(bundle, bundle, Options(tokens=tokens))
    with pytest.raises(BundleError, match="no target 'gpu'"):
        bisect(bundle, Given(bundles("Qwen2", "f32"), target="gpu"))


def test_what_a_run_cannot_have_is_refused(bundles: Bundles) -> None:
    model, bundle = model_of("Qwen2"), Given(bundles("Qwen2", "f32"))
    with pytest.raises(ComparisonError, match="no instruction set to choose"):
        bisect(Given(model.what, isa="portable"), bundle)
    for a, b in ((model, bundle), (bundle, bundle), (model, model_of("Gemma2"))):
        with pytest.raises(ComparisonError, match=r"a recipe is given \(int8\)"):
            bisect(a, b, Options(recipe="int8"))


def test_a_step_that_was_changed_is_named(bundles: Bundles, tmp_path: Path) -> None:
    planting = Planting(bundles("Qwen2", "f32"), tmp_path / "other")

    def other_scale(program: dict[str, Any]) -> None:
        step = [s for s in program["steps"] if s["op"] == "paged_attention"][1]
        step["attrs"]["scale"] *= 1.25

    planting.change_program(other_scale)
    divergence = bisect(model_of("Qwen2"), Given(planting.folder)).first_divergence
    assert divergence is not None and divergence.value_name == "what attention gives in model.layers.1.self_attn"
    assert "has scale 0.3125, where the recipe makes 0.25" in divergence.reasons[-1]


def test_given_tokens_are_taken_and_progress_is_told(bundles: Bundles) -> None:
    events: list[ProgressEvent] = []
    bundle = bundles("Qwen2", "f32")
    report = bisect(Given(bundle), Given(bundle), Options(tokens=[[5], [6, 7, 8]]), events.append)
    assert report.sequences == [1, 3] and report.first_divergence is None
    assert {event.stage for event in events} == {"compare"}
