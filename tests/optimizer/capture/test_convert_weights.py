"""Checkpoints that transformers converts when it loads them are read as it does, lazily."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers import core_model_loading as loading

from enginewright.optimizer.capture import build_from_directory, convert_weights
from enginewright.optimizer.capture.convert_weights import by_model_names
from enginewright.passes.ir.weights import Source
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

TinyModel = Callable[..., PreTrainedModel]

EXPERTS = {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES = {
    "Mixtral": EXPERTS,  # experts one by one, and modules of other names
    "Qwen3Moe": {**EXPERTS, "head_dim": 16},
    "GraniteMoe": EXPERTS,  # stacks of other names
    "GptOss": {**EXPERTS, "head_dim": 16, "original_max_position_embeddings": 16},  # as the module has them
    "GPTNeoX": {},  # renamed alone
    "AriaText": {"moe_num_experts": 3, "moe_topk": 2},  # stacks whose axes are exchanged
}


def source(name, value):
    return Source(name, tuple(value.shape), value.dtype, lambda: value)


@pytest.mark.parametrize("family", CASES)
def test_a_saved_model_is_read_as_it_was(family: str, tiny_model: TinyModel, tmp_path) -> None:
    model = tiny_model(family, **CASES[family])
    model.save_pretrained(tmp_path)
    _, weights = build_from_directory(tmp_path)
    parameters = dict(model.named_parameters())
    assert set(parameters) <= set(weights)
    for name, value in parameters.items():
        assert torch.equal(weights[name].evaluate(), value), name


def saved(tiny_model, tmp_path, change):
    """A saved tiny Mixtral whose tensors ``change`` has changed in place."""
    tiny_model("Mixtral", **EXPERTS).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return tmp_path


EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"


def remove(*names):
    return lambda tensors: [tensors.pop(n) for n in names]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(EXPERT.format(1, "w1")), r"tensor model\.layers\.1\.\w+\.experts\.1\.w1\.weight is missing"),
        (remove(EXPERT.format(2, "w3")), r"model\.layers\.1\.mlp\.experts\.gate_up_proj is made of 3 of .*, 2 of "),
        (remove(*(EXPERT.format(2, w) for w in ("w1", "w2", "w3"))), r"has shape \(2, .* has \(3, "),
        (remove(*(EXPERT.format(i, "w3") for i in range(3))), r"gate_up_proj is made of 3 of .*, 0 of "),
        (
            lambda t: t.update({EXPERT.format(0, "w1"): torch.zeros(7, 64)}),
            r"w1\.weight, \.\.\. don't make model\.layers\.1\.mlp\.experts\.gate_up_proj: can't stack",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(3, 64, 128)}),
            r"both model\.layers\.0\.mlp\.experts\.down_proj",
        ),
        (
            lambda t: t.update({"model.layers.7.block_sparse_moe.experts.0.w1.weight": torch.zeros(128, 64)}),
            r"tensor model\.layers\.7\.block_sparse_moe\.experts\.0\.w1\.weight has no place",
        ),
    ],
    ids=["one missing", "fewer ups", "last missing", "no ups", "other shape", "twice", "no such layer"],
)  # fmt: skip
def test_damaged_checkpoints_are_refused_by_name(change, message, tiny_model: TinyModel, tmp_path) -> None:
    with pytest.raises(SourceError, match=message):
        build_from_directory(saved(tiny_model, tmp_path, change))


@pytest.mark.parametrize(
    ("operation", "shape"),
    [
        (loading.Transpose(0, 1), (6, 4)),
        (loading.Transpose(1, 2), (3, 6, 4)),
        (loading.Interleave(0), (6, 4)),
        (loading.Interleave(1), (3, 8, 4)),
        (loading.Interleave(1, inverse=True), (3, 8, 4)),
        (loading.Concatenate(-1), (6, 4)),
    ],
    ids=str,
)
def test_operations_are_transformers(operation, shape) -> None:
    value = torch.randn(shape)
    context = convert_weights._Context(torch.nn.Linear(1, 1), "target", ["source"], ["target"])
    [got] = convert_weights._OPERATIONS[type(operation)](operation, {"source": [source("s", value)]}, context)["target"]
    want = operation.convert({"source": [value]}, ["source"], ["target"])["target"]
    assert torch.equal(got.evaluate(), want) and got.shape == tuple(want.shape)


@pytest.mark.parametrize("operation", [loading.Chunk(0), loading.Split(0)], ids=str)
def test_one_tensor_becomes_several_parameters(operation) -> None:
    class Model(torch.nn.Module):
        config = None

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)

    value = torch.randn(6, 4)
    converter = loading.WeightConverter("gate_up.weight", ["gate.weight", "up.weight"], [operation])
    conversion = convert_weights._Conversion(
        converter, {"gate_up.weight": [source("s", value)]}, {"gate_up.weight": ["s"]}
    )
    got = convert_weights._convert(Model(), "gate.weight", conversion, "here")
    assert list(got) == ["gate.weight", "up.weight"]
    assert torch.equal(torch.cat([e.evaluate() for e in got.values()]), value)


def test_an_unknown_operation_is_refused_by_name(tiny_model: TinyModel, monkeypatch) -> None:
    model = tiny_model("Llama")
    mapping = [loading.WeightConverter("q_proj.weight", "q_proj.weight", [loading.PermuteForRope()])]
    monkeypatch.setattr(convert_weights, "get_model_conversion_mapping", lambda _: mapping)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(UnsupportedModelError, match=rf"here: transformers makes {name} of {name} by PermuteForRope"):
        by_model_names(model, {name: source(name, torch.zeros(64, 64))}, source="here")
