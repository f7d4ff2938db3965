from __future__ import annotations

import os
from pathlib import Path

import pytest

from enginewright.optimizer.pipeline.pass_context import needs_tokens
from enginewright.optimizer.recipes.recipe import TARGETS, Recipe, list_recipes, load_recipe, recipe_text, with_cache
from enginewright.optimizer.recipes.sections import DEFAULT_CACHE
from enginewright.optimizer.recipes.stored import to_toml
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.kv_options import CacheOptions
from enginewright.passes.framework.weight_formats import FormatOverride, GptqOptions, WeightFormats
from enginewright.plugins.tvm.recipe import TvmOptions
from enginewright.runtime.shared.errors import RecipeError


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def failure(folder: Path, text: str) -> RecipeError:
    path = write(folder, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(path) in caught.value.message
    return caught.value


def test_the_built_in_recipe_is_float_throughout() -> None:
    recipe = load_recipe("f32")
    assert recipe.name == "f32"
    assert recipe.targets == ("cpu",)
    assert recipe.weights.default == WeightFormat()
    assert recipe.kv_cache.dtype == "f32"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int8", WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)),
        ("bf16", WeightFormat(storage="bf16", activation="bf16")),
    ],
)
def test_the_built_in_recipes_of_narrow_formats(name: str, expected: WeightFormat) -> None:
    recipe = load_recipe(name)
    assert recipe.weights == WeightFormats(default=expected, smooth=name == "int8")
    assert not recipe.exact
    assert needs_tokens(recipe, recipe.targets) == recipe.weights.smooth


@pytest.mark.parametrize(("name", "method"), [("int4", "nearest"), ("int4-gptq", "gptq"), ("int4-awq", "awq")])
def test_the_built_in_recipes_of_4_bits(name: str, method: str) -> None:
    recipe = load_recipe(name)
    four = WeightFormat(storage="int4", group_size=64, zero_point=True, activation="int8", activation_group_size=64)
    eight = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)
    formats = recipe.weights
    assert (formats.default, formats.embeddings, formats.overrides) == (four, eight, ())
    assert (formats.method, formats.smooth) == (method, True)
    assert recipe.budget.max_kl == 0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int3", "int3-g64-zp-b8-a:int8:g64"),
        ("q4_k", "int4-g32-zp-b8-a:int8:g32"),
        ("mxfp4", "fp4-g32-a:int8:g32"),
        ("nvfp4", "fp4-g16-b16-a:int8:g16"),
    ],
)
def test_the_built_in_recipes_of_formats_that_files_have(name: str, expected: str) -> None:
    weights = load_recipe(name).weights
    assert (str(weights.default), weights.method, weights.keep_blocks) == (expected, "gptq", False)


def test_auto_chooses_among_all_formats() -> None:
    auto = load_recipe("auto").auto
    assert auto is not None and auto.candidates is None


def test_the_built_in_recipe_of_a_files_own_integers() -> None:
    formats = load_recipe("gguf").weights
    assert formats == load_recipe("int8").weights.model_copy(update={"keep_blocks": True, "smooth": False})


def test_a_files_own_integers_are_not_scaled(tmp_path: Path) -> None:
    error = failure(tmp_path, 'name = "mine"\n[weights]\nkeep_blocks = true\nsmooth = true\n')
    assert "smooth scales weights: leave one out" in error.message


def test_the_built_in_recipe_of_8_bit_floats() -> None:
    recipe = load_recipe("fp8")
    assert recipe.targets == ("onnx",)
    bf16 = WeightFormat(storage="bf16", activation="bf16")
    assert recipe.weights == WeightFormats(default=WeightFormat(storage="fp8"), embeddings=bf16)
    assert recipe.rounded


def test_every_built_in_recipe_loads_under_its_own_name() -> None:
    recipes = list_recipes()
    assert "f32" in [r.name for r in recipes]
    for recipe in recipes:
        assert load_recipe(recipe.name) == recipe
        assert recipe.description
        assert f'name = "{recipe.name}"' in recipe_text(recipe.name)


