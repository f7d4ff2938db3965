"""Whole programs after pruning, and with weights that are 2:4 as they are lowered: what is left has the shapes it says.

By magnitude or with nothing compensated, whose choices are the same everywhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.pipeline.pipeline import choose_passes
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.print_program import print_program
from enginewright.passes.framework.pruning import Pruning
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.plugins.cpu.compile.emitter import CpuEmitter
from tests.passes.captured import captured
from tests.passes.sparsity.pruned import CALIBRATION

GOLDEN = Path(__file__).parents[2] / "golden"
FAMILIES = ["Llama", "Gemma2", "GPT2"]
SPARSE = WeightFormat(storage="int8", group_size=32, activation="int8", activation_group_size=32, sparsity="2:4")


def compare(text: str, name: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / name
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), "if it should: pytest tests/passes/sparsity/test_golden_shapes.py --update-golden"


@pytest.mark.parametrize("family", FAMILIES)
def test_pruned(family: str, request: pytest.FixtureRequest) -> None:
    program = captured(family)
    last = "transformer.h.1" if family == "GPT2" else "model.layers.1"
    pruning = Pruning(channels=0.25, heads=0.5, drop=(last,), correct=False)
    passes, required = choose_passes({})
    PassManager(passes, PassContext(required, calibration=CALIBRATION, pruning=pruning)).run(program)
    compare(print_program(program) + "\n", f"{family.lower()}.pruned.txt", request)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_of_four(family: str, request: pytest.FixtureRequest) -> None:
    program = captured(family)
    formats = WeightFormats(default=SPARSE, sparsify="magnitude")
    passes, required = choose_passes({})
    PassManager([*passes, *CpuEmitter().passes()], PassContext(required, formats)).run(program)
    steps = [f"{s.op} {s.attrs}  # {s.where}" for s in lower_program(program).program.steps]
    layouts = [f"{use.name} {use.dtype} {use.shape} {use.layout}" for use in lower_program(program).program.weights]
    compare("\n".join(["steps", *steps, "weights", *layouts, ""]), f"{family.lower()}.cpu.sparse8.txt", request)
