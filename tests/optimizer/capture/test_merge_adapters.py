"""Adapters that PEFT saved, merged as weights are read: the weights are those of PEFT's own merge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from enginewright.optimizer.capture import build_from_directory, build_from_gguf
from enginewright.optimizer.capture.gguf.file import open_gguf
from enginewright.optimizer.capture.model_source import Adapter, ModelSource
from enginewright.optimizer.measure.source_runner import SourceRunner
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError
from tests.acceptance.tiny_configs import tiny_whole
from tests.conftest import make_tiny_model

from .adapters import IDS, load, logits_of, merged_by_peft, save_adapter, save_base
from .gguf.gguf_models import CASES, build, write_model
from .gguf.test_model import write

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
"""The tolerance of weights: the same products, in one sum or in two."""

LOGITS = {"rtol": 1e-4, "atol": 3e-5}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_LINEAR = ["q_proj", "v_proj", "down_proj"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_BOTH = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": ["q_proj"]}

UNTIED: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("Llama", {}, {"target_modules": _LINEAR}),
    "scalings": (
        "Llama",
        {},
        {
            "target_modules": "all-linear",
            "use_rslora": True,
            "lora_alpha": 7,
            "rank_pattern": {"v_proj": 6},
            "alpha_pattern": {"layers.1.self_attn.q_proj": 3},
        },
    ),
    "magnitudes": ("Llama", {}, {"target_modules": [*_LINEAR, "embed_tokens"], "use_dora": True}),
    "tables": ("Llama", {}, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "one layer": ("Llama", {}, {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}),
    "all but": ("Llama", {}, {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]}),
    "expression": ("Llama", {}, {"target_modules": r".*\.1\..*(q|k)_proj"}),
    "whole modules": ("Llama", {}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "Conv1D": ("GPT2", {}, {"target_modules": ["c_attn", "c_fc"], "use_dora": True, "fan_in_fan_out": True}),
    "all biases": ("GPT2", {}, {"target_modules": ["c_proj"], "bias": "all"}),
    "own biases": ("Qwen2", {}, {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "bias of B": ("Qwen2", {}, {"target_modules": ["q_proj"], "lora_bias": True}),
    "fused": ("Phi3", {}, {"target_modules": "all-linear"}),
    "fused with biases": ("GPTNeoX", {}, {"target_modules": ["query_key_value", "dense_h_to_4h"]}),
    "experts": ("Qwen3Moe", _EXPERTS, _BOTH),
    "experts and router": (
        "Mixtral",
        {"num_local_experts": 4},
        {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "gate.weight"]},
    ),
    "transposed experts": ("GptOss", {"num_local_experts": 4}, _BOTH),
    "windows": ("Gemma2", {}, {"target_modules": ["o_proj", "gate_proj"]}),
}
_QUICK = ("linear", "Conv1D")


def matrix(cases: Mapping[str, Any], quick: tuple[str, ...]) -> list[Any]:
    """The names of cases, those that aren't ``quick`` marked."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.matrix) for name in cases]