def test_a_recipe_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'name = "mine"\n[weights]\ndefault = { storage = "f32" }\n'
        '[[weights.overrides]]\nlayers = "*.down_proj"\nformat = { storage = "f32" }\n[passes]\nfuse_qkv = false\n',
    )
    recipe = load_recipe(str(path))
    assert recipe.weights.overrides[0].layers == "*.down_proj"
    assert recipe.passes == {"fuse_qkv": False}


def test_a_table_of_a_target_is_its_packages(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, 'name = "mine"\n[tvm]\nlevels = ["v3"]\n'))
    assert recipe.target_tables() == (TvmOptions(levels=("v3",)),)
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe
    assert load_recipe(write(tmp_path, to_toml(recipe))) == recipe
    plain = load_recipe("f32")
    assert plain.target_tables() == ()
    assert {name: plain.model_dump()[name] for name in ("onnx", "stablehlo", "tvm")} == dict.fromkeys(
        ("onnx", "stablehlo", "tvm")
    )
    assert "tvm" not in to_toml(plain)


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe("f32").name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "line", "key", "hint"),
    [
        ('nam = "x"\n', 1, "nam", "Did you mean 'name'?"),
        ('name = "x"\nwieghts = 3\n', 2, "wieghts", "Did you mean 'weights'?"),
        ('name = "x"\n\n[kv_cache]\ndtyp = "f32"\n', 4, "kv_cache.dtyp", "Did you mean 'dtype'?"),
        ('name = "x"\n[weights.default]\nstorge = "f32"\n', 3, "weights.default.storge", "Did you mean 'storage'?"),
        ('name = "x"\n[weights]\ndefault = { zzz = 1 }\n', 3, "weights.default.zzz", "Known keys: storage"),
        ('name = "x"\n[tvm]\nkernls = 1\n', 3, "tvm.kernls", "Did you mean 'kernels'?"),
        ('name = "x"\n[tvn]\nkernels = 1\n', 2, "tvn", "Did you mean 'tvm'?"),
        ('name = "x"\n[cuda]\nkernels = 1\n', 2, "cuda", "Known keys: name"),
        (
            'name = "x"\n[[weights.overrides]]\nlayers = "a"\nformat = {}\n'
            '[[weights.overrides]]\nlayer = "b"\nlayers = "b"\nformat = {}\n',
            6,
            "weights.overrides.1.layer",
            "Did you mean 'layers'?",
        ),
    ],
)
def test_an_unknown_key_is_named_with_its_line(tmp_path: Path, text: str, line: int, key: str, hint: str) -> None:
    error = failure(tmp_path, text)
    assert f":{line}: {key}: unknown key" in error.message
    assert error.hint is not None
    assert hint in error.hint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('storage = "int8"', "storage 'int8' goes with activation 'int8', not 'float'"),
        ('storage = "bf16"', "storage 'bf16' goes with activation 'bf16', not 'float'"),
        ('activation = "int8"', "storage 'f32' goes with activation 'float', not 'int8'"),
        (
            'storage = "bf16", activation = "bf16", group_size = 32',
            "group_size is 32, but storage 'bf16' has no scales",
        ),
        ("activation_group_size = 32", "activation_group_size is 32, but storage 'f32' has no scales"),
        (
            'storage = "int8", activation = "int8", group_size = 48',
            "group_size is 48, which can't be made for int8, only 0, 16, 32, 64",
        ),
        (
            'storage = "int4", activation = "int8", activation_group_size = 32',
            "group_size is 0 and activation_group_size 32: for int4 they must be the same",
        ),
        (
            'storage = "int4", activation = "int8", group_size = 256, activation_group_size = 256',
            "group_size is 256, which can't be made for int4, only 0, 16, 32, 64, 128",
        ),
        (
            'storage = "int8", activation = "int8", group_size = 128',
            "group_size is 128, which can't be made for int8, only 0, 16, 32, 64",
        ),
        (
            'storage = "int4", activation = "int8", group_size = 128',
            "group_size is 128 and activation_group_size 0: for int4 they must be the same",
        ),
        ('storage = "int4"', "storage 'int4' goes with activation 'int8', not 'float'"),
        (
            'storage = "int8", activation = "int8", group_size = 32, activation_group_size = 64',
            "group_size is 32 and activation_group_size 64: where both are not 0 they must be the same",
        ),
        (
            'storage = "int8", activation = "int8", zero_point = true',
            "zero_point can't be true for storage 'int8', only for 'int4'",
        ),
        ("zero_point = true", "zero_point can't be true for storage 'f32'"),
        (
            'storage = "int6", activation = "int8", group_size = 16, activation_group_size = 16, zero_point = true',
            "zero_point can't be true for storage 'int6', only for 'int4', 'int5'",
        ),
        (
            'storage = "int4", activation = "int8", group_size = 32, activation_group_size = 32, scale_block = 4',
            "scale_block is 4, and can be 0, 8, 16",
        ),
        ('storage = "bf16", activation = "bf16", scale_block = 8', "scale_block is 8, but there are no groups"),
        (
            'storage = "int4", activation = "int8", group_size = 32, activation_group_size = 32, scale_block = 8, '
            'sparsity = "2:4"',
            "scale_block can't go with sparsity '2:4'",
        ),
        ('storage = "fp8", activation = "fp8"', "storage 'fp8' goes with activation 'float', not 'fp8'"),
        ('storage = "fp8", group_size = 48', "group_size is 48, which can't be made for fp8, only 0, 32, 64"),
        (
            'storage = "fp8", group_size = 32, activation_group_size = 32',
            "activation_group_size is 32, but storage 'fp8' is multiplied with floats as they are",
        ),
        ('storage = "fp8", zero_point = true', "zero_point can't be true for storage 'fp8', only for 'int4'"),
        ('storage = "fp8", sparsity = "2:4"', "sparsity '2:4' can't be made for storage 'fp8' yet"),
        (
            'storage = "int4", activation = "int8", group_size = 32, activation_group_size = 32, zero_point = true, '
            'sparsity = "2:4"',
            "sparsity '2:4' can't have zero_point = true",
        ),
    ],
)
@pytest.mark.parametrize("override", [False, True])
def test_formats_that_do_not_fit_together(tmp_path: Path, text: str, expected: str, override: bool) -> None:
    if override:
        start = 'name = "x"\n[[weights.overrides]]\nlayers = "*"\n'
        error = failure(tmp_path, f"{start}format = {{ {text} }}\n")
        assert f":4: weights.overrides.0.format: {expected}" in error.message
    else:
        error = failure(tmp_path, f'name = "x"\n[weights]\ndefault = {{ {text} }}\n')
        assert f":3: weights.default: {expected}" in error.message


