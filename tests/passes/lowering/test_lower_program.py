from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.base import PassContext
from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.lower_program import Lowering, lower_program
from enginewright.passes.memory.plan_arena import plan_arena
from enginewright.plugins.errors import UnsupportedModelError
from enginewright.plugins.lowered_program import LoweredProgram
from tests.passes.lowering.reference_interpreter import Interpreter, stored
from tests.passes.small_programs import (
    PagedEvaluation,
    Shape,
    Steps,
    captured_programs,
    decoder,
    evaluate,
    program_from,
    random_sequences,
    whole_inputs,
)

ew = torch.ops.ew
Call = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def lower(program: Program) -> Lowering:
    if program.nodes_of(ew.attention.default):
        LowerAttention().run(program, PassContext())
    lowering = lower_program(program)
    # Through JSON, as the runtime gets it.
    planned = LoweredProgram.from_json(plan_arena(lowering.program).to_json())
    return Lowering(planned, lowering.weights)


def interpreter(lowering: Lowering) -> Interpreter:
    uses = lowering.program.weights
    return Interpreter(lowering.program, {w.name: stored(lowering.weights[w.name].evaluate(), w.layout) for w in uses})


def check(program: Program, atol: float = 0.0) -> LoweredProgram:
    """Compares a program without attention at two batches; returns the lowered program."""
    lowering = lower(program)
    for lengths, rows in (((5, 2, 9), [3, 0, 15]), ((1,), [0]), ((3, 4), [])):
        inputs = whole_inputs(random_sequences(lengths, 7), rows)
        expected = evaluate(program, inputs)
        actual = interpreter(lowering).run(inputs)
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
    return lowering.program


def ops(program: LoweredProgram) -> list[str]:
    return [s.op + (f":{s.attrs['fn']}" if "fn" in s.attrs else "") for s in program.steps]


def features(inputs: dict[str, torch.Tensor], width: int = 6) -> torch.Tensor:
    """[T, width] of floats made from ids, in two steps: a cast and a product with a weight."""
    return inputs["ids"].float()[:, None] * torch.tensor([j * 0.25 - 1.1 for j in range(width)])


@pytest.mark.parametrize("name", list(captured_programs()))
@pytest.mark.parametrize("schedule", ["whole", "ragged", "decode"])
def test_decoder_equals_its_evaluation(name: str, schedule: str) -> None:
    paged = decoder(captured_programs()[name])
    lowering = lower(paged)
    machine, reference = interpreter(lowering), PagedEvaluation(paged)
    steps = Steps([g.name for g in paged.cache_groups])
    a, b, c = random_sequences((40, 3, 66), 67)
    plans: dict[str, list[dict[str, Sequence[int]]]] = {
        "whole": [{"a": a, "b": b, "c": c}],
        "ragged": [{"a": a[:7], "c": c[:33]}, {"c": c[33:], "a": a[7:8], "b": b}],
        "decode": [{"a": a[:38], "b": b[:1]}, {"b": b[1:2], "a": a[38:39]}, {"a": a[39:], "b": b[2:]}],
    }
    for chunks in plans[schedule]:
        # Same references, same order of operations: equal to the last bit, but for the strides that BLAS sees.
        torch.testing.assert_close(machine.run(steps.step(chunks)), reference.run(chunks), rtol=0, atol=1e-5)


def test_views_make_no_steps() -> None:
    program = lower(decoder(Shape(windows=(0,)))).program
    assert ops(program) == [
        "embedding",
        "rope_table",
        "rms_norm",
        *("linear",) * 3,
        *("rope",) * 2,
        "kv_write",
        "paged_attention",
        "linear",
        "elementwise:add",
        "rms_norm",
        "linear",
        "linear",
        "gated_activation",
        "linear",
        "elementwise:add",
        "rms_norm",
        "linear",
        "take_rows",
    ]
    gate, up, act = program.steps[13], program.steps[14], program.steps[15]
    assert gate.outputs[0].name == up.outputs[0].name == act.inputs[0].name, "both write into the cat's buffer"
    assert up.outputs[0].offset == 48
    assert program.steps[8].inputs[-1].name == "full/0"
    assert program.steps[0].where == "" and program.steps[2].where == "layers.0.input_norm"


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


def _strided(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i, 24).view(-1, 4, 6)
    y = x.transpose(1, 2)[:, 1:5:2, :].permute(0, 2, 1)  # [T, 4, 2]
    z = x[:, :, -2:].unsqueeze(2).expand(-1, 4, 3, 2).select(2, 1)  # [T, 4, 2]
    return ew.take_rows((y * 2 + z).flatten(1), i["rows"])


