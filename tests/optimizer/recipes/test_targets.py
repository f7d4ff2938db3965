"""The table of targets: a target, or a GPU, that lacks a format of the recipe is refused by name, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.capture import capture
from enginewright.optimizer.capture.model_source import ModelSource
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, list_recipes, load_recipe, with_cache
from enginewright.optimizer.recipes.sections import AutoSection, BudgetSection
from enginewright.optimizer.recipes.targets import TARGETS, check_cache, check_context, check_layers, check_storages
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.kv_options import ContextOptions
from enginewright.passes.framework.weight_formats import FormatOverride, WeightFormats
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.runtime.executors import open as runtime_half
from enginewright.runtime.shared.errors import RecipeError, TargetError, UnsupportedModelError
from enginewright.runtime.shared.targets import MEASURED, OWN
from tests.acceptance.test_families import saved
from tests.acceptance.tiny_configs import tiny_family

FP8, F32 = WeightFormat(storage="fp8"), WeightFormat()
AUTO = Recipe(name="x", budget=BudgetSection(max_kl=0.1), auto=AutoSection(candidates=(F32, FP8)))


@pytest.mark.parametrize(
    "recipe",
    [
        load_recipe("fp8"),
        Recipe(name="x", weights=WeightFormats(embeddings=FP8)),
        Recipe(name="x", weights=WeightFormats(overrides=(FormatOverride(layers="*", format=FP8),))),
        AUTO,
    ],
)
def test_wherever_a_recipe_names_8_bit_floats(recipe: Recipe) -> None:
    check_storages(recipe, ("cpu", "onnx"))
    with pytest.raises(TargetError, match=r"has no fp8, which begins with 8\.9"):
        check_storages(recipe, ("cpu", "tensorrt-rtx"))


def test_an_export_is_refused_before_the_source_is_opened(tmp_path: Path) -> None:
    (damaged := tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    with pytest.raises(TargetError, match=r"has no fp8, which begins with 8\.9"):
        export(damaged, tmp_path / "out.bundle", recipe="fp8", targets=["tensorrt-rtx"])
    assert list(tmp_path.iterdir()) == [damaged]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model whose layer 0 is recurrent, and whose layer 3 attends."""
    return saved(tiny_family("qwen3_next"), tmp_path_factory.mktemp("hybrid") / "saved")


def test_every_target_takes_recurrent_layers_or_refuses_them_by_name(hybrid: Path) -> None:
    program = capture(ModelSource(hybrid)).program
    check_layers(program, [name for name in OWN if TARGETS[name].states])
    refusing = [name for name in OWN if not TARGETS[name].states]
    assert set(OWN) - set(refusing) == {"cpu", "cuda"}
    for name in refusing:
        with pytest.raises(UnsupportedModelError, match=f"layer 0 of the model is recurrent, and target {name} has no"):
            check_layers(program, (MEASURED, name))


@pytest.mark.parametrize("target", ["onnx", "stablehlo", "tvm", "tensorrt", "tensorrt-rtx"])
def test_recurrent_layers_are_refused_before_any_pass(hybrid: Path, tmp_path: Path, target: str) -> None:
    stages = []
    with pytest.raises(UnsupportedModelError, match=f"target {target} has no kernels for its state"):
        export(
            hybrid,
            tmp_path / "out.bundle",
            recipe="f32",
            targets=["cpu", target],
            progress=lambda event: stages.append(event.stage),
        )
    assert set(stages) == {"capture"} and not list(tmp_path.iterdir())


def test_gpus_without_8_bit_floats() -> None:
    recipe = load_recipe("fp8")
    for gpus, lacking in ((("8.0",), "8.0"), (("8.6", "8.9"), "8.6"), ((), "8.0, 8.6")):
        requested = recipe.model_copy(update={"engines": EnginesSection(gpus=gpus)} if gpus else {})
        with pytest.raises(TargetError, match=f"compute capability {lacking} has no fp8, which begins with 8.9"):
            check_storages(requested, ("onnx", "tensorrt-rtx"))
        check_storages(requested, ("onnx",))
    able = recipe.model_copy(update={"engines": EnginesSection(gpus=("8.9", "12.0"))})
    check_storages(able, ("onnx", "tensorrt-rtx"))


def test_gpus_without_4_bits_and_gpus_without_engines() -> None:
    recipe = load_recipe("int4")
    old, other = (recipe.model_copy(update={"engines": EnginesSection(gpus=(gpu,))}) for gpu in ("7.5", "9.0"))
    with pytest.raises(TargetError, match=r"compute capability 7\.5 has no int4, which begins with 8\.0"):
        check_storages(old, ("cpu", "tensorrt-rtx"))
    with pytest.raises(TargetError, match=r"TensorRT-RTX builds no engine for compute capability 9\.0"):
        check_storages(other, ("tensorrt-rtx",))
    check_storages(other, ("cpu", "onnx", "tensorrt"))


