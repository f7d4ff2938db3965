from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

import enginewright
from enginewright.optimizer.plan.planner import _of_bundle, planned_model
from enginewright.optimizer.plan.programs import PlannedModel
from enginewright.optimizer.recipes.recipe import list_recipes
from enginewright.plugins.cuda.compile import emitter
from enginewright.plugins.gpu.compile_workers import KernelCompiler
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.errors import BundleError, RecipeError, SourceError
from enginewright.runtime.shared.step_costs import StepSizes, step_costs, stored_bytes
from tests.plugins.engines.tiny_paged import compile_kernel


@pytest.fixture(scope="module")
def only_config(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama's folder without weights and tokenizer."""
    folder = tmp_path_factory.mktemp("config") / "tiny"
    folder.mkdir()
    shutil.copy(tiny_folder / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def planned(only_config: Path) -> PlannedModel:
    return planned_model(only_config, [])


def test_the_configuration_alone_gives_the_program_that_an_export_writes(
    planned: PlannedModel, tiny_folder: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    """Steps, weights with their layouts, caches and the arena: to the byte."""
    programs = {name: p.program for p in planned.programs for name in p.recipes}
    assert programs["f32"] == Bundle.open(tiny_bundle).programs["cpu"]
    enginewright.export(tiny_folder, tmp_path / "int8.bundle", recipe="int8", targets=["cpu"])
    assert programs["int8"] == Bundle.open(tmp_path / "int8.bundle").programs["cpu"]


def test_every_recipe_has_its_place(planned: PlannedModel) -> None:
    by_name = {name: p for p in planned.programs for name in p.recipes}
    assert set(by_name) == {recipe.name for recipe in list_recipes()}
    assert by_name["int4"] is by_name["int4-awq"] is by_name["int4-gptq"]
    assert len(by_name["int4"].recipes) == 3
    for name, why in (("auto", "a search"), ("smallest", "a search"), ("gguf", "no weight of this model is stored")):
        assert by_name[name].program is None and why in by_name[name].omitted
    assert by_name["fp8"].formats >= {"fp8", "bf16"} and by_name["f32"].formats == frozenset()
    assert "int4" in by_name["int4"].formats
    assert planned.info.vocab_size and planned.info.context_length == 512 and planned.info.parameters > 0


def test_recipes_that_depend_on_weights(only_config: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "pruned.toml"
    recipe.write_text('name = "pruned"\n[prune]\nchannels = 0.5\n')
    (one,) = planned_model(only_config, [recipe]).programs
    assert one.program is None and "takes parts of the model out" in one.omitted


def test_a_model_that_cannot_be_planned(only_config: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no weight of this model is stored in blocks"):
        planned_model(only_config, ["gguf"])  # the only one: nothing else is left to plan
    with pytest.raises(RecipeError, match="there is no recipe 'int9'"):
        planned_model(only_config, ["int9"])
    with pytest.raises(SourceError, match="doesn't exist"):
        planned_model(tmp_path / "nowhere", [])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(SourceError, match="model_type is missing"):
        planned_model(tmp_path / "empty", [])


def test_a_bundle_has_its_own_recipe(tiny_bundle: Path) -> None:
    (one,) = planned_model(tiny_bundle, []).programs
    assert one.recipes == ("f32",) and one.program == Bundle.open(tiny_bundle).programs["cpu"]
    with pytest.raises(BundleError, match="has the recipe that it was exported with"):
        planned_model(tiny_bundle, ["int8"])


@pytest.mark.parametrize(("recipe", "bytes_of"), [("int8", 1), ("bf16", 2), ("f32", 2)])
def test_gpus_are_planned_with_the_cuda_target_s_program(
    recipe: str, bytes_of: int, only_config: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte what an export writes: weights in rows, activations and caches of 16 bits."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[cuda]'")
    monkeypatch.setattr(emitter, "KernelCompiler", partial(KernelCompiler, compiler=compile_kernel))
    path = tmp_path / "b"
    enginewright.export(tiny_folder, path, recipe=recipe, targets=["cpu", "cuda"], gpus=["9.0"])
    bundle = Bundle.open(path)
    of_config, of_bundle = planned_model(only_config, [recipe], targets=("cpu", "cuda")), planned_model(path, [])
    for model in (of_config, of_bundle):
        (on_gpu,), (here,) = model.programs_on(gpu=True), model.programs_on(gpu=False)
        assert (on_gpu.program, here.program) == (bundle.programs["cuda"], bundle.programs["cpu"])
        assert (on_gpu.target, here.target) == ("cuda", "cpu") and on_gpu.formats == {"bf16"}
    program = bundle.programs["cuda"]
    assert sum(map(stored_bytes, program.weights)) == sum(bundle.weight(use.name).nbytes for use in program.weights)
    tokens, linear = 3, next(step for step in program.steps if step.op.endswith("linear"))
    (cost,) = step_costs(program.model_copy(update={"steps": (linear,)}), StepSizes((1,) * tokens, (40,) * tokens))
    n, k = next(use.shape for use in program.weights if use.name == linear.inputs[1].name)
    assert (cost.activations_read, cost.activations_written) == (2 * tokens * k, 2 * tokens * n)
    assert bytes_of * n * k <= cost.weights < bytes_of * n * k * 1.2 and cost.multiply_adds == tokens * n * k
    group = program.cache_groups[0]
    assert cache_block_bytes(group) == 2 * 2 * group.kv_heads * group.key_head_size * 32 * len(group.layers)


def test_recipes_that_gpus_run_alike_are_one(only_config: Path) -> None:
    model = planned_model(only_config, ["f32", "bf16", "fp8"], targets=("cuda",))
    assert [p.recipes for p in model.programs_on(gpu=True)] == [("f32", "bf16"), ("fp8",)]
    assert {p.formats for p in model.programs} == {frozenset({"bf16"})}  # fp8's bits are converted where need be


def test_a_bundle_without_a_lowered_program(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    bundle.entries.clear()
    with pytest.raises(BundleError, match=r"none of the bundle's targets \(cpu\) has a lowered program") as error:
        _of_bundle(bundle, [])
    assert "--target cpu" in str(error.value.hint)
