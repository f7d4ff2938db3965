"""Tiny models of real families, through the whole pipeline, equal their captured program over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from enginewright.optimizer.capture import capture
from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.runtime.shared.arena import plan_arena
from enginewright.runtime.shared.lowered_program import LoweredProgram
from tests.passes.lowering.reference_interpreter import Interpreter, stored
from tests.passes.small_programs import Steps, evaluate, random_sequences, whole_inputs

# Fused products, norms and sums round in another order: float32, logits of size 10.
TOLERANCE = 3e-5


def test_family(tiny_family: str, tiny_model: Callable[..., Any]) -> None:
    program = capture(tiny_model(tiny_family)).program
    a, b, c, d = random_sequences((40, 1, 70, 3), 256)
    expected = evaluate(program, whole_inputs([a, b, c, d]))
    before = evaluate(program, whole_inputs([a[:39], c[:33]]))

    PassManager(default_pipeline()).run(program)
    lowering = lower_program(program)
    planned = LoweredProgram.from_json(plan_arena(lowering.program).to_json())
    assert not [s.op for s in planned.steps if s.op == "copy"]
    weights = {w.name: stored(lowering.weights[w.name].evaluate(), w.layout, w.dtype) for w in planned.weights}

    def logits(schedule: Sequence[dict[str, Sequence[int]]]) -> list[torch.Tensor]:
        machine = Interpreter(planned, weights)
        steps = Steps([g.name for g in planned.cache_groups])
        return [machine.run(steps.step(chunks)) for chunks in schedule]

    (whole,) = logits([{"a": a, "b": b, "c": c, "d": d}])
    torch.testing.assert_close(whole, expected, rtol=0, atol=TOLERANCE)
    # Chunks in a ragged batch, then a step of decoding beside new prompts.
    _, middle, last = logits(
        [{"a": a[:20], "c": c[:5]}, {"c": c[5:33], "a": a[20:39]}, {"a": a[39:], "b": b, "c": c[33:], "d": d}]
    )
    torch.testing.assert_close(middle.flip(0), before, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(last, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Phi3", "GPT2"])
def test_fusions_leave_four_linears_a_layer(family: str, tiny_model: Callable[..., Any]) -> None:
    program = capture(tiny_model(family)).program
    PassManager(default_pipeline()).run(program)
    steps = plan_arena(lower_program(program).program).steps
    assert [s.op for s in steps].count("linear") == 2 * 4 + 1
    rows = [s.outputs[0].shape[0].r for s in steps if s.op == "linear"]
    assert rows == [0] * 5 + [1] * 4, "from the last attention on, sampled rows alone"
