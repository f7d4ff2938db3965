from __future__ import annotations

import pytest
import torch

from enginewright.runtime.shared.step_schema import POOLED
from tests.passes.lowering.lowered import check, features, lower, ops
from tests.passes.small_programs import Shape, decoder, program_from

ew = torch.ops.ew


def _norm_of_rank_four(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i, 24).view(-1, 2, 3, 4)
    normed, total = ew.add_layer_norm(x.transpose(1, 2), x.transpose(1, 2) * 2, None, None, 1e-5)
    return ew.take_rows((ew.rms_norm(normed, None, 1e-6) + total).flatten(1), i["rows"])


def test_norms_of_rank_four_are_flattened() -> None:
    # One copy: the strides of a transposed view can't be flattened.
    assert ops(check(program_from(_norm_of_rank_four), atol=1e-5)).count("copy") == 1


def test_a_tied_table_is_stored_once() -> None:
    program = lower(decoder(Shape(windows=(0,)))).program
    assert [(w.layout, w.shape) for w in program.weights if w.name == "embed"] == [("panel32", (67, 32))]
    untied = lower(decoder(Shape(windows=(0,), tied=False))).program
    assert {w.name: w.layout for w in untied.weights if w.name in ("embed", "head")} == {
        "embed": "rows",
        "head": "panel32",
    }


def test_a_weight_needed_in_both_layouts_is_listed_twice() -> None:
    inner = torch.nn.Module()
    inner.w = torch.nn.Parameter(torch.randn(6, 6))

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(ew.linear(features(i), m.w, None), i["rows"]) + m.w[0]

    program = check(program_from(call, inner), atol=1e-5)
    assert {w.name: w.layout for w in program.weights if w.name.startswith("w")} == {"w": "panel32", "w.rows": "rows"}


@pytest.mark.parametrize("given", [(), ("sinks",), ("slopes", "biases"), ("sinks", "slopes", "biases")])
@pytest.mark.parametrize("causal", [True, False])
def test_an_encoder_is_lowered_without_a_cache(given: tuple[str, ...], causal: bool) -> None:
    inner = torch.nn.Module()
    shapes = {"sinks": (4,), "slopes": (4,), "biases": (4, 7)}
    for name in given:
        inner.register_buffer(name, torch.randn(shapes[name]))

    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        q = features(i, 32).view(-1, 4, 8)
        k = features(i, 16).view(-1, 2, 8)
        sinks, slopes, biases = (getattr(m, name, None) for name in shapes)
        y = ew.attention(q, k, k * 2, i["q_start"], 0, 0.3, 3, 0.0, sinks, slopes, causal, biases)
        return ew.pool(y.flatten(1), i["q_start"], "weighted")

    program = program_from(call, inner)
    program.output_name = POOLED
    lowered = check(program, atol=1e-4)
    assert lowered.cache_groups == () and list(lowered.outputs) == [POOLED]
    attention, pool = (step for step in lowered.steps if step.op in ("attention", "pool"))
    assert "dtype" not in attention.attrs and pool.op == "pool"


def test_keys_without_a_cache_are_bf16_where_attention_says_so() -> None:
    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        q = features(i, 16).view(-1, 2, 8)
        y = ew.attention(q, q, q, i["q_start"], 0, 0.3, 0, 0.0, None, causal=False, dtype="bf16")
        return ew.pool(y.flatten(1), i["q_start"], "mean")

    program = program_from(call)
    program.output_name = POOLED
    assert [step.attrs["dtype"] for step in lower(program).program.steps if step.op == "attention"] == ["bf16"]