INT4 = '{ storage = "int4", group_size = 32, zero_point = true, activation = "int8", activation_group_size = 32 }'


@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_groups_of_4_bits(tmp_path: Path, group: int) -> None:
    text = f'storage = "int4", activation = "int8", group_size = {group}, activation_group_size = {group}'
    (tmp_path / "x.toml").write_text(f'name = "x"\n[weights]\ndefault = {{ {text} }}\n')
    recipe = load_recipe(tmp_path / "x.toml")
    assert recipe.weights.default == WeightFormat(
        storage="int4", group_size=group, zero_point=False, activation="int8", activation_group_size=group
    )
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe


def test_what_else_weights_may_say(tmp_path: Path) -> None:
    default = load_recipe(write(tmp_path, 'name = "x"\n')).weights
    assert (default.embeddings, default.keep_blocks, default.method) == (None, False, "nearest")
    text = f'name = "x"\n[weights]\ndefault = {INT4}\nembeddings = {{ storage = "f32" }}\nkeep_blocks = true\n'
    recipe = load_recipe(write(tmp_path, text))
    expected = WeightFormat(storage="int4", group_size=32, zero_point=True, activation="int8", activation_group_size=32)
    assert recipe.weights == WeightFormats(
        default=expected, overrides=(), embeddings=WeightFormat(), keep_blocks=True, method="nearest"
    )