def assert_merged(base: Path, adapters: list[tuple[Path, float]], **options: Any) -> None:
    """Compares every weight of a folder with PEFT's merge."""
    _, weights = build_from_directory(base, adapters=[Adapter(*one) for one in adapters])
    expected = merged_by_peft(base, adapters, **options)
    for name, weight in weights.items():
        torch.testing.assert_close(weight.evaluate(), expected[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", matrix(UNTIED, _QUICK))
def test_weights_are_those_of_pefts_merge(case: str, tmp_path: Path) -> None:
    family, overrides, lora = UNTIED[case]
    base = save_base(tmp_path / "base", family, **({"tie_word_embeddings": False} | overrides))
    adapted = save_adapter(load(base), tmp_path / "adapter", **lora)
    assert_merged(base, [(tmp_path / "adapter", 1.0)])
    runner = SourceRunner(ModelSource(base, (Adapter(tmp_path / "adapter"),)))
    torch.testing.assert_close(torch.from_numpy(runner.logits(IDS)[0]), logits_of(adapted), **LOGITS)


TIED: Mapping[str, dict[str, Any]] = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "table": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "saved table": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved both": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5, 9]},
}


@pytest.mark.parametrize("case", matrix(TIED, ("head",)))
def test_a_tied_table_and_head_are_adapted_as_the_adapters_own_model_has_them(case: str, tmp_path: Path) -> None:
    """PEFT's merge changes both where one is adapted, and warns of it; its unmerged model is what was trained."""
    base = save_base(tmp_path / "base", tie_word_embeddings=True)
    adapted = save_adapter(load(base), tmp_path / "adapter", **TIED[case])
    runner = SourceRunner(ModelSource(base, (Adapter(tmp_path / "adapter"),)))
    torch.testing.assert_close(torch.from_numpy(runner.logits(IDS)[0]), logits_of(adapted), **LOGITS)
    stays_tied = case in ("both", "saved both", "tokens")
    assert (runner.model.lm_head.weight is runner.model.model.embed_tokens.weight) == stays_tied


def test_weighted_adapters_add_up(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    save_adapter(load(base), tmp_path / "one", target_modules=_LINEAR)
    save_adapter(load(base), tmp_path / "two", seed=2, r=2, target_modules=["q_proj"], use_dora=True)
    save_adapter(load(base), tmp_path / "three", seed=3, target_modules=["o_proj"], modules_to_save=["norm"])
    assert_merged(base, [(tmp_path / "one", 0.5), (tmp_path / "two", -0.25), (tmp_path / "three", 2.0)])


@pytest.mark.matrix
def test_weighted_adapters_are_those_that_peft_combines(tmp_path: Path) -> None:
    from peft import PeftModel

    base = save_base(tmp_path / "base")
    for seed, name in enumerate(("one", "two")):
        save_adapter(load(base), tmp_path / name, seed=seed, target_modules=_LINEAR)
    both = PeftModel.from_pretrained(load(base), str(tmp_path / "one"), adapter_name="one")
    both.load_adapter(str(tmp_path / "two"), adapter_name="two")
    both.add_weighted_adapter(["one", "two"], [0.75, 0.5], "sum", combination_type="cat")
    both.set_adapter("sum")
    expected = both.merge_and_unload().state_dict()
    adapters = [Adapter(tmp_path / "one", 0.75), Adapter(tmp_path / "two", 0.5)]
    for name, weight in build_from_directory(base, adapters=adapters)[1].items():
        torch.testing.assert_close(weight.evaluate(), expected[name], **TOLERANCE)


@pytest.mark.matrix
def test_an_adapter_of_experts_one_by_one_is_stacked_as_the_checkpoint_is(tmp_path: Path) -> None:
    """Adapters of Mixtral from before transformers 5 have tensors of each expert's w1, w2 and w3."""
    base, folder = save_base(tmp_path / "base", "Mixtral", num_local_experts=4), tmp_path / "adapter"
    save_adapter(load(base), folder, target_modules=["q_proj"])
    generator, tensors = torch.Generator().manual_seed(5), load_file(folder / WEIGHTS)
    for layer in range(2):
        for expert in range(4):
            for name, (outputs, inputs) in {"w1": (128, 64), "w2": (64, 128), "w3": (128, 64)}.items():
                module = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) * 0.1
                tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) * 0.1
    save_file(tensors, folder / WEIGHTS)
    configure(folder, target_modules=["q_proj", "w1", "w2", "w3"])
    assert_merged(base, [(folder, 1.0)])


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2_vl"])
def test_an_adapter_of_a_whole_model_is_merged_into_its_text_decoder(family: str, tmp_path: Path) -> None:
    tiny_whole(family).save_pretrained(tmp_path / "base")
    base = tmp_path / "base"
    save_adapter(load(base, AutoModelForImageTextToText), tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    _, weights = build_from_directory(base, adapters=[Adapter(tmp_path / "adapter")])
    expected = merged_by_peft(base, [(tmp_path / "adapter", 1.0)], AutoModelForImageTextToText)
    plain = build_from_directory(base)[1]
    changed = 0
    for name, weight in weights.items():
        if name.startswith("lm_head"):
            continue
        (whole,) = [n for n in expected if "language_model" in n and n.endswith(f".{name.removeprefix('model.')}")]
        torch.testing.assert_close(weight.evaluate(), expected[whole], **TOLERANCE)
        changed += not torch.equal(weight.evaluate(), plain[name].evaluate())
    assert changed >= 4


@pytest.mark.parametrize("blocks", ["F16", pytest.param("Q8_0", marks=pytest.mark.matrix)])
def test_an_adapter_of_a_gguf_file_is_merged_into_its_floats(blocks: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(make_tiny_model("Llama"), path, gguf.GGMLQuantizationType[blocks])
    assert_merged_into_file(path, tmp_path, target_modules=[*_LINEAR, "embed_tokens"])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("architecture", "lora"),
    [
        ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
        ("qwen3moe", _BOTH),
        ("llama", {"target_modules": ["q_proj", "lm_head"], "use_dora": True}),
    ],
)
def test_an_adapter_of_another_architectures_file(architecture: str, lora: dict[str, Any], tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", architecture, build(CASES[architecture]))
    assert_merged_into_file(path, tmp_path, **lora)


def assert_merged_into_file(path: Path, folder: Path, **lora: Any) -> None:
    """Compares the weights of a GGUF file with PEFT's merge into the floats that it stands for."""
    model, plain = build_from_gguf(open_gguf(path), eager=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(plain[name].evaluate())
    model.save_pretrained(folder / "base")
    save_adapter(load(folder / "base"), folder / "adapter", **lora)
    expected = merged_by_peft(folder / "base", [(folder / "adapter", 1.0)])
    _, weights = build_from_gguf(open_gguf(path), adapters=[Adapter(folder / "adapter")])
    for name, weight in weights.items():
        torch.testing.assert_close(weight.evaluate(), expected[name], **TOLERANCE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with "base" and its "adapter"."""
    folder = tmp_path_factory.mktemp("saved")
    base = save_base(folder / "base")
    save_adapter(load(base), folder / "adapter", target_modules=_LINEAR)
    return folder


def configure(folder: Path, **keys: Any) -> None:
    """Changes keys of an adapter's configuration."""
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | keys))


_Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def _rank(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{_Q}A.weight"] = torch.zeros(8, 64)


def _without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{_Q}B.weight"]


def _without_module(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{_Q}B.weight"], tensors[f"{_Q}A.weight"]


def _strange_module(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 64)


def _untargeted(tensors: dict[str, torch.Tensor]) -> None:
    for end, shape in (("A", (4, 64)), ("B", (32, 4))):
        tensors[f"base_model.model.model.layers.0.self_attn.k_proj.lora_{end}.weight"] = torch.zeros(shape)


def _other_role(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{_Q}magnitude_vector"] = torch.zeros(64)


def _plain(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 64)


def _resized(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.weight"] = torch.zeros(258, 64)


def _named(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{_Q}A.default.weight"] = tensors.pop(f"{_Q}A.weight")


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{_Q}A.weight"][1, 2] = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_rank, rf"tensor {_Q}A.weight has shape \(8, 64\), and .*q_proj.weight of this model needs \(4, 64\) at rank"),
        (_without, rf"tensor {_Q}B.weight is missing"),
        (_without_module, rf"tensor {_Q}A.weight is missing, and target_modules of .* names its module"),
        (_strange_module, r"layers.7.self_attn.q_proj.lora_A.weight is of module .*, which LlamaForCausalLM doesn't"),
        (_untargeted, r"k_proj.lora_A.weight is of a module that target_modules of .* doesn't name"),
        (_other_role, r"lora_magnitude_vector isn't one that .* says of a linear module"),
        (_plain, r"up_proj.weight isn't one that the adapter trains"),
        (_resized, r"embed_tokens.weight has shape \(258, 64\), and model.embed_tokens.weight .* needs \(256, 64\)"),
        (_named, r"lora_A.default.weight isn't known"),
        (_nan, r"lora_A.weight has 1 values that are NaN"),
    ],
)
def test_a_tensor_that_doesn_t_fit_is_named(change: Any, message: str, saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved / "adapter", tmp_path / "adapter")
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(SourceError, match=message):
        for weight in build_from_directory(saved / "base", adapters=[Adapter(folder)])[1].values():
            weight.evaluate()


def test_an_adapter_of_another_base_model_names_the_tensor(saved: Path, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", hidden_size=32)
    with pytest.raises(SourceError, match=r"down_proj.lora_B.weight has shape \(64, 4\), .* needs \(32, 4\)") as caught:
        build_from_directory(base, adapters=[Adapter(saved / "adapter")])
    assert caught.value.hint is not None and "pass that base model" in caught.value.hint


def test_a_truncated_file_is_named(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved / "adapter", tmp_path / "adapter")
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(SourceError, match=rf"{WEIGHTS}: damaged or truncated"):
        build_from_directory(saved / "base", adapters=[Adapter(folder)])


def test_a_bias_without_a_place_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    save_adapter(load(base), tmp_path / "adapter", target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(UnsupportedModelError, match=r"lora_B.bias \(lora_bias\) has nowhere to go"):
        build_from_directory(base, adapters=[Adapter(tmp_path / "adapter")])
