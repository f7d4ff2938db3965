"""Every stored tensor is compared with the one that the export would write, whatever tokens a run has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from enginewright.optimizer.bisect import BisectReport, Given, Options, TensorDifference, bisect
from enginewright.optimizer.bisect.stored_tensors import compare_bundles, compare_with_export, other_versions
from enginewright.optimizer.capture import CapturedModel
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.passes.lowering.lower_program import Lowering, lower_program
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.shared.progress import silent
from tests.optimizer.bisect.conftest import Made
from tests.optimizer.bisect.planting import Array, Bundles, Planting, drop_bias, emit_bundle, scale_rows, write_bundle
from tests.passes.captured import tiny

pytestmark = pytest.mark.usefixtures("replayed_once")

LAYER = "model.layers.1"
QKV = f"{LAYER}.self_attn.q_proj+k_proj+v_proj"
GATE_UP = f"{LAYER}.mlp.gate_proj+up_proj.weight"
EXPERTS = f"{LAYER}.mlp.experts"
UNUSED = 200
"""A token that no test runs."""
TOKENS = [[5, 6, 7]]

# family, tensor without what its scales are called, the rows that are scaled by 1.01, source tensor, its rows.
LINEARS = [
    ("Qwen2", f"{QKV}.weight", (0, 64), f"{LAYER}.self_attn.q_proj.weight[0:64]"),
    ("Qwen2", f"{QKV}.weight", (64, 96), f"{LAYER}.self_attn.k_proj.weight[0:32]"),
    ("Qwen2", f"{QKV}.weight", (96, 128), f"{LAYER}.self_attn.v_proj.weight[0:32]"),
    ("Qwen2", f"{LAYER}.self_attn.o_proj.weight", (0, 64), f"{LAYER}.self_attn.o_proj.weight[0:64]"),
    ("Qwen2", GATE_UP, (0, 128), f"{LAYER}.mlp.gate_proj.weight[0:128]"),
    ("Qwen2", GATE_UP, (128, 256), f"{LAYER}.mlp.up_proj.weight[0:128]"),
    ("Qwen2", f"{LAYER}.mlp.down_proj.weight", (0, 64), f"{LAYER}.mlp.down_proj.weight[0:64]"),
    ("Qwen2", "lm_head.weight", (0, 256), "lm_head.weight[0:256]"),
    ("Qwen2", "model.embed_tokens.weight", (UNUSED, UNUSED + 1), f"model.embed_tokens.weight[{UNUSED}:{UNUSED + 1}]"),
    ("Mixtral", f"{EXPERTS}.gate_up_proj", (3, 4), f"{EXPERTS}.gate_up_proj[3:4]"),
    ("Mixtral", f"{EXPERTS}.down_proj", (7, 8), f"{EXPERTS}.down_proj[7:8]"),
]


@pytest.fixture
def lowered(bundles: Bundles, made: Made) -> Callable[[str, str], Lowering]:
    """The program that the export of a family by a recipe lowers."""

    def find(family: str, recipe: str) -> Lowering:
        bundles(family, recipe)
        return lower_program(made.stages[id(tiny(family)[0]), recipe][-1].program)

    return find


def differing(lowering: Lowering, folder: Path) -> list[TensorDifference]:
    return compare_with_export(lowering, Bundle.open(folder), "cpu", None, silent).differing


def run(family: str, folder: Path, **options: object) -> BisectReport:
    return bisect(Given(tiny(family)[0]), Given(folder), Options(tokens=TOKENS, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "recipe"),
    [*(("Qwen2", recipe) for recipe in ("f32", "int8", "int4", "bf16")), ("Mixtral", "int8"), ("Mixtral", "int4")],
)
def test_an_export_has_the_tensors_that_the_repeated_one_would_write(
    family: str, recipe: str, bundles: Bundles, lowered: Callable[[str, str], Lowering]
) -> None:
    comparison = compare_with_export(lowered(family, recipe), Bundle.open(bundles(family, recipe)), "cpu", None, silent)
    assert comparison.differing == [] and comparison.not_compared == []
    index = Bundle.open(bundles(family, recipe)).index
    assert comparison.compared == len(index.tensors)
    assert comparison.bytes == sum(tensor.bytes for tensor in index.tensors.values())


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize(("family", "name", "rows", "source"), LINEARS)
def test_a_weight_times_1_01(
    family: str,
    name: str,
    rows: tuple[int, int],
    source: str,
    recipe: str,
    bundles: Bundles,
    lowered: Callable[[str, str], Lowering],
    tmp_path: Path,
) -> None:
    planting = Planting(bundles(family, recipe), tmp_path / "planted")
    scale_rows(planting, f"{name}.scales", *rows)
    differences = differing(lowered(family, recipe), planting.folder)
    four_bits = recipe == "int4" and name not in ("lm_head.weight", "model.embed_tokens.weight")
    assert [f.name for f in differences] == [f"{name}.{part}" for part in ("scales", "offsets")[: 1 + four_bits]]
    for one in differences:
        assert one.factor == pytest.approx(1.01, abs=5e-4)  # scales are rounded to f16, 2^-11
        assert one.sources == [source]
        assert one.modules and all(source.startswith(m) or name.startswith(m) or "+" in name for m in one.modules)
        assert one.layer == (LAYER if name.startswith(LAYER) else "")
        assert re.search(r"there B is 1\.0\d\d\d times A", one.reason)


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize(
    "name", [f"{LAYER}.input_layernorm.weight", f"{LAYER}.post_attention_layernorm.weight", "model.norm.weight"]
)
def test_a_norm_fused_with_rounding_times_1_01(
    name: str, recipe: str, tmp_path: Path, distinct: Callable[[str], tuple[Path, Lowering]]
) -> None:
    folder, lowering = distinct(recipe)
    planting = Planting(folder, tmp_path / "planted")
    planting.change_weight(name, lambda weight: weight * np.float32(1.01))
    (difference,) = differing(lowering, planting.folder)
    assert difference.name == name and difference.modules == [name.removesuffix(".weight")]
    assert difference.factor == pytest.approx(1.01, rel=1e-5) and difference.differing == difference.values == 64
    assert difference.reason == "all values differ; there B is 1.0100 times A"


@pytest.fixture(scope="module")
def distinct(tmp_path_factory: pytest.TempPathFactory, made: Made) -> Callable[[str], tuple[Path, Lowering]]:
    """A bundle whose norms and biases all differ, so that none is stored at another's place."""
    model = tiny("Qwen2", initializer_range=0.021)[0]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    folder = tmp_path_factory.mktemp("distinct")
    variants: dict[str, tuple[Path, Lowering]] = {}

    def make(recipe: str) -> tuple[Path, Lowering]:
        if recipe not in variants:
            captured: CapturedModel = made.capture(model)
            chosen = load_recipe(recipe)
            stages = made.replay(model, captured, chosen, "cpu", calibration=None, scratch=folder, progress=silent)
            path = write_bundle(captured, chosen, stages[-1].program, folder / recipe)
            variants[recipe] = path, lower_program(stages[-1].program)
        return variants[recipe]

    return make


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_biases(recipe: str, tmp_path: Path, distinct: Callable[[str], tuple[Path, Lowering]]) -> None:
    folder, lowering = distinct(recipe)
    planting = Planting(folder, tmp_path / "planted")
    scale_rows(planting, f"{QKV}.bias", 64, 96)
    (difference,) = differing(lowering, planting.folder)
    assert difference.sources == [f"{LAYER}.self_attn.k_proj.bias[0:32]"] and difference.places == "elements 64:96"
    assert difference.factor == pytest.approx(1.01, rel=1e-5)
    where = " + ".join(f"{LAYER}.self_attn.{x}_proj" for x in "qkv")
    dropped = Planting(folder, tmp_path / "dropped")
    drop_bias(dropped, where)
    (difference,) = differing(lowering, dropped.folder)
    assert difference.name == f"{QKV}.bias" and difference.reason == "no step of B reads it: the bias was dropped"
    zero = Planting(folder, tmp_path / "zero")
    zero.change_weight(f"{QKV}.bias", np.zeros_like)
    (difference,) = differing(lowering, zero.folder)
    assert "B is all zeros there" in difference.reason


