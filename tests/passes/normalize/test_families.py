"""All normalising passes together, on whole decoders: structure, numbers, and the programs' text."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest
import torch

from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.print_program import print_program
from enginewright.passes.ir.program import Program
from tests.conftest import TINY_FAMILIES
from tests.passes.captured import captured, eager_logits, normalized, normalizing_passes, op_counts, packed

# Float32 sums in another order: logits of these models are of size 1 to 10, and differ by up to 6e-6.
TOLERANCE = 1e-5

MAY_REMAIN = {
    "aten.add", "aten.mul", "aten.div", "aten.tanh", "aten.gelu",
    "aten.view", "aten.slice", "aten.transpose", "aten.unsqueeze", "aten.select", "aten.cat",
}  # fmt: skip

# Of 2 layers. Views are counted by the test of their own.
_GATED = {"aten.cat": 2, "ew.gated_activation": 2, "aten.add": 4}
_ROTATED = {"ew.embedding": 1, "ew.rope_table": 1, "ew.rope": 4, "ew.attention": 2, "ew.take_rows": 1}
_LLAMA = {**_ROTATED, **_GATED, "ew.rms_norm": 5, "ew.linear": 15}
OPS: dict[str, dict[str, int]] = {
    "Llama": _LLAMA,
    "Qwen2": _LLAMA,
    "Qwen3": {**_LLAMA, "ew.rms_norm": 9},
    "Mistral": _LLAMA,
    "Gemma2": {**_LLAMA, "ew.rms_norm": 9, "aten.mul": 2, "aten.div": 1, "aten.tanh": 1},
    "GPT2": {
        "ew.embedding": 2, "ew.layer_norm": 5, "ew.linear": 9, "ew.attention": 2, "ew.take_rows": 1,
        "aten.gelu": 2, "aten.add": 5,
    },
    "Phi3": {**_ROTATED, "ew.rms_norm": 5, "ew.linear": 9, "ew.gated_activation": 2, "aten.add": 4},
    "GPTNeoX": {**_ROTATED, "ew.layer_norm": 5, "ew.linear": 9, "aten.gelu": 2, "aten.add": 4},
    "Cohere": {**_ROTATED, **_GATED, "ew.layer_norm": 3, "ew.linear": 15, "aten.mul": 1},
    "Glm": {**_ROTATED, "ew.rms_norm": 5, "ew.linear": 13, "ew.gated_activation": 2, "aten.add": 4},
    "StableLm": {**_ROTATED, **_GATED, "ew.layer_norm": 5, "ew.linear": 15},
}  # fmt: skip
VIEWS = {"aten.view", "aten.slice", "aten.transpose", "aten.unsqueeze", "aten.select"}


@cache
def _normalized(family: str) -> Program:
    return normalized(family)[0]


def test_the_families_of_the_runtime_are_all_here() -> None:
    assert set(TINY_FAMILIES) <= set(OPS)


@pytest.mark.parametrize("family", OPS)
def test_structure(family: str) -> None:
    program = _normalized(family)
    counts = op_counts(program)
    assert Counter({op: n for op, n in counts.items() if op not in VIEWS}) == Counter(OPS[family])
    assert {op for op in counts if op.startswith("aten.")} <= MAY_REMAIN


@pytest.mark.parametrize("family", OPS)
def test_no_value_keeps_a_batch_dimension(family: str) -> None:
    program = _normalized(family)
    for node in program.graph.nodes:
        if node.op == "call_function":
            assert str(program.shape(node)[0]) in ("T", "R"), node.format_node()
    # q, k and v reach attention as views and ropes of linears: nothing is transposed on the way.
    assert not {"aten.transpose", "aten.permute", "aten.clone", "aten._to_copy"} & set(op_counts(program))


@pytest.mark.parametrize("family", OPS)
@pytest.mark.parametrize("lengths", [(5, 9), (1, 23, 2)])
def test_numbers(family: str, lengths: tuple[int, ...]) -> None:
    inputs = packed(lengths)
    before = captured(family).evaluate(inputs)[0]
    after = _normalized(family).evaluate(inputs)[0]
    torch.testing.assert_close(after, before, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(after, eager_logits(family, inputs), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Llama", {"num_key_value_heads": 1}),  # heads of size 1 must not be taken for the batch
        ("Llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
        ("Phi3", {"partial_rotary_factor": 0.5}),
        ("Cohere", {"use_qk_norm": True}),
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ],
)
def test_variants(family: str, overrides: dict[str, object]) -> None:
    program, _ = normalized(family, **overrides)
    assert op_counts(program)["ew.rope"] == 4
    inputs = packed((3, 8))
    expected = eager_logits(family, inputs, **overrides)
    torch.testing.assert_close(program.evaluate(inputs)[0], expected, rtol=0, atol=TOLERANCE)


def test_the_head_norms_of_cohere_keep_their_weight_apart() -> None:
    program, records = normalized("Cohere", use_qk_norm=True)
    assert op_counts(program)["ew.layer_norm"] == 7
    assert op_counts(program)["aten.mul"] == 1 + 4
    reasons = [r.reason for record in records for r in record.rejected]
    assert any(re.search(r"the weight has the shape \[4, 16\], not \[16\]", r) for r in reasons)


def test_provenance_names_every_layer() -> None:
    program, _ = normalized("Llama")
    ropes = [n for n in program.graph.nodes if n.target is torch.ops.ew.rope.default]
    assert all(any(f"layers.{i // 2}.self_attn" in w for w in n.meta["where"]) for i, n in enumerate(ropes))
    norm = next(n for n in program.graph.nodes if n.target is torch.ops.ew.rms_norm.default)
    assert norm.meta["where"] == ("model.layers.0.input_layernorm",)


def test_a_second_run_changes_nothing() -> None:
    program, _ = normalized("Phi3")
    text = print_program(program)
    for one in normalizing_passes():
        one.run(program, PassContext())
    assert print_program(program) == text
