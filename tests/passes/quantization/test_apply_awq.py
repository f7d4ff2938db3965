"""AWQ on whole programs: the floats stay what they were, rounding costs less, and what can't be scaled is said."""

from __future__ import annotations

import math
from itertools import takewhile

import pytest
import torch

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext, PassRecord
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.framework.weight_formats import FormatOverride, Method, WeightFormats
from enginewright.passes.ir.clipped import Clipped, round_groups
from enginewright.passes.ir.prequantized import decode
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.apply_awq import ApplyAwq
from enginewright.runtime.shared.errors import PassError
from tests.passes.captured import captured, op_counts

INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
INT4_CHANNEL = WeightFormat(storage="int4", activation="int8")
INT4_64 = WeightFormat(storage="int4", group_size=64, zero_point=True, activation="int8", activation_group_size=64)


def sequences(*lengths: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(len(lengths))
    return tuple(torch.randint(0, 250, (n,), generator=generator, dtype=torch.int32) for n in lengths)


def prepared(family: str, formats: WeightFormats, **overrides: object) -> Program:
    """A program whose formats are chosen."""
    program = captured(family, **overrides)
    passes = takewhile(lambda p: p.name not in ("apply_awq", "quantize_linears"), default_pipeline())
    PassManager(list(passes), PassContext(recipe=PassOptions(weights=formats))).run(program)
    return program


def scale(program: Program, method: Method = "awq") -> PassRecord:
    context = PassContext(recipe=PassOptions(weights=WeightFormats(method=method)), calibration=sequences(48, 40, 30))
    return ApplyAwq().run(program, context)


def logits(program: Program, *, rounded: bool) -> torch.Tensor:
    """Computes those of other tokens than those of the calibration; weights as they will be, or before their
    rounding."""

    def read(name: str) -> torch.Tensor:
        expr = program.weights[name]
        return expr.base.evaluate() if isinstance(expr, Clipped) and not rounded else expr.evaluate()

    return program.evaluate(packed_inputs(program, sequences(33, 20)), read=read)[0]


def only_layers(default: WeightFormat, head: str = "lm_head") -> WeightFormats:
    return WeightFormats(default=default, overrides=(FormatOverride(layers=head, format=WeightFormat()),), method="awq")


@pytest.mark.parametrize(
    ("family", "default", "sizes"),
    [
        ("Llama", INT4, {}),
        ("Qwen2", INT4_64, {"hidden_size": 128, "intermediate_size": 192}),
        ("Gemma2", INT4, {}),
        ("Qwen2", INT4_CHANNEL, {"hidden_size": 96, "intermediate_size": 136}),
        ("Mixtral", INT4, {}),
    ],
)
def test_scaling_alone_changes_nothing_but_rounding(family: str, default: WeightFormat, sizes: dict[str, int]) -> None:
    program = prepared(family, only_layers(default), **sizes)
    before, ops = logits(program, rounded=False), op_counts(program)
    record = scale(program)
    assert op_counts(program) == ops
    assert record.matched == sum(isinstance(program.weights[n], Clipped) for n in program.weights) > 0
    alphas = [f.value for f in record.metrics if f.name == "alpha"]
    assert max(alphas) > 0
    after = logits(program, rounded=False)
    # Scaled weights are rounded twice more, and sums over K anew: c sqrt(K) eps with K together some 2000.
    assert (after - before).abs().max() <= 2 * math.sqrt(2000) * 1.2e-7 * before.abs().max()


@pytest.mark.parametrize(("default", "sizes"), [(INT4, {}), (INT4_64, {"hidden_size": 128, "intermediate_size": 192})])
def test_rounding_costs_less(default: WeightFormat, sizes: dict[str, int]) -> None:
    program = prepared("Llama", only_layers(default), **sizes)
    plain = program.copy()
    exact = logits(program, rounded=False)
    record = scale(program)
    names = {n: e.format for n in program.weights if isinstance(e := program.weights[n], Clipped)}

    def nearest(name: str) -> torch.Tensor:
        value, code_format = plain.weights[name].evaluate(), names.get(f"{name}.awq")
        return value if code_format is None else decode(round_groups(value, code_format, 1.0), code_format)

    without = plain.evaluate(packed_inputs(plain, sequences(33, 20)), read=nearest)[0]
    with_it = logits(program, rounded=True)
    # Random weights have no loud channels, with which AWQ is at its best: a quarter less here.
    assert (with_it - exact).square().mean() < 0.85 * (without - exact).square().mean()
    by_name = {name: [f.value for f in record.metrics if f.name == name] for name in ("error before", "error after")}
    assert all(a < b for b, a in zip(by_name["error before"], by_name["error after"], strict=True))
    assert len(by_name["error before"]) == 2 * 4  # qkv, o, gate_up, down of two layers


def test_what_can_not_be_scaled_is_clipped_and_said() -> None:
    program = prepared("GPT2", only_layers(INT4))
    before = logits(program, rounded=False)
    record = scale(program)
    assert [(r.where, "gelu" in r.reason) for r in record.rejected] == [
        ("transformer.h.0.mlp.c_proj", True),
        ("transformer.h.1.mlp.c_proj", True),
    ]
    assert record.matched == 8
    torch.testing.assert_close(logits(program, rounded=False), before, rtol=1e-4, atol=1e-5)


def test_provenance_is_kept() -> None:
    program = prepared("Llama", only_layers(INT4))
    parts = {n: program.weights[n].parts(0) for n in program.weights}
    scale(program)
    for name in program.weights:
        assert program.weights[name].parts(0) == parts[name.removesuffix(".awq")]
    assert "model.layers.0.input_layernorm.weight.awq" in program.weights


def test_the_same_tokens_make_the_same_weights() -> None:
    one, two = (prepared("Llama", only_layers(INT4)) for _ in range(2))
    for program in (one, two):
        scale(program)
    assert [one.weights[n].describe() for n in one.weights] == [two.weights[n].describe() for n in two.weights]


def test_nothing_is_done_for_other_methods_and_formats() -> None:
    program = prepared("Llama", only_layers(INT4))
    assert scale(program, "nearest").matched == 0
    assert (
        scale(prepared("Llama", WeightFormats(default=WeightFormat(storage="bf16", activation="bf16"))), "awq").matched
        == 0
    )


def test_without_calibration_tokens_it_says_so() -> None:
    program = prepared("Llama", only_layers(INT4))
    with pytest.raises(PassError, match="no calibration tokens"):
        ApplyAwq().run(program, PassContext(recipe=PassOptions(weights=WeightFormats(method="awq"))))