def test_one_value_of_one_expert_is_named(
    bundles: Bundles, lowered: Callable[[str, str], Lowering], tmp_path: Path
) -> None:
    planting = Planting(bundles("Mixtral", "int8"), tmp_path / "planted")

    def change(weight: Array) -> Array:
        other = weight.copy()
        other[2, 17, 5] += 1 if other[2, 17, 5] < 100 else -1
        return other

    planting.change_weight(f"{EXPERTS}.down_proj.int8", change)
    (difference,) = differing(lowered("Mixtral", "int8"), planting.folder)
    assert (difference.differing, difference.values) == (1, 8 * 64 * 128)
    assert difference.places == "expert 2, row 17, column 5" and difference.sources == [f"{EXPERTS}.down_proj[2:3]"]


def test_a_tensor_of_another_format_is_named(bundles: Bundles, lowered: Callable[[str, str], Lowering]) -> None:
    differences = differing(lowered("Qwen2", "f32"), bundles("Qwen2", "bf16"))
    (one,) = [f for f in differences if f.name == f"{LAYER}.self_attn.o_proj.weight"]
    assert one.reason == "B stores bf16 [64, 64] in panel32x2, A f32 [64, 64] in panel32" or "no step" in one.reason


def test_tensors_of_two_bundles(bundles: Bundles, tmp_path: Path) -> None:
    first = bundles("Qwen2", "int8-unscaled")
    planting = Planting(first, tmp_path / "planted")
    scale_rows(planting, f"{GATE_UP}.scales", 10, 12)
    a, b = Bundle.open(first), Bundle.open(planting.folder)
    (difference,) = compare_bundles(a, "cpu", b, "cpu", True, None, silent).differing
    assert difference.name == f"{GATE_UP}.scales" and difference.places == "rows 10:12"
    assert difference.sources == [f"{LAYER}.mlp.gate_proj.weight[10:12]"]
    assert compare_bundles(a, "cpu", b, "cpu", True, [0], silent).differing == []
    same = compare_bundles(a, "cpu", a, "cpu", True, None, silent)
    assert same.compared == 0 and len(same.not_compared) == len(a.index.tensors)
    other = Bundle.open(bundles("Qwen2", "f32"))
    plain = compare_bundles(a, "cpu", other, "cpu", False, None, silent)
    assert plain.differing == [] and plain.compared == 8  # norms, biases, frequencies
    assert f"{GATE_UP}.scales" in plain.not_compared


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("module", ["self_attn.o_proj", "mlp.down_proj"])
def test_values_show_a_product_without_its_residual(module: str, recipe: str, bundles: Bundles, tmp_path: Path) -> None:
    """Within the sum with the residual, 1 % of the product is less than what rounding may do."""
    planting = Planting(bundles("Qwen2", recipe), tmp_path / "planted")
    scale_rows(planting, f"{LAYER}.{module}.weight.scales", 0, 64)
    report = run("Qwen2", planting.folder)
    divergence = report.first_divergence
    assert divergence is not None and divergence.value_name == f"output of {LAYER}.{module}"
    assert divergence.gain == pytest.approx(1.01, abs=1e-3) and divergence.others == []
    assert any("is 1.01" in reason and module in reason for reason in divergence.reasons)


