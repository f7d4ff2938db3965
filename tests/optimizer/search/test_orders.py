"""Passes that change shapes, training and formats together: what docs/use/composing.md says goes, and what doesn't."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from enginewright.optimizer.bisect import Given, bisect
from enginewright.optimizer.bisect.bisection import EMISSION
from enginewright.optimizer.capture import capture
from enginewright.optimizer.export import export
from enginewright.optimizer.pipeline.pass_context import Recovered, pass_context
from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.sections import BudgetSection, CalibrationSection
from enginewright.optimizer.recover import FinishedRecovery, RecoverOptions, recover
from enginewright.optimizer.search.compose import Searching, search
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassRecord
from enginewright.passes.framework.kv_options import KvHeadsOverride, KvOptions
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pruning import Pruning
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.shared.errors import PassError, RecipeError
from enginewright.runtime.shared.progress import silent
from tests.conftest import make_tiny_model
from tests.optimizer.bisect.planting import Planting, scale_rows
from tests.optimizer.search.formats_prepared import random_tokens
from tests.optimizer.search.test_compose import smallest
from tests.passes.captured import captured

PRUNE, HEADS = Pruning(channels=0.5, layers=1), KvOptions(kv_heads=2)
PLAIN = KvOptions(kv_heads=2, method="mean", grouping="neighbours")
INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
TOKENS = random_tokens(48, 48, 48)


def recipe(**sections: object) -> Recipe:
    """Makes one of the two sections above and those given, held to a wide budget: a random model has nothing to
    spare."""
    small = {"budget": BudgetSection(max_kl=20.0), "calibration": CalibrationSection(tokens=256, sequence_length=32)}
    return Recipe.model_validate({"name": "mine", **small, "prune": PRUNE, "attention": HEADS, **sections})


def run(chosen: Recipe, family: str = "Llama", **sizes: object) -> tuple[Program, list[PassRecord]]:
    """A tiny model after the recipe's passes, each checked by the base class."""
    program = captured(family, **({"num_hidden_layers": 3, "num_key_value_heads": 4} | sizes))
    context = pass_context(chosen, frozenset(), TOKENS, scratch=None, progress=silent)
    return program, PassManager([p for p in default_pipeline() if p.wanted(context)], context).run(program)


def changed(records: list[PassRecord], *names: str) -> list[str]:
    """The passes among ``names`` that changed something, in the order in which they ran."""
    return [r.name for r in records if r.name in names and r.matched]


def test_group_and_prune_then_recover_then_4_bits(tmp_path: Path) -> None:
    model = make_tiny_model("Llama", num_hidden_layers=3, num_key_value_heads=4)
    options = RecoverOptions(steps=2, batch_tokens=64, sequence_length=32, sampled_tokens=512, threads=1)
    recover(model, tmp_path / "recovered", recipe=recipe(), options=options)
    path, weights = tmp_path / "m.bundle", WeightFormats(default=INT4, method="gptq")
    report = export(model, path, recovered=tmp_path / "recovered", recipe=recipe(weights=weights))
    order = ["drop_layers", "group_kv_heads", "prune_channels", "load_recovered", "apply_gptq", "quantize_linears"]
    assert [p.name for p in report.passes if p.name in order and p.matched] == order
    assert report.verification[0].random_tokens.kl_mean < 20
    (group,) = Bundle.open(path).program("cpu").cache_groups
    assert len(group.layers) == 2 and group.kv_heads == 2

    # The same weights with formats that are searched for: the shapes are those that were trained.
    trained = FinishedRecovery.open(tmp_path / "recovered")
    requested = trained.recipe_for(smallest(budget=BudgetSection(max_kl=20.0)))
    assert (requested.prune, requested.attention) == (PRUNE, HEADS) and requested.auto is not None
    sequences = trained.folder.tokens(trained.description.origin)[1]
    inputs = Searching(capture(model), sequences, None, None, silent, Recovered(trained.weights(), trained.recipe))
    result = search(requested, inputs)
    assert result.auto is not None and result.candidates == ()
    assert result.auto.shapes_kl > 0 and not result.recipe.searched
    with pytest.raises(RecipeError, match=r"prune is not what .* was trained for"):
        trained.recipe_for(recipe(prune=Pruning(channels=0.25), weights=weights))


def test_training_in_floats_beside_a_search_for_formats(tmp_path: Path) -> None:
    model = make_tiny_model("Llama", num_key_value_heads=4)
    options = RecoverOptions(steps=1, batch_tokens=64, sequence_length=32, sampled_tokens=512, threads=1)
    requested = smallest(prune=Pruning(channels=0.5), budget=BudgetSection(max_kl=20.0))
    recover(model, tmp_path / "recovered", recipe=requested, options=options)
    trained = FinishedRecovery.open(tmp_path / "recovered")
    assert trained.recipe_for(None) == requested and trained.recipe_for(requested) == requested
    # Channels are left for the groups of all candidates, as the export will have them too: 64 of 128.
    assert trained.folder.weights()["model.layers.0.mlp.down_proj.weight"].shape == (64, 64)


