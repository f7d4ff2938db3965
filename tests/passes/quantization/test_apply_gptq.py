"""GPTQ through whole programs: which weights get integers, what they are worth, and what is rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.node import Node

from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.formats.round_to_4_bits import round_symmetric
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext, PassRecord
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.framework.weight_formats import FormatOverride, GptqOptions, WeightFormats
from enginewright.passes.ir.chosen_codes import ChosenCodes
from enginewright.passes.ir.prequantized import CodeFormat
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.provenance import WHERE
from enginewright.passes.ops.quantization import quantize_activation
from enginewright.passes.quantization import held_out
from enginewright.passes.quantization.apply_gptq import LARGEST_INPUT, ApplyGptq
from enginewright.passes.quantization.held_out import (
    DAMPING,
    ERROR,
    HELD_OUT_ERROR,
    HELD_OUT_NEAREST,
    NEAREST_ERROR,
)
from enginewright.runtime.shared.errors import CapacityError, PassError
from tests.passes.captured import captured
from tests.passes.ir.test_quantized import Known
from tests.passes.small_programs import random_sequences

ew = torch.ops.ew
INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)
INT8 = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32)
GPTQ = WeightFormats(default=INT4, embeddings=INT8, method="gptq")
SEQUENCES = tuple(map(torch.tensor, random_sequences([48] * 6, 250, seed=1)))


def formatted(formats: WeightFormats, family: str = "Llama", **overrides: Any) -> Program:
    """A program up to the choice of formats."""
    program = captured(family, **overrides)
    names = [p.name for p in default_pipeline()]
    passes = default_pipeline()[: names.index("choose_formats") + 1]
    PassManager(passes, PassContext(recipe=PassOptions(weights=formats))).run(program)
    return program


def chosen(program: Program) -> dict[str, ChosenCodes]:
    codes_by_name = {name: program.weights[name] for name in program.weights}
    return {name: expr for name, expr in codes_by_name.items() if isinstance(expr, ChosenCodes)}


def run(program: Program, formats: WeightFormats = GPTQ, **context: Any) -> PassRecord:
    options: dict[str, Any] = {"recipe": PassOptions(weights=formats), "calibration": SEQUENCES} | context
    return ApplyGptq().run(program, PassContext(**options))


def metrics(record: PassRecord, name: str) -> list[float]:
    return [f.value for f in record.metrics if f.name == name]


def logits(program: Program, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    return program.evaluate(packed_inputs(program, sequences))[0]


@pytest.mark.parametrize(("family", "overrides"), [("Llama", {}), ("GPT2", {}), ("Qwen3", {"hidden_size": 96})])
def test_every_linear_of_4_bits_gets_integers(family: str, overrides: dict[str, Any]) -> None:
    program = formatted(GPTQ, family, **overrides)
    record = run(program)
    linears = [n for n in program.nodes_of(ew.linear.default) if n.meta["format"] == INT4]
    assert record.matched == len(linears) == 8
    assert {str(n.args[1].target) for n in linears} == set(chosen(program))  # type: ignore[union-attr]
    assert all(e.code_format == CodeFormat(4, 32) for e in chosen(program).values())
    assert len(metrics(record, LARGEST_INPUT)) == len(metrics(record, ERROR)) == 8
    assert set(metrics(record, DAMPING)) == {GptqOptions().damping}
    pairs = list(zip(metrics(record, ERROR), metrics(record, NEAREST_ERROR), strict=True))
    assert sum(ours < nearest for ours, nearest in pairs) >= 7  # rounding errors before it differ, too
    assert sum(ours for ours, _ in pairs) < 0.9 * sum(nearest for _, nearest in pairs)


def test_integers_with_one_scale_a_channel() -> None:
    program = formatted(
        GPTQ.model_copy(update={"default": WeightFormat(storage="int4", activation="int8")}), "Qwen3", hidden_size=96
    )
    record = run(program)
    assert {e.code_format for e in chosen(program).values()} == {
        CodeFormat(4, 96),
        CodeFormat(4, 64),
        CodeFormat(4, 128),
    }
    pairs = list(zip(metrics(record, ERROR), metrics(record, NEAREST_ERROR), strict=True))
    assert all(ours <= nearest for ours, nearest in pairs)  # equal where the nearest were better
    assert sum(ours for ours, _ in pairs) < 0.9 * sum(nearest for _, nearest in pairs)


def inputs_of(program: Program, node: Node, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """The input of a linear, [M, K], rounded as its format rounds it."""
    inputs: list[torch.Tensor] = []

    def compute(at: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if at is node:
            inputs.append(args[0].reshape(-1, args[0].shape[-1]))
        return at.target(*args, **kwargs)  # type: ignore[operator]

    program.evaluate(packed_inputs(program, sequences), compute=compute)
    values, scales, _ = quantize_activation(inputs[0], 32)
    return (values.unflatten(-1, (-1, 32)).float() * scales.float()[..., None]).flatten(-2)


@pytest.mark.parametrize("hidden", [64, 96])
@pytest.mark.parametrize(("damping", "count"), [(1e-4, 2), (0.1, 32)])
def test_no_output_is_worse_than_of_the_nearest_on_tokens_held_out(hidden: int, damping: float, count: int) -> None:
    """It looks at the first linear, whose input nothing before it changes. Seven of eight tokens are fitted to: of 96
    about as many as it has columns, and without damping they are fitted too well."""
    tokens = tuple(map(torch.tensor, random_sequences([48] * count, 250, seed=1)))
    formats = GPTQ.model_copy(update={"gptq": GptqOptions(damping=damping)})
    program = formatted(formats, hidden_size=hidden)
    node = program.nodes_of(ew.linear.default)[0]
    weight = program.weight_of(node.args[1])
    assert weight is not None
    exact, x = weight.evaluate(), inputs_of(program, node, tokens)
    record = run(program, formats, calibration=tokens)
    (codes,) = [e.codes() for e in list(chosen(program).values())[:1]]
    values, scales = round_symmetric(exact.unflatten(-1, (-1, 32)))
    nearest = (values.float() * scales.float()[..., None]).flatten(-2)
    rounded = (codes.values.unflatten(-1, (-1, 32)).float() * codes.scales.float()[..., None]).flatten(-2)
    run_of = 48 * count // 32
    unseen = x[[i for i in range(len(x)) if i // run_of % 8 == 7]]
    unseen = unseen[:: max(1, len(unseen) // 512)]
    errors = [float((unseen @ (w - exact).t()).norm() / (unseen @ exact.t()).norm()) for w in (rounded, nearest)]
    assert errors[0] <= errors[1] * (1 + 1e-5)  # sums of some hundred float32 terms, in another order
    assert errors == pytest.approx([metrics(record, n)[0] for n in (HELD_OUT_ERROR, HELD_OUT_NEAREST)], rel=1e-4)
    where = " + ".join(node.meta[WHERE])
    reasons = [r.reason for r in record.rejected if r.where == where]
    if damping < 0.01:
        assert torch.equal(codes.values, values.flatten(-2).to(torch.int8))
        assert "rounded to the nearest, which is better on held-out tokens (a relative error of 0.0" in reasons[0]
    else:
        assert errors[0] < 0.97 * errors[1] and not reasons
    for own_error, other in zip(metrics(record, HELD_OUT_ERROR), metrics(record, HELD_OUT_NEAREST), strict=True):
        assert own_error <= other


@pytest.mark.parametrize("option", [GptqOptions(damping=1.0), GptqOptions(activation_order=False)])
@pytest.mark.parametrize("hidden", [64, 96])
def test_damping_and_order_change_the_integers(option: GptqOptions, hidden: int) -> None:
    usual, other = formatted(GPTQ, hidden_size=hidden), formatted(GPTQ, hidden_size=hidden)
    run(usual)
    record = run(other, GPTQ.model_copy(update={"gptq": option}))
    pairs = list(zip(chosen(usual).values(), chosen(other).values(), strict=True))
    assert any(not torch.equal(a.codes().values, b.codes().values) for a, b in pairs)
    assert set(metrics(record, DAMPING)) == {option.damping}


@pytest.mark.parametrize("hidden", [64, 96])
def test_the_program_is_closer_to_the_source(hidden: int) -> None:
    """On tokens of the same kind that it has not seen. Half of the error is the activations' rounding, which no choice
    of integers changes, so that what is left is not much less than before."""
    many = tuple(map(torch.tensor, random_sequences([64] * 24, 250, seed=1)))
    unseen = list(map(torch.tensor, random_sequences([40, 40], 250, seed=9)))
    exact = logits(formatted(WeightFormats(), hidden_size=hidden), unseen)
    errors = []
    for method in ("nearest", "gptq"):
        formats = GPTQ.model_copy(update={"method": method})
        program = formatted(formats, hidden_size=hidden)
        run(program, formats, calibration=many)
        rest = [p for p in default_pipeline() if p.name in ("quantize_linears", "quantize_embeddings")]
        PassManager(rest, PassContext(recipe=PassOptions(weights=formats))).run(program)
        assert not program.nodes_of(ew.embedding.default)
        errors.append(float((logits(program, unseen) - exact).norm() / exact.norm()))
    assert errors[1] < 0.95 * errors[0]


def test_integers_go_into_the_bundle_as_they_were_chosen(tmp_path: Path) -> None:
    """Files or memory make no difference, and quantizing takes the codes as they are."""
    in_memory, in_files = formatted(GPTQ), formatted(GPTQ)
    run(in_memory)
    run(in_files, scratch=tmp_path)
    assert chosen(in_memory) == chosen(in_files)
    assert len(list(tmp_path.iterdir())) == 8
    first = next(iter(chosen(in_files).values()))
    before = first.codes()
    rest = [p for p in default_pipeline() if p.name == "quantize_linears"]
    PassManager(rest, PassContext(recipe=PassOptions(weights=GPTQ))).run(in_files)
    node = in_files.nodes_of(ew.quantized_linear.default)[0]
    values = in_files.weight_of(node.args[3])
    assert values is not None
    assert torch.equal(values.evaluate(), before.values)


def test_sequences_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence more changes the sums, but not what the others give: twice the same one changes nothing but scale."""
    monkeypatch.setattr(held_out, "held_out_tokens", lambda tokens: torch.zeros(tokens, dtype=torch.bool))
    once, twice = formatted(GPTQ), formatted(GPTQ)
    run(once, calibration=SEQUENCES[:3])
    run(twice, calibration=SEQUENCES[:3] * 2)
    pairs = zip(chosen(once).values(), chosen(twice).values(), strict=True)
    equal = [float((one.codes().values == other.codes().values).float().mean()) for one, other in pairs]
    # Sums of twice as many terms are rounded otherwise; a value halfway between two integers may differ, and what
    # comes after it, layer by layer.
    assert min(equal[:4]) > 0.98 and min(equal) > 0.9