@pytest.mark.parametrize("recipe", ["int8", "int4"])
@pytest.mark.parametrize("module", ["self_attn.o_proj", "mlp.down_proj"])
def test_a_product_within_a_large_sum_times_1_01(module: str, recipe: str, bundles: Bundles, tmp_path: Path) -> None:
    """Over 60 tokens the sum with the residual differs by less than integers may, and a report said "they agree"."""
    planting = Planting(bundles("Llama", recipe), tmp_path / "planted")
    scale_rows(planting, f"{LAYER}.{module}.weight.scales", 0, 64)
    report = bisect(Given(tiny("Llama")[0]), Given(planting.folder), Options(tokens=[list(range(60))]))
    divergence = report.first_divergence
    assert divergence is not None and divergence.value_name == f"output of {LAYER}.{module}"
    assert any(tensor.startswith(f"{LAYER}.{module}.weight") for tensor in divergence.tensors)


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_a_fused_norm_is_named_and_not_the_linear_behind_it(
    recipe: str, tmp_path: Path, distinct: Callable[[str], tuple[Path, Lowering]]
) -> None:
    planting = Planting(distinct(recipe)[0], tmp_path / "planted")
    name = f"{LAYER}.post_attention_layernorm"
    planting.change_weight(f"{name}.weight", lambda weight: weight * np.float32(1.05))
    model = tiny("Qwen2", initializer_range=0.021)[0]
    divergence = bisect(Given(model), Given(planting.folder)).first_divergence
    assert divergence is not None and divergence.value_name == f"output of {LAYER}.mlp.gate_proj"
    assert divergence.reasons[0].startswith(f"{name}.weight") and "is 1.0500 times" in divergence.reasons[0]
    assert not any("gate_proj" in reason for reason in divergence.reasons)


