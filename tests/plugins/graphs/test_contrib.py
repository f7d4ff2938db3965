from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.fx.node import Node

from enginewright.optimizer.verify.random_tokens import tolerance_of
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.plugins.graphs import contrib
from enginewright.plugins.graphs.contrib_attention import GroupQuery, group_queries
from tests.acceptance.tiny_configs import tiny_family
from tests.plugins.graphs.linear_session import (
    SEQUENCES,
    LinearSession,
    emit,
    lowered,
    reference_logits,
    run_plan,
    tokens_of,
)

CONTEXT = 40

CHUNKS_ALONE: tuple[dict[int, int], ...] = ({0: 11, 2: 5}, {0: 7}, {2: 2}, *({0: 1, 2: 1},) * 5)
"""The runs of ``linear_session.PLAN``, but later parts of prompts run one token at a time."""


def _grouped(heads: int, kv_heads: int) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16, "hidden_size": 16 * heads}


# Groups of 1, 3, 4 and 8; windows, a softcap, sinks; rotations of a part of a head, of neighbours, by two tables, or
# none but a table of positions; norms of q and k.
TAKEN: dict[str, dict[str, Any]] = {
    "llama 4/4": _grouped(4, 4),
    "llama 6/2": _grouped(6, 2),
    "llama 8/2": _grouped(8, 2),
    "llama 8/1": _grouped(8, 1),
    "mistral": {},
    "gemma2": {},
    "gemma3_text": {},
    "gpt_oss": {},
    "stablelm": {},
    "cohere": {},
    "qwen3": {},
    "gpt2": {},
    "deepseek_v3": {},
}


def check(case: str, folder: Path, overrides: dict[str, Any]) -> onnx.ModelProto:
    """Both requests' logits are transformers' within what ``optimize verify`` allows for rounding."""
    model = tiny_family(case.partition(" ")[0], **overrides)
    io = emit(lowered(model), folder, contrib=CONTEXT)
    assert io.contrib is not None
    expected, largest = reference_logits(model), 0.0
    by_slot = run_plan(LinearSession(folder, io.of_variant("contrib")), CHUNKS_ALONE)
    for slot, logits in by_slot.items():
        largest = max(largest, float(np.abs(expected[slot]).max()))
        # Sums of 32-bit floats in another order, as of the standard file: measured 2e-5 at most.
        np.testing.assert_allclose(logits, expected[slot], rtol=0, atol=tolerance_of(io.summed_products) * largest)
    return onnx.load(folder / io.contrib.file, load_external_data=False)


@pytest.mark.parametrize("case", TAKEN)
def test_families_whose_attentions_are_taken(case: str, tmp_path: Path) -> None:
    model = check(case, tmp_path, TAKEN[case])
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("GroupQueryAttention") >= 2
    assert not {"Attention", "TensorScatter"} & set(kinds)
    assert not any(entry.name.startswith("mask") for entry in model.graph.input)


def test_what_is_not_taken_keeps_standard_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of two, beside the other."""

    def first_alone(program: Program) -> dict[Node, GroupQuery | str]:
        first, second = group_queries(program).items()
        return dict([first, (second[0], "it is not to be")])

    monkeypatch.setattr(contrib, "group_queries", first_alone)
    kinds = [node.op_type for node in check("llama", tmp_path, {}).graph.node]
    assert (kinds.count("GroupQueryAttention"), kinds.count("Attention"), kinds.count("TensorScatter")) == (1, 1, 2)


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("deepseek_v3", {"v_head_dim": 16}, "heads of values have 16 numbers, and those of keys 24"),
        ("llama", {"head_dim": 12}, "heads of 12 numbers, which isn't a multiple of 8"),
    ],
)
def test_attentions_that_are_not_taken_are_named(
    family: str, overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    io = emit(lowered(tiny_family(family, **overrides)), tmp_path, contrib=CONTEXT)
    assert io.contrib is not None and io.variants == ("standard",)
    assert not (tmp_path / "model.contrib.onnx").exists()
    assert len(io.contrib.standard) == 2
    assert all(reason in line for line in io.contrib.standard)


@pytest.mark.parametrize(("zero_point", "level"), [(False, 4), (True, 1)])
def test_products_with_4_bits_round_activations_as_the_recipe_does(
    zero_point: bool, level: int, tmp_path: Path
) -> None:
    """Not with offsets, which are multiplied with sums that nothing rounds."""
    int4 = WeightFormat(
        storage="int4", group_size=32, zero_point=zero_point, activation="int8", activation_group_size=32
    )
    program = lowered(
        tiny_family("llama"), PassContext(recipe=PassOptions(weights=WeightFormats(default=int4, embeddings=int4)))
    )
    io = emit(program, tmp_path, contrib=CONTEXT)
    assert io.of_variant("contrib").accuracy_level == level and io.accuracy_level == 1
    graph = onnx.load(tmp_path / "model.contrib.onnx", load_external_data=False).graph
    assert any(node.op_type == "GatherBlockQuantized" for node in graph.node) is not zero_point
    logits, floats = (
        np.concatenate(list(run_plan(LinearSession(tmp_path, io.of_variant(variant)), CHUNKS_ALONE).values()))
        for variant in ("contrib", "standard")
    )
    if level == 1:
        np.testing.assert_allclose(logits, floats, atol=1e-4)  # rounding of 32-bit floats: see ``check``
        return
    inputs = packed_inputs(program, [torch.tensor(tokens_of(slot)) for slot in SEQUENCES])
    expected = program.evaluate(inputs)[0].numpy()
    # A tie may be rounded the other way, which moves a logit by some thousandths; floats are off by some tenths.
    assert np.abs(logits - expected).max() < np.abs(floats - expected).max() / 10
