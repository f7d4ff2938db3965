from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.fx.node import Node

from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.match import (
    Anything,
    Bind,
    Call,
    Match,
    Number,
    Pattern,
    RewritePass,
    Rule,
    Weight,
    bound_arguments,
)
from enginewright.passes.ir.program import Program
from tests.passes.rewriting import op_counts
from tests.passes.small_programs import program_from

aten, ew = torch.ops.aten, torch.ops.ew


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, 4))
        self.scale = nn.Parameter(torch.randn(4))


def _program(make: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Program:
    return program_from(lambda m, i: make(m, ew.embedding(i["ids"], m.table)), Weights())


def _matches(pattern: Pattern, make: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> list[Match]:
    program = _program(make)
    root = program.logits
    return list(pattern.matches(program, root, Match(root)))


def test_binding() -> None:
    (match,) = _matches(Call(aten.sub.Tensor, Bind("x"), Number("n")), lambda m, x: x - 3.5)
    assert match.node("x").target is ew.embedding.default
    assert match.bound["n"] == 3.5
    assert match.get("other") is None
    assert [n.target for n in match.covered] == [aten.sub.Tensor]


@pytest.mark.parametrize(("n", "found"), [(2, 1), (2.0, 1), (3, 0), (True, 0)])
def test_numbers_stand_for_themselves(n: Any, found: int) -> None:
    assert len(_matches(Call(aten.pow.Tensor_Scalar, Bind("x"), 2), lambda m, x: aten.pow.Tensor_Scalar(x, n))) == found


def test_a_name_bound_twice_is_one_value() -> None:
    square = Call(aten.mul.Tensor, Bind("x"), Bind("x"))
    assert _matches(square, lambda m, x: x * x)
    assert not _matches(square, lambda m, x: x * torch.tanh(x))


def test_sums_and_products_match_in_either_order_and_differences_do_not() -> None:
    tanh = Call(aten.tanh.default, Bind("y"))
    assert _matches(Call(aten.mul.Tensor, tanh, Bind("x")), lambda m, x: x * torch.tanh(x))
    assert _matches(Call(aten.add.Tensor, tanh, Bind("x")), lambda m, x: x + torch.tanh(x))
    assert not _matches(Call(aten.sub.Tensor, tanh, Bind("x")), lambda m, x: x - torch.tanh(x))


def test_every_way_to_match_is_tried() -> None:
    """Which of two equal factors is x is only settled by what comes later."""
    pattern = Call(aten.mul.Tensor, Call(aten.tanh.default, Bind("x")), Call(aten.tanh.default, Bind("y")))
    matches = _matches(pattern, lambda m, x: torch.tanh(x) * torch.tanh(x * 2))
    assert [m.node("x").target for m in matches] == [ew.embedding.default, aten.mul.Tensor]


def test_defaults_and_names_of_arguments_do_not_matter() -> None:
    none = Call(aten.gelu.default, Bind("x"), approximate="none")
    assert _matches(none, lambda m, x: aten.gelu.default(x))
    assert not _matches(none, lambda m, x: aten.gelu.default(x, approximate="tanh"))
    assert _matches(Call(aten.gelu.default, Bind("x"), Anything("kind")), lambda m, x: aten.gelu.default(x))
    assert not _matches(Call(aten.gelu.default, Bind("x"), no_such_argument=1), lambda m, x: aten.gelu.default(x))


def test_lists() -> None:
    cat = Call(aten.cat.default, [Bind("a"), Call(aten.neg.default, Bind("a"))], Anything())
    assert _matches(cat, lambda m, x: torch.cat([x, -x], 1))
    assert not _matches(cat, lambda m, x: torch.cat([-x, x], 1))
    assert not _matches(cat, lambda m, x: torch.cat([x, -x, x], 1))


def test_weights() -> None:
    assert _matches(Call(aten.mul.Tensor, Bind("x"), Weight("w", rank=1)), lambda m, x: x * m.scale)
    assert not _matches(Call(aten.mul.Tensor, Bind("x"), Weight("w", rank=2)), lambda m, x: x * m.scale)
    assert not _matches(Call(aten.mul.Tensor, Bind("x"), Weight("w")), lambda m, x: x * x)


def test_either_and_several_targets() -> None:
    pattern = Call((aten.tanh.default, aten.relu.default), Bind("x")) | Call(aten.neg.default, Bind("y"))
    assert _matches(pattern, lambda m, x: torch.relu(x))[0].get("y") is None
    assert _matches(pattern, lambda m, x: -x)[0].get("x") is None
    assert not _matches(pattern, lambda m, x: torch.sigmoid(x))


def test_bound_arguments() -> None:
    program = _program(lambda m, x: aten.layer_norm.default(x, [4], eps=1e-3))
    (norm,) = program.nodes_of(aten.layer_norm.default)
    arguments = bound_arguments(norm)
    assert list(arguments) == ["input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"]
    assert (arguments["weight"], arguments["eps"]) == (None, 1e-3)


class DoubleNegation(Rule):
    """-(-x), except of an embedding."""

    name = "double_negation"
    pattern = Call(aten.neg.default, Call(aten.neg.default, Bind("x")))

    def check(self, program: Program, match: Match) -> str | None:
        return "of an embedding" if match.node("x").target is ew.embedding.default else None

    def rewrite(self, program: Program, match: Match) -> Node:
        return match.node("x")


class AddSelf(Rule):
    name = "add_self"
    pattern = Call(aten.add.Tensor, Bind("x"), Bind("x"))

    def rewrite(self, program: Program, match: Match) -> Node:
        return program.call(aten.mul.Tensor, match.node("x"), 2.0, where=match.where)


class Simplify(RewritePass):
    name = "simplify"
    rules: ClassVar[tuple[Rule, ...]] = (DoubleNegation(), AddSelf())


@pytest.mark.parametrize("depth", [1, 3])
def test_a_pass_of_rules_sees_what_it_has_rewritten(depth: int) -> None:
    def make(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        for _ in range(depth):
            x = torch.neg(torch.neg(x))
        return x + x

    program = _program(make)
    record = Simplify().run(program, PassContext())
    assert record.matched == depth + 1
    assert op_counts(program) == {"ew.embedding": 1, "aten.tanh": 1, "aten.mul": 1}


def test_what_is_turned_down_is_recorded() -> None:
    program = _program(lambda m, x: torch.neg(torch.neg(x)))
    (first, second) = program.nodes_of(aten.neg.default)
    second.meta["where"] = ("layers.3",)
    record = Simplify().run(program, PassContext())
    assert record.matched == 0
    (rejection,) = record.rejected
    assert rejection.node == second.name
    assert rejection.where == "layers.3"
    assert rejection.reason == "double_negation: of an embedding"
    assert first in program.graph.nodes


def test_a_rewritten_node_stands_for_all_it_covers() -> None:
    program = _program(lambda m, x: x + x)
    (add,) = program.nodes_of(aten.add.Tensor)
    add.meta["where"] = ("a", "b")
    Simplify().run(program, PassContext())
    assert program.logits.meta["where"] == ("a", "b")