def test_every_built_in_recipe_names_targets_that_can_make_it() -> None:
    for recipe in list_recipes():
        check_storages(recipe, recipe.targets)


@pytest.mark.parametrize(
    "weight_format",
    [
        WeightFormat(storage="int6", activation="int8", group_size=16, activation_group_size=16),
        WeightFormat(storage="int4", activation="int8", group_size=32, activation_group_size=32, scale_block=8),
        WeightFormat(storage="int8", activation="int8", group_size=16, activation_group_size=16),
    ],
    ids=str,
)
def test_formats_that_not_every_target_reads(weight_format: WeightFormat) -> None:
    recipe = Recipe(name="mine", weights=WeightFormats(default=weight_format))
    check_storages(recipe, ["cpu"])
    for target in ("onnx", "tvm", "cuda"):
        with pytest.raises(TargetError, match=f"target {target}: it has no kernels for {weight_format}, .* in weights"):
            check_storages(recipe, ["cpu", target])


def test_both_halves_know_the_same_targets() -> None:
    assert tuple(TARGETS) == tuple(runtime_half.TARGETS)
    assert all(target.emitter.name == name for name, target in TARGETS.items())
    assert runtime_half.running() == ("cpu", "onnx", "tensorrt-rtx", "tensorrt", "cuda", "stablehlo", "tvm")


@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize(
    ("target", "engines", "scaled", "why"),
    [
        ("onnx", {}, False, ""),
        ("stablehlo", {}, False, ""),
        ("tensorrt-rtx", {}, False, r": engines of the whole model have none; segments do \(form in \[engines\]\)"),
        ("tensorrt-rtx", {"form": "segments"}, True, ""),
        ("tensorrt", {}, True, ""),
        ("tensorrt", {"caches": "ordered"}, False, r': writes that are "ordered" have none'),
    ],
)
def test_caches_of_fewer_bits(dtype: str, target: str, engines: dict[str, str], scaled: bool, why: str) -> None:
    section = EnginesSection.model_validate(engines)
    recipe = with_cache(load_recipe("int8"), dtype).model_copy(update={"engines": section})
    check_cache(recipe, ("cpu", "cuda"))
    if scaled and dtype != "bf16":
        check_cache(recipe, ("cpu", target))
        return
    message = f"^target {target}: it has no KV cache of {dtype}, which recipe int8 asks for .kv_cache.dtype."
    with pytest.raises(TargetError, match=message + (why if dtype != "bf16" else "\n")):
        check_cache(recipe, ("cpu", target))


@pytest.mark.parametrize("target", ["onnx", "stablehlo", "cuda", "tensorrt", "tensorrt-rtx", "tvm"])
def test_only_the_cpu_target_has_an_adaptive_context(target: str) -> None:
    recipe = load_recipe("int8")
    check_context(recipe, ("cpu", target))
    recipe = recipe.model_copy(update={"adaptive_context": ContextOptions(best=1024)})
    check_context(recipe, ("cpu",))
    with pytest.raises(
        TargetError, match=f"^target {target}: its attention looks at the whole context, and recipe int8"
    ):
        check_context(recipe, ("cpu", target))


def test_tensorrt_has_fp8_caches_where_gpus_have_fp8() -> None:
    recipe = with_cache(load_recipe("f32"), "fp8").model_copy(update={"engines": EnginesSection(gpus=("8.0", "8.9"))})
    with pytest.raises(TargetError, match=r"compute capability 8\.0 has no fp8"):
        check_storages(recipe, ("tensorrt",))
    check_storages(recipe, ("cuda", "tensorrt-rtx"))  # kernels of ours convert it by its bits
    check_storages(with_cache(recipe, "int8"), ("tensorrt",))


def test_what_is_left_open_goes_with_every_target() -> None:
    for recipe in list_recipes():
        check_cache(recipe, ("cpu", "onnx", "tensorrt-rtx", "tensorrt", "stablehlo"))
        check_cache(with_cache(recipe, "f32"), ("cpu", "onnx", "tensorrt-rtx", "tensorrt", "stablehlo"))


def test_an_export_without_its_cache_is_refused_before_the_source_is_opened(tmp_path: Path) -> None:
    source, bundle = tmp_path / "damaged.gguf", tmp_path / "out.bundle"
    source.write_bytes(b"GGUF")
    with pytest.raises(TargetError, match="target onnx: it has no KV cache of fp8"):
        export(source, bundle, targets=["onnx"], kv_cache="fp8")
    with pytest.raises(RecipeError, match="there is no KV-cache format 'int4'"):
        export(source, bundle, kv_cache="int4")
    assert list(tmp_path.iterdir()) == [source]