def test_what_no_token_uses(bundles: Bundles, tmp_path: Path) -> None:
    """A row and an expert that aren't used differ: the values agree, the tensors don't, and both are said."""
    clean = run("Mixtral", bundles("Mixtral", "int8"))
    assert clean.agrees and "model.embed_tokens: 253 of 256 rows, which no token has" in clean.not_covered
    left = next(text for text in clean.not_covered if text.startswith(EXPERTS))
    expert = int(re.findall(r"\((\d+)", left)[0])
    planting = Planting(bundles("Mixtral", "int8"), tmp_path / "planted")
    scale_rows(planting, f"{EXPERTS}.down_proj.scales", expert, expert + 1)
    scale_rows(planting, "model.embed_tokens.weight.scales", UNUSED, UNUSED + 1)
    report = run("Mixtral", planting.folder)
    assert report.first_divergence is None and not report.agrees
    assert report.tensors is not None
    assert [(d.name, d.places) for d in report.tensors.differing] == [
        ("model.embed_tokens.weight.scales", f"row {UNUSED}"),
        (f"{EXPERTS}.down_proj.scales", f"expert {expert}"),
    ]
    assert report.to_json()["agrees"] is False


def test_layers_restrict_what_is_compared(bundles: Bundles, tmp_path: Path) -> None:
    planting = Planting(bundles("Qwen2", "int8"), tmp_path / "planted")
    scale_rows(planting, f"{LAYER}.mlp.down_proj.weight.scales", 0, 64)
    whole, zero, one = (run("Qwen2", planting.folder, layers=layers) for layers in (None, [0], [1]))
    assert zero.agrees and zero.layers == [0] and zero.not_covered == []
    assert not one.agrees and one.first_divergence is not None and whole.first_divergence is not None
    assert (
        one.first_divergence.value_name == whole.first_divergence.value_name
        and one.first_divergence.error == pytest.approx(whole.first_divergence.error, rel=0.02)
    )
    assert zero.values_compared + one.values_compared < whole.values_compared
    assert zero.tensors is not None and one.tensors is not None and whole.tensors is not None
    assert zero.tensors.compared == one.tensors.compared < whole.tensors.compared
    with pytest.raises(RequestError, match=r"layer 2 is not one of the model's: it has 0 to 1"):
        run("Qwen2", planting.folder, layers=[2])


@pytest.mark.parametrize("recipe", ["f32", "int8"])
def test_the_smallest_factor_is_one_that_is_seen(recipe: str, bundles: Bundles, tmp_path: Path) -> None:
    """Just above it a planted factor is found by its values, at the least sensitive value; half of it isn't."""
    clean = bisect(Given(tiny("Qwen2")[0]), Given(bundles("Qwen2", recipe)))
    (of_bundle,) = [s for s in clean.smallest_factors if s.between == "steps of the bundle"]
    assert 1 < of_bundle.factor < 1.02
    name = f"{LAYER}.mlp.down_proj.weight" + ("" if recipe == "f32" else ".scales")
    for share, seen in ((1.3, True), (0.5 if recipe == "int8" else 0.3, False)):
        planting = Planting(bundles("Qwen2", recipe), tmp_path / f"{share}")
        scale_rows(planting, name, 0, 64, 1 + share * (of_bundle.factor - 1))
        report = bisect(Given(tiny("Qwen2")[0]), Given(planting.folder))
        assert (report.first_divergence is not None) == seen
        assert not report.agrees  # the tensor itself is another by a bit