def test_layers_heads_groups_and_buckets_in_one_bundle(tmp_path: Path) -> None:
    model = make_tiny_model("Llama", num_hidden_layers=3, num_key_value_heads=4)
    chosen = recipe(
        prune=Pruning(drop=("model.layers.1",), heads=0.5),
        attention=KvOptions(kv_heads=1),
        buckets=BucketsSection(tokens=(32,), batch=(2,)),
    )
    path = tmp_path / "m.bundle"
    report = export(model, path, recipe=chosen)
    assert changed_in(report.passes, "drop_layers", "prune_heads", "group_kv_heads") == [
        "drop_layers",
        "prune_heads",
        "group_kv_heads",
    ]
    layers = sorted(layer for g in Bundle.open(path).program("cpu").cache_groups for layer in g.layers)
    assert len(layers) == 2
    with LLM(path, threads=1) as llm:
        assert llm.generate([[5, 9, 200, 31]])[0].token_ids
    # Wrong rows in it are found, and are called by the source's names.
    attention = f"model.layers.{layers[-1]}.self_attn"
    planting = Planting(path, tmp_path / "planted")
    scale_rows(planting, f"{attention}.q_proj+k_proj+v_proj.weight", 32, 48)  # behind 2 query heads: the one of keys
    divergence = bisect(Given(model), Given(planting.folder)).first_divergence
    assert divergence is not None and divergence.stage == EMISSION and divergence.layer == f"model.layers.{layers[-1]}"
    assert any(f"{attention}.k_proj.weight[" in tensor for tensor in divergence.tensors)


def changed_in(passes: list[object], *names: str) -> list[str]:
    """Says what ``changed`` does, of a report."""
    return [p.name for p in passes if p.name in names and p.matched]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sparse", "hidden", "channels"),
    [
        ({"storage": "f32"}, 64, 128),
        ({"storage": "bf16", "activation": "bf16"}, 128, 192),
        ({"storage": "int8", "group_size": 32, "activation": "int8", "activation_group_size": 32}, 64, 128),
        ({"storage": "int4", "group_size": 32, "activation": "int8", "activation_group_size": 32}, 128, 192),
    ],
)
def test_two_of_four_of_what_is_left(sparse: dict[str, object], hidden: int, channels: int) -> None:
    weights = {"default": {**sparse, "sparsity": "2:4"}, "sparsify": "magnitude"}
    shapes = {"prune": Pruning(channels=0.5, drop=("model.layers.1",), correct=False), "attention": PLAIN}
    program, records = run(recipe(weights=weights, **shapes), hidden_size=hidden, intermediate_size=channels)
    order = ["drop_layers", "group_kv_heads", "prune_channels", "select_sparsity_mask"]
    assert changed(records, *order) == order
    logits = program.evaluate(packed_inputs(program, TOKENS))[0]
    assert logits.shape[-1] == 256 and bool(torch.isfinite(logits).all())
    # Of each network's last matrix half of the channels is left, and of these two of every four.
    last = [e for n in program.weights if "mlp.down_proj.weight" in n and (e := program.weights[n]).shape[0] == hidden]
    values = [e.evaluate().float() for e in last if e.shape[-1] == channels // 2]
    assert len(values) == 2
    for value in values:
        assert int((value.view(hidden, -1, 4) != 0).sum(-1).max()) == 2


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        (
            recipe(
                prune=Pruning(drop=("model.layers.1",)),
                attention=KvOptions(overrides=(KvHeadsOverride(layers="model.layers.1.*", kv_heads=2),)),
            ),
            RecipeError,
            r"attention\.overrides: layers 'model\.layers\.1\.\*' matches no attention",
        ),
        (
            recipe(attention=KvOptions(kv_heads=3)),
            RecipeError,
            r"kv_heads is 3 for model\.layers\.\d\.self_attn, which does not divide its 4",
        ),
        (
            recipe(prune=Pruning(drop=("model.layers.9",))),
            RecipeError,
            r"prune\.drop: the pattern 'model\.layers\.9' matches nothing",
        ),
        (
            recipe(
                weights=WeightFormats(
                    overrides=(FormatOverride(layers="lm_head", format=WeightFormat(storage="f32", sparsity="2:4")),)
                )
            ),
            PassError,
            "an override gives it the sparsity 2:4, but its product gives the logits",
        ),
    ],
)
def test_what_takes_the_model_to_be_refused(chosen: Recipe, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(chosen)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (load_recipe("auto"), r"\[auto\] searches for formats, and training needs to know them"),
        (recipe(weights=WeightFormats(default=INT4, method="gptq")), r"weights\.method 'gptq'"),
        (recipe(weights=WeightFormats(keep_blocks=True), prune=None, attention=None), r"weights\.keep_blocks"),
        (load_recipe("f32"), "it changes nothing that could be recovered"),
    ],
)
def test_what_training_refuses(chosen: Recipe, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        recover("no model is looked at", tmp_path / "recovered", recipe=chosen)
    assert caught.value.hint
