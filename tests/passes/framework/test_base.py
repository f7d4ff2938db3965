from __future__ import annotations

import pytest
import torch
from torch import nn

from enginewright.passes.framework.base import (
    Condition,
    Pass,
    PassContext,
    PassResult,
    Rejection,
    contains,
    describe_node,
    free_of,
)
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.errors import PassError
from tests.passes.small_programs import program_from

aten, ew = torch.ops.aten, torch.ops.ew


class Table(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, width))


def _program(width: int = 4) -> Program:
    return program_from(lambda m, i: torch.tanh(ew.embedding(i["ids"], m.table)), Table(width))


class TanhToRelu(Pass):
    """Changes a program's meaning; enough to see what run does around it."""

    name = "tanh_to_relu"
    requires = (contains(aten.tanh.default, name="there is a tanh"),)
    ensures = (free_of(aten.tanh.default, name="no tanh is left"),)

    def call(self, program: Program, context: PassContext) -> PassResult:
        result = PassResult()
        for node in program.nodes_of(aten.tanh.default):
            with program.inserting_before(node):
                new = program.call(aten.relu.default, node.args[0], where=node.meta["where"])
            program.replace(node, new)
            result.matched += 1
        return result


@pytest.mark.parametrize("width", [4, 9])
def test_run_reports(width: int) -> None:
    program = _program(width)
    record = TanhToRelu().run(program, PassContext())
    assert (record.name, record.matched, record.rejected) == ("tanh_to_relu", 1, ())
    assert record.nodes_before >= record.nodes_after == len(program.graph.nodes)
    assert record.seconds >= 0


def test_a_requirement_that_does_not_hold() -> None:
    program = _program()
    TanhToRelu().run(program, PassContext())
    with pytest.raises(PassError, match=r"tanh_to_relu requires 'there is a tanh'.*no aten.tanh.default"):
        TanhToRelu().run(program, PassContext())


def test_what_is_ensured_is_checked() -> None:
    class Lazy(Pass):
        name = "lazy"
        ensures = (free_of(aten.tanh.default, name="no tanh is left"),)

        def call(self, program: Program, context: PassContext) -> PassResult:
            return PassResult()

    with pytest.raises(PassError, match=r"lazy ensures 'no tanh is left', which doesn't hold: aten.tanh.default at"):
        Lazy().run(_program(), PassContext())


@pytest.mark.parametrize("matched", [0, 1])
def test_the_verifier_runs_whatever_a_pass_reports(matched: int) -> None:
    class Breaking(Pass):
        name = "breaking"

        def call(self, program: Program, context: PassContext) -> PassResult:
            del program.nodes_of(aten.tanh.default)[0].meta["where"]
            return PassResult(matched=matched)

    with pytest.raises(PassError, match=r"after breaking: node tanh .*has no provenance"):
        Breaking().run(_program(), PassContext())


def test_a_required_pass_must_match() -> None:
    class Picky(Pass):
        name = "picky"

        def call(self, program: Program, context: PassContext) -> PassResult:
            return PassResult(rejected=[Rejection("tanh", "layers.0", "too round")])

    assert Picky().run(_program(), PassContext()).rejected[0].reason == "too round"
    with pytest.raises(PassError, match=r"picky is required and matched nothing: tanh \(layers.0\): too round") as e:
        Picky().run(_program(), PassContext(required=frozenset({"picky"})))
    assert e.value.hint is not None


def test_run_can_not_be_overridden() -> None:
    with pytest.raises(TypeError, match="Sly overrides run"):
        type("Sly", (TanhToRelu,), {"run": lambda self, program, context: None})


def test_conditions_and_descriptions() -> None:
    program = _program()
    (tanh,) = program.nodes_of(aten.tanh.default)
    tanh.meta["where"] = ("layers.0.mlp", "layers.1.mlp")
    assert describe_node(tanh) == "aten.tanh.default at layers.0.mlp, layers.1.mlp (node tanh)"
    assert free_of(aten.relu.default, name="x").check(program) == []
    assert len(free_of(aten.tanh.default, name="x").check(program)) == 1
    assert contains(aten.tanh.default, name="x").check(program) == []
    assert Condition("never", lambda p: ["no"]).check(program) == ["no"]
