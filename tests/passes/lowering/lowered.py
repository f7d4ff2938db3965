"""Lowers small programs and compares what the reference interpreter makes of them with their evaluation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.framework.base import PassContext
from enginewright.passes.ir.program import Program
from enginewright.passes.lowering.lower_program import Lowering, lower_program
from enginewright.runtime.shared.arena import plan_arena
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.step_schema import LOGITS
from tests.passes.lowering.reference_interpreter import Interpreter, stored
from tests.passes.small_programs import evaluate, random_sequences, whole_inputs

ew = torch.ops.ew
Call = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def lower(program: Program) -> Lowering:
    if program.output_name == LOGITS and program.nodes_of(ew.attention.default):
        LowerAttention().run(program, PassContext())
    lowering = lower_program(program)
    # Through JSON, as the runtime gets it.
    planned = LoweredProgram.from_json(plan_arena(lowering.program).to_json())
    return Lowering(planned, lowering.weights)


def interpreter(lowering: Lowering) -> Interpreter:
    uses = lowering.program.weights
    return Interpreter(
        lowering.program, {w.name: stored(lowering.weights[w.name].evaluate(), w.layout, w.dtype) for w in uses}
    )


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
