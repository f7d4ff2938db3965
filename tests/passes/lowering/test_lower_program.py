from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from enginewright.passes.lowering.lower_program import lower_program
from enginewright.runtime.shared.errors import UnsupportedModelError
from tests.passes.lowering.lowered import features, interpreter, lower, ops
from tests.passes.small_programs import (
    PagedEvaluation,
    Shape,
    Steps,
    captured_programs,
    decoder,
    program_from,
    random_sequences,
)

ew = torch.ops.ew


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


def test_the_same_program_gives_the_same_text() -> None:
    first, second = (lower(decoder(captured_programs()["norms"])).program.to_json() for _ in range(2))
    assert first == second