def test_how_gptq_goes_through_columns(tmp_path: Path) -> None:
    text = f'name = "x"\n[weights]\ndefault = {INT4}\nmethod = "gptq"\n'
    plain = load_recipe(write(tmp_path, text))
    assert plain.weights.gptq is None and GptqOptions() == GptqOptions(damping=0.1, activation_order=True)
    gptq = load_recipe(write(tmp_path, f"{text}gptq = {{ damping = 0.5, activation_order = false }}\n"))
    assert gptq.weights.gptq == GptqOptions(damping=0.5, activation_order=False)
    assert load_recipe(write(tmp_path, to_toml(gptq))) == gptq


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gptq = { damping = 0.5 }", "gptq has options of method = \"gptq\", and the method is 'nearest'"),
        ('method = "gptq"\ngptq = { damping = 0 }', ":4: weights.gptq.damping: Input should be greater than 0"),
        ('method = "gptq"\ngptq = { order = 1 }', "weights.gptq.order: unknown key"),
        ("embeddings = { storge = 1 }", ":3: weights.embeddings.storge: unknown key"),
        ('embeddings = { storage = "int4" }', ":3: weights.embeddings: storage 'int4' goes with activation 'int8'"),
        ('keep_blocks = "yes"', ":3: weights.keep_blocks: it must be true or false"),
        ('method = "best"', ":3: weights.method: Input should be 'nearest'"),
    ],
)
def test_weights_that_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in failure(tmp_path, f'name = "x"\n[weights]\n{text}\n').message


