"""A KV-cache format for each layer, chosen within bytes per token or named, through the user's door."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe, with_cache
from enginewright.optimizer.recipes.sections import CalibrationSection
from enginewright.passes.framework.kv_options import CacheOptions, CacheOverride, ContextOptions
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import RecipeError, TargetError, VerificationError

from .test_reproducible import contents

TinyModel = Callable[..., PreTrainedModel]

HEAD = 32
LAYERS = 3
BYTES = {"bf16": 2 * 2 * 2 * HEAD, "k8v8": 2 * 2 * (HEAD + 2), "k4v4": 2 * 2 * (HEAD // 2 + 2)}
"""The bytes of a token's keys and values in a layer with 2 heads."""

BUDGET = BYTES["bf16"] + BYTES["k8v8"] + BYTES["k4v4"]
SAMPLES = CalibrationSection(tokens=1200, sequence_length=100)
RECIPE = """
name = "mine"

[kv_cache]
dtype = "auto"
max_bytes_per_token = {most}
candidates = ["bf16", "k8v8", "k4v4"]

[calibration]
tokens = 1200
sequence_length = 100
"""


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model whose middle layer alone has attention that counts, so that its rounding costs most."""
    model = tiny_model(
        "Llama", head_dim=HEAD, num_key_value_heads=2, num_hidden_layers=LAYERS, max_position_embeddings=1024
    )
    with torch.no_grad():
        for i in (0, 2):
            model.get_submodule(f"model.layers.{i}.self_attn.o_proj").weight.mul_(0.01)
        model.get_submodule("model.layers.1.self_attn.o_proj").weight.mul_(8)
    path = tmp_path_factory.mktemp("source") / "model"
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def chosen(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("auto")
    (where / "mine.toml").write_text(RECIPE.format(most=BUDGET))
    arguments = ["export", folder, "-o", where / "out", "--recipe", where / "mine.toml", "--target", "cpu"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return where / "out"


def _formats(bundle: Path) -> dict[int, str]:
    groups = Bundle.open(bundle).program("cpu").cache_groups
    return {layer: group.dtype for group in groups for layer in group.layers if not group.first}


def test_the_layer_that_costs_most_has_the_most_bits(chosen: Path) -> None:
    formats = _formats(chosen)
    assert sum(BYTES[dtype] for dtype in formats.values()) <= BUDGET
    assert formats[1] == "bf16" and len(set(formats.values())) > 1
    report = json.loads((chosen / "report" / "report.json").read_text())["kv_formats"]
    assert report["max_bytes_per_token"] == BUDGET
    assert report["chosen"]["bytes_per_token"] == sum(BYTES[dtype] for dtype in formats.values())
    assert {i: layer["format"] for i, layer in enumerate(report["layers"])} == formats
    groups = [g for g in Bundle.open(chosen).program("cpu").cache_groups if not g.first]
    assert sum(cache_block_bytes(g) // g.block_size for g in groups) == report["chosen"]["bytes_per_token"]
    costs = {layer["where"]: {o["format"]: o["predicted_kl"] for o in layer["options"]} for layer in report["layers"]}
    for layer in costs.values():
        assert 0 < layer["bf16"] < layer["k8v8"] < layer["k4v4"]
    assert costs["model.layers.1.self_attn"]["k4v4"] == max(layer["k4v4"] for layer in costs.values())
    shown = CliRunner().invoke(app, ["report", str(chosen)]).output
    assert f"{report['chosen']['bytes_per_token']:,} of {BUDGET:,} bytes a token" in shown


def test_two_exports_are_byte_equal_and_the_choice_is_a_recipe(chosen: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(RECIPE.format(most=BUDGET))
    export(folder, tmp_path / "again", recipe=tmp_path / "mine.toml", targets=["cpu"])
    assert contents(tmp_path / "again") == contents(chosen)
    export(folder, tmp_path / "named", recipe=chosen / "report" / "recipe.toml", targets=["cpu"])
    assert contents(tmp_path / "named") == contents(chosen)


def test_answers_are_the_same_in_any_batch(chosen: Path) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 256, n).tolist() for n in (700, 300, 40, 521)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
    with LLM(chosen, prefix_cache=False) as llm:
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    with LLM(chosen, prefill_chunk=96) as llm:
        together = llm.generate(prompts, params)
    assert [(r.token_ids, r.logprobs) for r in together] == [(r.token_ids, r.logprobs) for r in alone]


def test_an_option_has_the_budget(folder: Path, tmp_path: Path) -> None:
    recipe = load_recipe("f32").model_copy(update={"calibration": SAMPLES})
    export(folder, tmp_path / "x", recipe=recipe, targets=["cpu"], kv_cache=f"auto:{LAYERS * BYTES['k8v8']}")
    exported = load_recipe(tmp_path / "x" / "report" / "recipe.toml").kv_cache
    assert not exported.searched and exported.max_bytes_per_token is None
    assert with_cache(recipe, "auto:1KiB").kv_cache.max_bytes_per_token == 1024


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"dtype": "auto"}, "needs max_bytes_per_token"),
        ({"dtype": "k8v8", "max_bytes_per_token": 9}, "are for dtype 'auto' alone"),
        ({"dtype": "auto", "max_bytes_per_token": 9, "candidates": ["bf16", "int3"]}, "'int3' can't be made"),
        (
            {"dtype": "auto", "max_bytes_per_token": 9, "overrides": [{"layers": "*", "dtype": "bf16"}]},
            "leave overrides out",
        ),
        ({"overrides": [{"layers": "*", "dtype": "bf16"}]}, "overrides need a dtype"),
    ],
)
def test_a_section_that_says_too_much_or_too_little(section: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        CacheOptions.model_validate(section)


def test_what_cannot_be_chosen_names_its_key(folder: Path, tmp_path: Path) -> None:
    small = RECIPE.format(most=3 * BYTES["k4v4"] - 1)
    (tmp_path / "mine.toml").write_text(small)
    smallest = rf"kv_cache.max_bytes_per_token = {3 * BYTES['k4v4'] - 1}: .* take {3 * BYTES['k4v4']} bytes a token"
    with pytest.raises(VerificationError, match=smallest):
        export(folder, tmp_path / "x", recipe=tmp_path / "mine.toml", targets=["cpu"])
    with pytest.raises(TargetError, match=r"target cuda: all layers have one KV-cache format there"):
        export(folder, tmp_path / "x", recipe=tmp_path / "mine.toml", targets=["cuda"])
    (tmp_path / "mine.toml").write_text(small.replace("k8v8", "k6v4"))
    with pytest.raises(TargetError, match=r"target cuda: it has no KV cache of k6v4, .* \(kv_cache.candidates.1\)"):
        export(folder, tmp_path / "x", recipe=tmp_path / "mine.toml", targets=["cuda"])
    with pytest.raises(RecipeError, match=r"kv_cache: dtype 'auto' needs max_bytes_per_token"):
        export(folder, tmp_path / "x", recipe="f32", targets=["cpu"], kv_cache="auto")
    assert not (tmp_path / "x").exists()


def _with(**section: Any) -> Recipe:
    return load_recipe("f32").model_copy(update={"kv_cache": CacheOptions(**section)})


def test_named_formats_of_layers(tiny_model: TinyModel, tmp_path: Path) -> None:
    """In a layer with a short window, k4v4 is stored as k8v8: one group with a layer that names k8v8."""
    first = CacheOverride(layers="*.layers.0.*", dtype="k8v8")
    model = tiny_model("Gemma2", sliding_window=64, num_hidden_layers=4)
    export(model, tmp_path / "x", recipe=_with(dtype="k4v4", overrides=(first,)), targets=["cpu"])
    groups = Bundle.open(tmp_path / "x").program("cpu").cache_groups
    stored = {group.name: (group.dtype, group.layers) for group in groups}
    assert stored == {"window64": ("k8v8", (0, 2)), "full": ("k4v4", (1, 3)), "full-ends": ("k8v8", (1, 3))}
    last = CacheOverride(layers="*.layers.3.*", dtype="bf16")
    export(model, tmp_path / "y", recipe=_with(dtype="int8", overrides=(last,)), targets=["cpu"])
    groups = Bundle.open(tmp_path / "y").program("cpu").cache_groups
    stored = {group.name: (group.dtype, group.layers) for group in groups}
    assert stored == {"window64": ("i8", (0, 2)), "full": ("i8", (1,)), "full-2": ("bf16", (3,))}


def test_overrides_without_effect_and_on_other_targets(tiny_model: TinyModel, tmp_path: Path) -> None:
    nothing = _with(dtype="bf16", overrides=(CacheOverride(layers="*.layers.9.*", dtype="int8"),))
    with pytest.raises(RecipeError, match=r"kv_cache.overrides: layers '\*.layers.9.\*' matches no attention"):
        export(tiny_model("Llama"), tmp_path / "x", recipe=nothing, targets=["cpu"])
    mixed = _with(dtype="bf16", overrides=(CacheOverride(layers="*.layers.0.*", dtype="int8"),))
    with pytest.raises(TargetError, match=r"all layers have one KV-cache format there, .* has kv_cache.overrides"):
        export(tiny_model("Llama"), tmp_path / "x", recipe=mixed, targets=["cuda"])
    chooses = _with(dtype="k8v8", overrides=(CacheOverride(layers="*.layers.0.*", dtype="k4v4"),))
    chooses = chooses.model_copy(update={"adaptive_context": ContextOptions(best=32)})
    with pytest.raises(TargetError, match=r"\[adaptive_context\] .* KV cache of k8v8 and k4v4"):
        export(tiny_model("Llama"), tmp_path / "x", recipe=chooses, targets=["cpu"])
