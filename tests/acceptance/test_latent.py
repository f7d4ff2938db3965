"""Attention over a latent vector (MLA): logits are transformers', and a token's cache is the latent and one key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import PretrainedConfig

from enginewright.optimizer.export import export
from enginewright.optimizer.plan.model_programs import programs_of_model
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import STATE
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.progress import silent

from .driver import Driver
from .test_families import compare, expected_logits, saved
from .tiny_configs import tiny_family

FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "kimi_linear")
ALL_HEADS = load_recipe("f32").model_copy(update={"passes": {"absorb_latent": False}})


def bytes_per_token(program: LoweredProgram) -> int:
    """The bytes of a token's keys and values in all layers."""
    groups = [group for group in program.cache_groups if group.kind != STATE]
    return sum(cache_block_bytes(group) // group.block_size for group in groups)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    bundle = tmp_path / "tiny.bundle"
    compare(tiny_family(family), bundle, (37, 5, 1), 8, "best")
    (group,) = [g for g in Bundle.open(bundle).program("cpu").cache_groups if g.kind != STATE]
    # r = 16 and p = 8 in place of 4 heads with keys of 24 and values of 24, or 16 in minicpm3
    assert group.values_in_keys and group.sizes[:3] == (1, 24, 16)
    assert bytes_per_token(Bundle.open(bundle).program("cpu")) == 4 * 24 * len(group.layers)


@pytest.mark.parametrize("kv_cache", ["bf16", "int8", "fp8"])
def test_narrow_caches_are_as_close_as_those_of_all_heads(kv_cache: Any, tmp_path: Path) -> None:
    model = tiny_family("deepseek_v3")
    source = saved(model, tmp_path / "saved")
    ids = np.random.default_rng(3).integers(3, 256, 60).tolist()
    expected, errors = expected_logits(model, ids), []
    for name, recipe in (("latent", "f32"), ("heads", ALL_HEADS)):
        export(source, tmp_path / name, recipe=recipe, kv_cache=kv_cache)
        with Driver(tmp_path / name, 1, 2) as driver:
            errors.append(float(np.abs(driver.step({0: ids})[0] - expected).max()))
    assert 0 < errors[0] < 3 * errors[1]


def test_a_recipe_keeps_the_keys_and_values_of_all_heads(tmp_path: Path) -> None:
    bundle = tmp_path / "tiny.bundle"
    model = tiny_family("deepseek_v3")
    export(model, bundle, recipe=ALL_HEADS)
    (group,) = Bundle.open(bundle).program("cpu").cache_groups
    assert not group.values_in_keys and group.sizes[:3] == (4, 24, 24)
    ids = np.random.default_rng(3).integers(3, 256, 30).tolist()
    with Driver(bundle, 1, 1) as driver:
        np.testing.assert_allclose(driver.step({0: ids})[0], expected_logits(model, ids), atol=1e-4, rtol=0)


def test_a_bundle_for_a_target_without_such_caches_has_all_heads_on_each(tmp_path: Path) -> None:
    bundle = tmp_path / "tiny.bundle"
    export(tiny_family("deepseek_v3"), bundle, targets=["cpu", "onnx"])
    (group,) = Bundle.open(bundle).program("cpu").cache_groups
    assert not group.values_in_keys


def test_info_has_the_bytes_of_the_latent(tmp_path: Path) -> None:
    bundle = tmp_path / "tiny.bundle"
    export(tiny_family("minicpm3"), bundle)
    with LLM(bundle, memory="4MiB") as llm:
        info = llm.info()
    assert info["kv_cache_token_bytes"] == 2 * 24 * 4


PUBLISHED: dict[str, tuple[str, dict[str, Any], int]] = {
    # The models of docs/use/recipe-file.md: the family, what differs from transformers' defaults, attention layers.
    "DeepSeek-V2": ("deepseek_v2", {"num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 5120}, 60),
    "DeepSeek-V3": ("deepseek_v3", {}, 61),
    "Kimi K2": ("deepseek_v3", {"num_attention_heads": 64, "num_key_value_heads": 64}, 61),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}, 47),
    "MiniCPM3-4B": ("minicpm3", {}, 62),
    "Kimi-Linear-48B-A3B": ("kimi_linear", {"layer_types": ["full_attention"]}, 7),
}


def _of_one_layer(family: str, fields: dict[str, Any], folder: Path) -> Path:
    """A folder with the published shapes of attention, one layer, and what else a model has made small."""
    small = {"num_hidden_layers": 1, "vocab_size": 256, "intermediate_size": 64, "pad_token_id": 0}
    small["first_k_dense_replace"] = 1
    config: PretrainedConfig = transformers.AutoConfig.for_model(family, **small | fields)
    if hasattr(config, "mlp_layer_types"):
        config.mlp_layer_types = ["dense"]
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_documented_bytes_are_those_of_published_shapes(model: str, tmp_path: Path) -> None:
    family, fields, layers = PUBLISHED[model]
    folder = _of_one_layer(family, fields, tmp_path)
    cells = []
    for passes in ({"absorb_latent": False}, {}):
        recipe = Recipe(
            name="x", passes=passes, kv_cache=load_recipe("f32").kv_cache.model_copy(update={"dtype": "bf16"})
        )
        _, planned = programs_of_model(folder, [recipe], silent, ("cpu", "cuda"))
        programs = [of.program for of in planned if of.program is not None]
        (bytes_of_layer,) = {bytes_per_token(program) for program in programs}
        assert len(programs) == 2
        cells.append(layers * bytes_of_layer)
    row = f"| {model} | {cells[0]:,} | {cells[1]:,} | {cells[0] / cells[1]:.0f} |"
    page = Path(__file__).resolve().parents[2] / "docs/use/recipe-file.md"
    assert row in page.read_text(encoding="utf-8")
