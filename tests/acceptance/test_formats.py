"""Narrow formats through the whole chain: as close as a recipe says, small, and bit for bit the same in any batch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

import enginewright as ew
from enginewright.optimizer.cli.app import app
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe, with_cache
from enginewright.optimizer.recipes.sections import BudgetSection, CalibrationSection, builtin_files
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.plugins.native.executable import isas
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.weights import unpack
from enginewright.runtime.shared.kv_formats import CACHES

from .driver import Driver
from .test_invariance import run
from .test_reproducible import contents

REPOSITORY = Path(__file__).resolve().parents[2]

OFFSETS = WeightFormat(storage="int4", group_size=64, zero_point=True, activation="int8", activation_group_size=64)
CHANNEL = WeightFormat(storage="int4", activation="int8")
G128 = WeightFormat(storage="int4", group_size=128, activation="int8", activation_group_size=128)
NF4 = WeightFormat(storage="nf4", group_size=64)
THREE = WeightFormat(storage="int3", group_size=32, zero_point=True, activation="int8", activation_group_size=32)
TWO = WeightFormat(storage="int2", group_size=16, activation="int8", activation_group_size=16)
ANY_KL = BudgetSection(max_kl=1.0)  # four bits cost random models of 64 channels more than real ones
RECIPES: dict[str, str | Recipe] = {
    "int8": "int8",
    "bf16": "bf16",
    "fp8": load_recipe("fp8").model_copy(update={"targets": ("cpu",), "budget": ANY_KL}),
    "nf4": Recipe(name="nf4", weights=WeightFormats(default=NF4), budget=ANY_KL),
    "int4": load_recipe("int4").model_copy(update={"budget": ANY_KL}),
    # Of the tables and of the head too.
    "offsets": Recipe(name="offsets", weights=WeightFormats(default=OFFSETS), budget=ANY_KL),
    "channel": Recipe(name="channel", weights=WeightFormats(default=CHANNEL), budget=ANY_KL),
    "three": Recipe(name="three", weights=WeightFormats(default=THREE), budget=BudgetSection(max_kl=10.0)),
    "two": Recipe(name="two", weights=WeightFormats(default=TWO), budget=BudgetSection(max_kl=10.0)),
}
SPARSE = {
    "sparse8": WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32, sparsity="2:4"),
    "sparse32": WeightFormat(sparsity="2:4"),
}
RECIPES |= {
    name: Recipe(
        name=name,
        weights=WeightFormats(default=one, sparsify="magnitude"),
        budget=BudgetSection(max_kl=10.0),
        calibration=CalibrationSection(tokens=256),
    )
    for name, one in SPARSE.items()
}
RECIPES |= {f"kv {cache}": with_cache(load_recipe("f32"), cache) for cache in CACHES.keys() - {"f32"}}
CASES = [(family, recipe) for family in ("Llama", "GPT2", "Mixtral") for recipe in ("int8", "bf16")]
CASES += [("Llama", "int4"), ("Mixtral", "int4"), ("GPT2", "offsets"), ("Mixtral", "offsets")]
CASES += [("Llama", "channel"), ("Mixtral", "channel")]
CASES += [("Llama", "three"), ("Mixtral", "three"), ("GPT2", "two")]
CASES += [("Llama", "fp8"), ("Mixtral", "fp8"), ("GPT2", "fp8")]
CASES += [("Llama", "nf4"), ("Mixtral", "nf4"), ("GPT2", "nf4")]
CASES += [("Llama", "sparse8"), ("GPT2", "sparse32")]
CASES += [("Llama", "kv bf16"), ("Gemma2", "kv int8"), ("Llama", "kv int8"), ("GPTNeoX", "kv fp8")]
CASES += [("Llama", "kv k6v4"), ("Gemma2", "kv k8v4"), ("Llama", "kv k5v4"), ("Llama", "kv k4v4")]
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}

# KL of the logits of random models from float32's, a median over tokens: some ten times what is measured, and four
# times for 4 bits.
LARGEST_KL = {
    "int8": 5e-3,
    "bf16": 5e-4,
    "fp8": 0.05,
    "nf4": 0.4,
    "int4": 0.3,
    "offsets": 0.4,
    "channel": 1.0,
    "three": 1.6,
    "two": 6.0,
    "sparse8": 3.0,
    "sparse32": 3.0,
}
LARGEST_KL |= {
    "kv bf16": 5e-4,
    "kv int8": 5e-4,
    "kv fp8": 5e-3,
    "kv k8v4": 0.12,
    "kv k6v4": 0.03,
    "kv k5v4": 0.05,
    "kv k4v4": 5e-4,
}


def overrides(family: str) -> dict[str, int]:
    return MIXTURE if family == "Mixtral" else {}


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_tiny_models_are_close_and_the_same_in_company(
    family: str, recipe: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    model = tiny_model(family, **overrides(family))
    bundle = tmp_path / "tiny.bundle"
    export(model, bundle, recipe=RECIPES[recipe])
    rng = np.random.default_rng(5)
    texts = [rng.integers(3, 256, n).tolist() for n in (1, 31, 33, 70)]
    alone = run(bundle, texts, chunk=4096, together=False, threads=1)
    for chunk, together, threads in ((4096, True, 2), (7, True, 1), (1, True, 2)):
        other = run(bundle, texts, chunk=chunk, together=together, threads=threads)
        for a, b in zip(alone, other, strict=True):
            assert a.tobytes() == b.tobytes()
    kl = []
    for text, got in zip(texts, alone, strict=True):
        with torch.no_grad():
            exact = model(input_ids=torch.tensor([text]), use_cache=False).logits[0].double().log_softmax(-1)
        kl.append((exact.exp() * (exact - torch.from_numpy(got).double().log_softmax(-1))).sum(-1))
    # The median: a token between two experts takes the other one after the smallest of changes.
    assert 0 < torch.cat(kl).median() < LARGEST_KL[recipe]


@pytest.mark.parametrize(("weights", "groups"), [(G128, [1, 2]), (CHANNEL, [1, 1])], ids=["128", "channel"])
def test_groups_of_4_bits_are_stored_as_the_recipe_says_twice_the_same(
    weights: WeightFormat, groups: list[int], tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    recipe = Recipe(name="x", targets=("cpu", "onnx"), weights=WeightFormats(default=weights), budget=ANY_KL)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_hidden_layers": 1}
    for name in ("one", "two"):
        report = export(tiny_model("Llama", **sizes), tmp_path / name, recipe=recipe)
        assert {v.target for v in report.verification} == {"cpu", "onnx"}
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    stored = Bundle.open(tmp_path / "one").index.tensors
    mlp = [stored[f"model.layers.0.mlp.{name}.weight.scales"] for name in ("gate_proj+up_proj", "down_proj")]
    assert [t.shape for t in mlp] == [(512, groups[0]), (128, groups[1])]
    assert [t.bytes for t in mlp] == [2 * 512 * groups[0], 2 * 128 * groups[1]]  # a float16 for each group


def test_a_format_without_a_kernel_is_stored_in_its_bits_and_loaded_as_floats(
    tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 200}  # neither is a multiple of 64
    model = tiny_model("Llama", **sizes)
    recipe = Recipe(name="nf4", targets=("cpu", "onnx"), weights=WeightFormats(default=NF4), budget=ANY_KL)
    report = export(model, tmp_path / "nf4", recipe=recipe)
    assert {v.target for v in report.verification} == {"cpu", "onnx"}
    bundle = Bundle.open(tmp_path / "nf4")
    name = "model.layers.0.mlp.down_proj.weight.nf4"
    entry, stored = bundle.index.tensors[name], bundle.weight(name)
    assert (entry.dtype, entry.stored_as, entry.shape) == ("f32", "nf4", (96, 200))
    output = CliRunner().invoke(app, ["inspect", str(tmp_path / "nf4"), "--json"]).stdout
    assert json.loads(output)["weight_bytes_by_type"].keys() >= {"nf4"}
    assert entry.bytes == 96 * 4 * 34  # blocks of 64 with a float16
    floats = unpack(stored, entry.shape, entry.layout, entry.dtype)
    exact = model.get_parameter("model.layers.0.mlp.down_proj.weight").detach().numpy()
    scales = np.abs(np.pad(exact, ((0, 0), (0, 56))).reshape(96, 4, 64)).max(-1).repeat(64, -1)[:, :200]
    assert (np.abs(floats - exact) <= scales * 0.153).all()  # half of the widest step, from -1 to -0.696
    assert len({float(x) for x in np.unique(floats[0, :64])}) <= 16
    for target in ("cpu", "onnx"):
        with ew.LLM(tmp_path / "nf4", target=target) as llm:
            greedy = ew.SamplingParams(max_tokens=8, ignore_eos=True)
            prompts = [[5, 6, 7], list(range(3, 40)), [9]]
            together = [o.token_ids for o in llm.generate(prompts, greedy)]
            assert together == [llm.generate([p], greedy)[0].token_ids for p in prompts]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_instruction_set_gives_nearly_the_same(
    recipe: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    export(tiny_model("Qwen3"), tmp_path / "tiny.bundle", recipe=RECIPES[recipe])
    text = np.random.default_rng(6).integers(3, 256, 40).tolist()
    logits = []
    for isa in isas():
        with Driver(tmp_path / "tiny.bundle", 1, 2, isa=isa) as driver:
            logits.append(driver.step({0: text})[0])
    for other in logits[1:]:
        # Float sums differ by rounding, after which a value now and then falls on the other side of a step of 1/127.
        assert np.abs(other - logits[0]).max() < 0.05 * np.abs(logits[0]).max()


def test_smollm2_in_int8(smollm2_gguf: Path, tmp_path: Path) -> None:
    report = export(smollm2_gguf, tmp_path / "int8.bundle", recipe="int8")
    assert report.quantization is not None
    assert report.quantization.values > 134_000_000
    assert report.quantization.saturated == report.quantization.vanished == 0
    stored = sum(t.bytes for t in Bundle.open(tmp_path / "int8.bundle").index.tensors.values())
    assert stored / report.parameters < 1.15
    (verification,) = report.verification
    assert verification.text is not None
    # Measured: 0.0050 and 95.1 %.
    assert verification.text.kl_mean < 0.01
    assert verification.text.top1_agreement > 0.94


@pytest.mark.soak
@pytest.mark.parametrize("recipe", builtin_files())
def test_every_recipe_of_smollm2_answers_what_the_demo_asks(recipe: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    question = re.search(r"^QUESTION := (.*)$", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert question is not None
    export(smollm2_gguf, tmp_path / "smollm2.bundle", recipe=recipe, targets=("cpu",))
    with ew.LLM(tmp_path / "smollm2.bundle") as llm:
        [answer] = llm.chat([{"role": "user", "content": question[1]}], ew.SamplingParams(max_tokens=64))
    assert answer.finish_reason == "stop"
    assert "ocean" in answer.text