def test_what_is_not_of_4_bits_is_left_alone() -> None:
    overrides = (FormatOverride(layers="model.layers.0.*", format=INT8),)
    formats = GPTQ.model_copy(update={"overrides": overrides})
    program = formatted(formats)
    assert run(program, formats).matched == 4
    assert all("layers.1" in name for name in chosen(program))
    for other in (GPTQ.model_copy(update={"method": "nearest"}), WeightFormats(default=INT8, method="gptq")):
        program = formatted(other)
        assert run(program, other).matched == 0
        assert not chosen(program)


def test_integers_that_were_chosen_before_are_kept() -> None:
    program = formatted(GPTQ)
    run(program)
    before = chosen(program)
    record = run(program)
    assert record.matched == 0
    assert chosen(program) == before
    assert record.rejected == ()


def test_integers_that_a_file_has_are_kept() -> None:
    program = formatted(GPTQ)
    (weight,) = [n for n in program.graph.nodes if n.target == "model.layers.1.self_attn.o_proj.weight"]
    known = Known(int(program.value(weight).shape[0]), CodeFormat(bits=4, group_size=32, offsets=False))
    program.change_weight(weight, known)
    record = run(program)
    assert [r.reason for r in record.rejected] == ["its file has integers of that format, which it keeps"]
    assert program.weights[str(weight.target)] == known


