"""Whole programs of the cpu target, in 8 bits: the result of the pipeline and the target's fusions for two families."""

from __future__ import annotations

from pathlib import Path

import pytest

from enginewright.optimizer.pipeline.pipeline import choose_passes
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.print_program import print_program
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.plugins.cpu.compile.emitter import CpuEmitter
from tests.passes.captured import captured

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_golden(family: str, request: pytest.FixtureRequest) -> None:
    program = captured(family)
    passes, required = choose_passes({})
    context = PassContext(
        required, recipe=PassOptions(weights=load_recipe("int8").weights.model_copy(update={"smooth": False}))
    )
    PassManager([*passes, *CpuEmitter().passes()], context).run(program)
    steps = [f"{s.op} {s.attrs}  # {s.where}" for s in lower_program(program).program.steps]
    text = "\n".join([print_program(program), "steps", *steps, ""])
    path = GOLDEN / f"{family.lower()}.cpu.int8.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), (
        "what the cpu target gets has changed; if it should: pytest tests/optimizer/test_golden_programs.py "
        "--update-golden"
    )