def _copied(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i, 12).view(-1, 3, 4).transpose(1, 2).reshape(-1, 12)
    return ew.take_rows(x, i["rows"])


def _cat_of_views(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i, 12)
    parts = torch.cat((x[:, 3:6], torch.tanh(x[:, :2]), x[:, :1], x[:, :1]), -1)
    return ew.take_rows(torch.cat((parts.view(-1, 7, 1), x[:, :7].view(-1, 7, 1)), 1).flatten(1), i["rows"])


def _chunks(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    a, b, c = features(i, 12).split([4, 2, 6], -1)
    d, e = a.unbind(-1)[:2]
    return ew.take_rows((c * d[:, None] - b.sum(-1, keepdim=True) / e.unsqueeze(1)).unsqueeze(1).squeeze(1), i["rows"])


def _scalars(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i)
    y = 1.0 - torch.tanh(x / 3.0) * 3.0 + torch.add(x, x, alpha=0.5) + 2.0**x
    return ew.take_rows(y.clamp(-4.0, 4.0) + torch.reciprocal(x.abs() + 1.0), i["rows"])


def _integers(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    moved = (i["positions"] + 2) * 3 - i["ids"]
    return ew.take_rows(moved.float()[:, None] * torch.tensor([0.0, 0.5, 1.0]), i["rows"])


def _reduced(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i, 12).view(-1, 3, 4)
    y = x.mean(-1) + x.sum(1)[:, :3] + x.transpose(1, 2).amax(2)[:, 1:] + x.mean((1, 2))[:, None]
    return ew.take_rows(y, i["rows"])


def _parts_of_inputs(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = i["ids"][:, None] * torch.tensor([[1, 2, 3]]) + i["ids"][:, None]  # one copy of ids serves both
    return ew.take_rows(x.float(), i["rows"])


def _looked_up_by_part(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    table = torch.tensor([[0.5 * j + k for j in range(4)] for k in range(20)])
    ends = ew.embedding(i["q_start"][1:], table)  # [B, 4]
    return ew.take_rows(features(i, 4) + ends.mean(1)[:1, None], i["rows"])


def _rank_five(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i, 24).view(-1, 2, 3, 2, 2)
    return ew.take_rows((x * x).flatten(1), i["rows"])


def _norm_of_rank_four(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i, 24).view(-1, 2, 3, 4)
    normed, total = ew.add_layer_norm(x.transpose(1, 2), x.transpose(1, 2) * 2, None, None, 1e-5)
    return ew.take_rows((ew.rms_norm(normed, None, 1e-6) + total).flatten(1), i["rows"])


def _where(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
    x = features(i)
    return ew.take_rows(torch.where(torch.tensor([True, False] * 3), x, -x), i["rows"])


@pytest.mark.parametrize(
    ("call", "copies"),
    [
        (_strided, 0),
        (_copied, 1),
        (_cat_of_views, 5),
        (_chunks, 0),
        (_scalars, 0),
        (_integers, 0),
        (_reduced, 2),
        (_parts_of_inputs, 1),
        (_looked_up_by_part, 1),
        (_rank_five, 0),
        (_norm_of_rank_four, 1),
        (_where, 0),
    ],
)
def test_plain_ops(call: Call, copies: int) -> None:
    # The same torch functions run on other strides, where vector and scalar code may differ in the last bits.
    program = check(program_from(call), atol=1e-5)
    assert ops(program).count("copy") == copies


def test_an_op_without_a_kernel_is_named_with_its_module() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.bessel_j0(x)

    inner = torch.nn.Module()
    inner.mlp = Block()
    program = program_from(lambda m, i: ew.take_rows(m.mlp(features(i)), i["rows"]), inner)
    message = "aten.special_bessel_j0 at mlp: the cpu target has no kernel for it"
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        lower_program(program)


def test_refuses_what_the_kernels_would_do_differently() -> None:
    def rounds(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(torch.div(features(i), 2.0, rounding_mode="floor"), i["rows"])

    def over_tokens(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(features(i) - features(i).sum(0, keepdim=True), i["rows"])

    def half(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return ew.take_rows(features(i).half() * 2, i["rows"])

    for call, reason in ((rounds, "rounds"), (over_tokens, "over tokens"), (half, "float16")):
        with pytest.raises(UnsupportedModelError, match=reason):
            lower_program(program_from(call))


def test_the_same_program_gives_the_same_text() -> None:
    first, second = (lower(decoder(captured_programs()["norms"])).program.to_json() for _ in range(2))
    assert first == second