def test_other_versions_are_noted(bundles: Bundles, tmp_path: Path) -> None:
    planting = Planting(bundles("Qwen2", "int8"), tmp_path / "planted")
    manifest = planting.folder / "manifest.json"
    data = json.loads(manifest.read_text()) | {
        "toolchain": {"torch": "2.1.0", "nobody-has-this": "1", "numpy": np.__version__}
    }
    manifest.write_text(json.dumps(data))
    (note,) = other_versions(Bundle.open(planting.folder))
    assert note.startswith(f"the bundle was exported with torch 2.1.0 ({torch.__version__} here): ")
    assert other_versions(Bundle.open(bundles("Qwen2", "int8"))) == []


SMOLLM2 = [  # layer, tensor without what its scales are called, rows, and the tensor of the GGUF file
    (0, "self_attn.q_proj+k_proj+v_proj.weight", (0, 576), "attn_q"),
    (3, "self_attn.q_proj+k_proj+v_proj.weight", (576, 768), "attn_k"),
    (6, "self_attn.q_proj+k_proj+v_proj.weight", (768, 960), "attn_v"),
    (9, "self_attn.o_proj.weight", (0, 576), "attn_output"),
    (26, "self_attn.o_proj.weight", (0, 576), "attn_output"),
    (12, "mlp.gate_proj+up_proj.weight", (0, 1536), "ffn_gate"),
    (15, "mlp.gate_proj+up_proj.weight", (1536, 3072), "ffn_up"),
    (18, "mlp.down_proj.weight", (0, 576), "ffn_down"),
    (28, "mlp.down_proj.weight", (0, 576), "ffn_down"),
]


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_plants_in_smollm2(recipe: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    """Each linear by its tensor and by its values; norms and a row of the table by their tensors."""
    bundle = emit_bundle(smollm2_gguf, tmp_path / "bundle", recipe)
    clean = bisect(Given(smollm2_gguf), Given(bundle))
    assert clean.agrees and clean.tensors is not None and clean.tensors.compared > 250
    planting = Planting(bundle, tmp_path / "planted")
    names = {}
    for layer, tensor, rows, source in SMOLLM2:
        name = f"model.layers.{layer}.{tensor}.scales"
        scale_rows(planting, name, *rows)
        names[name] = f"blk.{layer}.{source}.weight[0:{rows[1] - rows[0]}]"
    for layer, norm, source in ((21, "input_layernorm", "attn_norm"), (22, "post_attention_layernorm", "ffn_norm")):
        name = f"model.layers.{layer}.{norm}.weight"
        planting.change_weight(name, lambda weight: weight * np.float32(1.01))
        names[name] = f"blk.{layer}.{source}.weight[0:576]"
    planting.change_weight("model.norm.weight", lambda weight: weight * np.float32(1.01))
    names["model.norm.weight"] = "output_norm.weight[0:576]"
    scale_rows(planting, "lm_head.weight.scales", 40_000, 40_001)  # the embedding's table too
    names["lm_head.weight.scales"] = "token_embd.weight[40000:40001]"
    report = bisect(Given(smollm2_gguf), Given(planting.folder))
    assert report.tensors is not None and report.first_divergence is not None
    by_name = {one.name: one for one in report.tensors.differing}
    assert {name for name in by_name if not name.endswith(".offsets")} == names.keys()
    for name, source in names.items():
        assert by_name[name].sources == [source] and by_name[name].factor == pytest.approx(1.01, abs=5e-4)
    assert report.first_divergence.module == "model.layers.0.self_attn.q_proj"
    assert report.first_divergence.others_count >= len(SMOLLM2) - 1
