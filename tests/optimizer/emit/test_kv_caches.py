"""A target that lacks the KV cache of the recipe is refused by name, before the model is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.emit.kv_caches import check_cache
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import list_recipes, load_recipe, with_cache
from enginewright.plugins.shared.errors import RecipeError, TargetError


@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("target", ["onnx", "tensorrt-rtx", "tensorrt"])
def test_only_the_cpu_target_has_caches_of_fewer_bits(dtype: str, target: str) -> None:
    recipe = with_cache(load_recipe("int8"), dtype)
    check_cache(recipe, ("cpu",))
    with pytest.raises(TargetError, match=f"^target {target}: it has no KV cache of {dtype}, which recipe int8 asks"):
        check_cache(recipe, ("cpu", target))


def test_what_is_left_open_goes_with_every_target() -> None:
    for recipe in list_recipes():
        check_cache(recipe, ("cpu", "onnx", "tensorrt-rtx", "tensorrt"))
        check_cache(with_cache(recipe, "f32"), ("cpu", "onnx", "tensorrt-rtx", "tensorrt"))


def test_an_export_is_refused_before_the_source_is_opened(tmp_path: Path) -> None:
    source, bundle = tmp_path / "absent.gguf", tmp_path / "out.bundle"
    with pytest.raises(TargetError, match="target onnx: it has no KV cache of fp8"):
        export(source, bundle, targets=["onnx"], kv_cache="fp8")
    with pytest.raises(RecipeError, match="there is no KV-cache format 'int4'"):
        export(source, bundle, kv_cache="int4")
    assert not list(tmp_path.iterdir())