def test_without_tokens_it_is_an_error() -> None:
    with pytest.raises(PassError, match="apply_gptq has no calibration tokens") as error:
        run(formatted(GPTQ), calibration=())
    assert error.value.hint


def test_experts_get_integers_of_their_own_tokens() -> None:
    """Experts that too few tokens reach are rounded to the nearest, and named."""
    program = formatted(GPTQ, "Mixtral", num_local_experts=4, num_experts_per_tok=2)
    record = run(program)
    grouped = program.nodes_of(ew.grouped_linear.default)
    assert len(grouped) == 4
    assert all(str(n.args[2].target) in chosen(program) for n in grouped)  # type: ignore[union-attr]
    few = formatted(GPTQ, "Mixtral", num_local_experts=4, num_experts_per_tok=2)
    rejected = run(few, calibration=SEQUENCES[:1]).rejected
    assert len(rejected) == 4
    assert all("got fewer than 64 tokens" in r.reason for r in rejected)
    assert len(record.rejected) < 4


def test_as_many_sequences_as_there_is_room_for() -> None:
    program = formatted(GPTQ)
    record = run(program, memory_budget=1 << 30)
    assert not record.rejected
    tight = run(formatted(GPTQ), memory_budget=600_000)
    first, *others = tight.rejected
    assert first.where == "calibration" and "of 6 sequences fit" in first.reason
    assert all("better on held-out tokens" in r.reason for r in others)
    with pytest.raises(CapacityError, match=r"takes [\d,]+ bytes") as error:
        run(formatted(GPTQ), memory_budget=1000)
    assert "bytes more" in str(error.value.hint)


def test_progress_is_told_layer_by_layer() -> None:
    calls: list[tuple[int, int]] = []
    run(formatted(GPTQ), progress=lambda done, total, where: calls.append((done, total)))
    assert calls == [(i, 8) for i in range(9)]
