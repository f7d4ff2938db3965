"""Runs of one model, observed: the same values by the same names, and replaced where others are given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from enginewright.optimizer.bisect import Given, Options, bisect
from enginewright.optimizer.bisect.bundle_run import BundleRun
from enginewright.optimizer.bisect.program_run import ProgramRun
from enginewright.optimizer.bisect.source_run import SourceRun
from enginewright.optimizer.bisect.tolerance import difference
from enginewright.optimizer.recipes.recipe import load_recipe, with_cache
from enginewright.passes.ir.value_name import LOGITS, ValueName
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.progress import silent
from tests.optimizer.bisect.conftest import Made
from tests.optimizer.bisect.planting import Bundles, write_bundle
from tests.passes.captured import captured, tiny

LENGTHS = [(7,), (37, 1, 23)]


def sequences(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(0, 256, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_source_and_captured_program_have_the_same_values(family: str, lengths: tuple[int, ...]) -> None:
    model = tiny(family)[0]
    source = SourceRun(model, "source")
    values = source.values(sequences(lengths))
    program = ProgramRun(captured(family), "program", leaves=source.leaves)
    own_values = program.values(sequences(lengths))  # on its own
    assert set(own_values) <= set(values) and len(values) - len(own_values) < 3
    for name, value in own_values.items():
        np.testing.assert_allclose(value, values[name], rtol=2e-4, atol=2e-4, err_msg=str(name))
    with torch.no_grad():
        expected = torch.cat([model(input_ids=s[None]).logits[0] for s in sequences(lengths)])
    np.testing.assert_allclose(values[LOGITS], expected.numpy(), rtol=1e-5, atol=1e-5)
    assert model.config._attn_implementation == "eager"  # the model given is not touched


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("recipe", ["f32", "int8-unscaled"])
def test_a_bundle_in_chunks_has_the_values_of_its_program(
    recipe: str, lengths: tuple[int, ...], bundles: Bundles
) -> None:
    source = SourceRun(tiny("Qwen2")[0], "source")
    source_values = source.values(sequences(lengths))
    bundle = BundleRun(Bundle.open(bundles("Qwen2", recipe)), "bundle", leaves=source.leaves)
    values = bundle.values(sequences(lengths), source_values)
    assert len(values) > 30
    for name, value in values.items():
        if name in source_values:
            assert value.shape == source_values[name].shape
            # What int8 makes of a product of 64 or 128 terms; nothing adds up.
            assert np.linalg.norm(value - source_values[name]) < (1e-5 if recipe == "f32" else 0.02) * np.linalg.norm(
                source_values[name]
            ), name


@pytest.mark.parametrize("kind", ["program", "source", "bundle"])
def test_what_is_given_is_gone_on_with(kind: str, bundles: Bundles) -> None:
    """Other keys in one layer change what attention gives there, and leave the layer before as it was."""
    model = tiny("Qwen2")[0]
    source = SourceRun(model, "source")
    run: SourceRun | ProgramRun | BundleRun = source
    if kind == "program":
        run = ProgramRun(captured("Qwen2"), "program", leaves=source.leaves)
    if kind == "bundle":
        run = BundleRun(Bundle.open(bundles("Qwen2", "f32")), "bundle", leaves=source.leaves)
    tokens = sequences((9, 5))
    plain = run.values(tokens)
    key, context = (ValueName("model.layers.1.self_attn", what) for what in ("key", "context"))  # type: ignore[arg-type]
    other = run.values(tokens, {key: plain[key][::-1].copy()})
    np.testing.assert_array_equal(other[key], plain[key])  # its own
    assert np.abs(other[context] - plain[context]).max() > 0.01
    before = ValueName("model.layers.0.self_attn", "context")
    np.testing.assert_array_equal(other[before], plain[before])


@pytest.mark.parametrize("recipe", ["int4-awq", "int4-gptq"])
def test_calibrated_recipes_agree_with_the_source(recipe: str) -> None:
    """AWQ scales channels on purpose, GPTQ chooses integers by what they give: neither is a fault."""
    model = tiny("Qwen2")[0]
    report = bisect(Given(model), Given(model), Options(recipe=recipe))
    assert report.first_divergence is None and report.values_compared > 45


def test_rotated_values_are_no_fault(tmp_path: Path) -> None:
    recipe = tmp_path / "rotated.toml"
    eight = 'storage = "int8", group_size = 32, activation = "int8", activation_group_size = 32'
    recipe.write_text(f'name = "rotated"\n[weights]\nrotate = true\ndefault = {{ {eight} }}\n', encoding="utf-8")
    model = tiny("Qwen2")[0]
    report = bisect(Given(model), Given(model), Options(recipe=str(recipe)))
    assert report.first_divergence is None and report.values_compared > 35


def test_experts() -> None:
    model = tiny("Mixtral", num_local_experts=4, num_experts_per_tok=2)[0]
    report = bisect(Given(model), Given(model), Options(recipe="int8"))
    # Of some values among the experts nobody can say what smoothing multiplied them by.
    assert report.first_divergence is None and report.values_compared > 35


def test_attention_over_a_rounded_cache_is_the_same_in_all_programs(bundles: Bundles, made: Made) -> None:
    """Keys that are given are rounded, fused with the rotation or not, and queries as kernels round them: with queries
    as long as a trained model's, what is left is the rounding of attention's weights, 2^-9."""
    source = SourceRun(tiny("Qwen2")[0], "source")
    tokens = sequences((37, 23))
    source_values = dict(source.values(tokens))
    for layer in range(2):
        query = ValueName(f"model.layers.{layer}.self_attn", "query")
        source_values[query] = source_values[query] * np.float32(24)
    bundle = BundleRun(Bundle.open(bundles("Qwen2", "int8-unscaled")), "bundle", leaves=source.leaves)
    stages = {stage.name: stage for stage in made.stages[id(tiny("Qwen2")[0]), "int8-unscaled"]}
    before, after = (
        ProgramRun(stages[name].program, name, leaves=source.leaves)
        for name in ("fuse_norm_quantize", "fuse_rope_kv_write")
    )
    values = [run.values(tokens, source_values) for run in (before, after, bundle)]
    for layer in range(2):
        name = ValueName(f"model.layers.{layer}.self_attn", "context")
        assert difference(values[0][name], values[1][name]).error < 1e-6
        assert difference(values[1][name], values[2][name]).error < 4e-3


def test_keys_that_are_given_go_to_both_caches(made: Made, tmp_path: Path) -> None:
    """Attention reads some of 400 tokens in 4 bits and the others in 8, fused with the rotation or not."""
    model = tiny("Qwen2")[0]
    source, recipe = SourceRun(model, "source"), with_cache(load_recipe("f32"), "k4v4")
    recipe = recipe.model_copy(update={"name": "k4v4"})
    tokens, captured = sequences((400, 23)), made.capture(model)
    stages = made.replay(model, captured, recipe, "cpu", calibration=None, scratch=tmp_path, progress=silent)
    bundle = Bundle.open(write_bundle(captured, recipe, stages[-1].program, tmp_path / "bundle"))
    of_stage = {stage.name: stage.program for stage in stages}
    runs = [
        *(
            ProgramRun(of_stage[name], name, leaves=source.leaves)
            for name in ("fuse_norm_quantize", "fuse_rope_kv_write")
        ),
        BundleRun(bundle, "bundle", leaves=source.leaves),
    ]
    source_values = source.values(tokens)
    before, after, stored = (run.values(tokens, source_values) for run in runs)
    for layer in range(2):
        path = f"model.layers.{layer}.self_attn"
        context, key = ValueName(path, "context"), ValueName(path, "key")
        assert difference(before[context], after[context]).error < 1e-6
        assert difference(after[context], stored[context]).error < 4e-3
        assert difference(after[key], stored[key]).error < 4e-3
