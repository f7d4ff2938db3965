from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from enginewright.passes.framework.verify_program import verify_program
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.errors import PassError
from tests.passes.small_programs import program_from

aten, ew = torch.ops.aten, torch.ops.ew


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, 4))
        self.weight = nn.Parameter(torch.randn(6, 4))


def _program() -> Program:
    def call(m: nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = torch.tanh(ew.embedding(i["ids"], m.table))
        return ew.linear(torch.cat(x.split(2, 1), 1), m.weight, None)

    return program_from(call, Weights())


def test_a_captured_program_is_right() -> None:
    verify_program(_program())


def _tanh(program: Program) -> torch.fx.Node:
    return program.nodes_of(aten.tanh.default)[0]


def _drop_value(p: Program) -> None:
    del _tanh(p).meta["val"]


def _drop_provenance(p: Program) -> None:
    _tanh(p).meta["where"] = ()


def _wrong_shape(p: Program) -> None:
    _tanh(p).meta["val"] = p.value(p.logits)


def _wrong_dtype(p: Program) -> None:
    with p.fake_mode:
        _tanh(p).meta["val"] = _tanh(p).meta["val"].double()


def _out_of_order(p: Program) -> None:
    p.nodes_of(ew.embedding.default)[0].append(p.nodes_of(ew.linear.default)[0])


def _in_place(p: Program) -> None:
    _tanh(p).target = aten.tanh_.default


def _no_op(p: Program) -> None:
    _tanh(p).target = len


def _foreign(p: Program) -> None:
    _tanh(p).target = torch.ops.prims.sin.default


def _lost_weight(p: Program) -> None:
    p.weights.keep_only({"table"})


def _refused_arguments(p: Program) -> None:
    p.nodes_of(ew.linear.default)[0].args = (_tanh(p), p.weight("table"), p.inputs["ids"])


def _no_output(p: Program) -> None:
    p.graph.erase_node(p.output)


def _rank_three(p: Program) -> None:
    with p.inserting_before(p.output):
        p.output.args = ((p.call(aten.unsqueeze.default, p.logits, 0, where=("",)),),)


BROKEN: list[tuple[Callable[[Program], None], str]] = [
    (_drop_value, "node tanh .*has no value"),
    (_drop_provenance, "node tanh .*has no provenance"),
    (_wrong_shape, r"node tanh .*gives shape \(T, 4\), recorded is \(T, 6\)"),
    (_wrong_dtype, "node tanh .*gives torch.float32, recorded is torch.float64"),
    (_out_of_order, "uses a node that comes later"),
    (_in_place, "is not functional"),
    (_no_op, "isn't an op"),
    (_foreign, "ops of prims have no meaning here"),
    (_lost_weight, "the weight weight isn't in the store"),
    (_refused_arguments, "does not accept its arguments|gives shape"),
    (_no_output, "the program has no output"),
    (_rank_three, "the logits have rank 3, not 2"),
]


@pytest.mark.parametrize(("break_it", "message"), BROKEN, ids=[b.__name__.strip("_") for b, _ in BROKEN])
def test_broken_programs(break_it: Callable[[Program], None], message: str) -> None:
    program = _program()
    break_it(program)
    with pytest.raises(PassError, match=message):
        verify_program(program, after="this")


@pytest.mark.parametrize(("break_it", "message"), BROKEN, ids=[b.__name__.strip("_") for b, _ in BROKEN])
def test_what_breaks_after_a_verification_is_found_by_the_next(
    break_it: Callable[[Program], None], message: str
) -> None:
    program = _program()
    verify_program(program)
    assert _tanh(program) in program.verified
    break_it(program)
    with pytest.raises(PassError, match=message):
        verify_program(program)


def test_the_pass_that_ran_last_is_named() -> None:
    program = _program()
    _drop_value(program)
    with pytest.raises(PassError, match=r"^after this: "):
        verify_program(program, after="this")