def test_overrides_keep_their_order(tmp_path: Path) -> None:
    text = 'name = "x"\n'
    for layers, storage in (("*.a", "bf16"), ("*", "f32")):
        activation = ', activation = "bf16"' if storage == "bf16" else ""
        text += f'[[weights.overrides]]\nlayers = "{layers}"\nformat = {{ storage = "{storage}"{activation} }}\n'
    formats = load_recipe(write(tmp_path, text)).weights
    assert formats.overrides == (
        FormatOverride(layers="*.a", format=WeightFormat(storage="bf16", activation="bf16")),
        FormatOverride(layers="*", format=WeightFormat()),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'name = "x"\n[kv_cache]\ndtype = "i8"\n',
            ":3: kv_cache.dtype: 'i8' can't be made for a KV cache yet, only f32, bf16, int8, fp8, k8v8, "
            "k8v4, k6v4, k5v4, k4v4",
        ),
        (
            'name = "x"\ntargets = ["hexagon"]\n',
            f":2: targets: 'hexagon' can't be made for a target yet, only {', '.join(TARGETS)} (recipes: auto, bf16,",
        ),
    ],
)
def test_what_cannot_be_made_yet_says_what_can_be(tmp_path: Path, text: str, expected: str) -> None:
    error = failure(tmp_path, text)
    assert expected in error.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("description = 'no name'\n", "name: this key is missing"),
        ('name = "x"\n[weights]\ndefault = { group_size = -1 }\n', ":3: weights.default.group_size:"),
        ('name = "x"\n[weights]\ndefault = { storage = "nvfp4" }\n', ":3: weights.default.storage: Input should be"),
        ('name = "x"\ntargets = []\n', ":2: targets: it must not be empty"),
        ('name = "x"\ntargets = "cpu"\n', ":2: targets: it must be a list"),
        ('name = "x"\nweights = 3\n', ":2: weights: it must be a table"),
        ('name = "x"\n[passes]\nfuse_qkv = "no"\n', ":3: passes.fuse_qkv: it must be true or false"),
        ("name = \n", "not TOML"),
    ],
)
def test_a_bad_value_names_its_key(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in failure(tmp_path, text).message


def test_unknown_names_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe 'f23'") as caught:
        load_recipe("f23")
    assert caught.value.hint == "Did you mean 'f32'?"
    with pytest.raises(RecipeError, match=r"absent\.toml: can't read"):
        load_recipe(tmp_path / "absent.toml")
    with pytest.raises(RecipeError, match="no recipe"):
        recipe_text("nothing")
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(binary)


def test_the_schema_alone_accepts_what_toml_would() -> None:
    assert Recipe(name="x") == Recipe.model_validate({"name": "x", "targets": ["cpu"]})


def test_the_budget(tmp_path: Path) -> None:
    assert Recipe(name="x").budget.max_kl is None
    assert load_recipe(write(tmp_path, 'name = "x"\n[budget]\nmax_kl = 0.01\n')).budget.max_kl == 0.01
    for wrong in ("0", "-1.0", "inf", "nan"):
        assert ":3: budget.max_kl:" in failure(tmp_path, f'name = "x"\n[budget]\nmax_kl = {wrong}\n').message


def test_a_recipe_is_exact_if_nothing_loses_precision() -> None:
    assert load_recipe("f32").exact
    lossy = WeightFormat(storage="int8", activation="int8")
    assert not Recipe(name="x", weights=WeightFormats(default=lossy)).exact
    override = FormatOverride(layers="*.down_proj", format=lossy)
    assert not Recipe(name="x", weights=WeightFormats(overrides=(override,))).exact
    assert not Recipe(name="x", weights=WeightFormats(embeddings=lossy)).exact
    assert not Recipe(name="x", weights=WeightFormats(keep_blocks=True)).exact, "activations are rounded"
    assert not Recipe(name="x", kv_cache=CacheOptions(dtype="bf16")).exact


def test_the_kv_cache_of_a_recipe() -> None:
    named = {d: Recipe(name="x", kv_cache=CacheOptions(dtype=d)).cache for d in ("f32", "bf16", "int8", "fp8")}
    assert named == {"f32": "f32", "bf16": "bf16", "int8": "i8", "fp8": "fp8"}
    assert Recipe(name="x").cache == "f32", "exact weights have exact caches"
    assert load_recipe("int8").cache == load_recipe("auto").cache == DEFAULT_CACHE
    assert load_recipe("f32").cache == "f32"


def test_another_kv_cache_for_a_recipe() -> None:
    recipe = load_recipe("f32")
    assert with_cache(recipe, "int8").cache == "i8"
    assert recipe.cache == "f32"
    with pytest.raises(RecipeError, match="there is no KV-cache format 'bf61'") as caught:
        with_cache(recipe, "bf61")
    assert caught.value.hint == "Did you mean 'bf16'?"


_AUTO = """
[auto]
candidates = [
    { storage = "int4", group_size = 32, activation = "int8", activation_group_size = 32 },
    { storage = "bf16", activation = "bf16" },
]
"""


def test_formats_may_be_chosen_automatically(tmp_path: Path) -> None:
    text = 'name = "x"\n[budget]\nmax_kl = 0.02\nmax_bytes = 1_000_000\n' + _AUTO
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    recipe = load_recipe(path)
    assert recipe.auto is not None
    assert [f.storage for f in recipe.auto.candidates] == ["int4", "bf16"]
    assert (recipe.auto.tokens, recipe.budget.max_bytes, recipe.exact) == (256, 1_000_000, False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_AUTO, "[auto] needs a budget: max_kl, max_bytes or max_ms_per_token"),
        ("[budget]\nmax_ms_per_token = 0\n" + _AUTO, "budget.max_ms_per_token: Input should be greater than 0"),
        ('[budget]\ndevice = "H100"\n', "device says where max_ms_per_token counts"),
        (
            "[budget]\nmax_kl = 0.1\n[weights]\nkeep_blocks = true\n" + _AUTO,
            "leave all but the method out of [weights]",
        ),
        ("[budget]\nmax_bytes = 0\n" + _AUTO, "budget.max_bytes: Input should be greater than 0"),
        ("[budget]\nmax_kl = 0.1\n[auto]\ncandidates = []\n", "auto.candidates: it must not be empty"),
        ('[weights]\nmethod = "awq"\n', "chooses integers of int4, which no format here has"),
        ('[weights]\nsparsify = "wanda"\n', "sparsify 'wanda' is for formats of sparsity '2:4', which none here is"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in failure(tmp_path, f'name = "x"\n{text}').message


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.toml")
    with pytest.raises(RecipeError, match="can't read the recipe: it is a pipe, not a regular file"):
        load_recipe(tmp_path / "recipe.toml")
