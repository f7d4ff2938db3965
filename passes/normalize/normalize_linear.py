"""Replaces every product with a weight by ``ew.linear``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.fx.node import Node

from enginewright.passes.framework.match import Bind, Call, Match, RewritePass, Rule, Weight

from ..cleanup.fold_constants import transposed
from ..ir.program import Program
from ..ir.weights import Apply, Slice

aten, ew = torch.ops.aten, torch.ops.ew


class Linear(Rule):
    """Replaces aten's linear, x @ weight.T + bias, by ``ew.linear``."""

    name = "linear"
    pattern = Call(aten.linear.default, Bind("x"), Bind("weight"), Bind("bias")) | Call(
        aten.linear.default, Bind("x"), Bind("weight"), None
    )

    def check(self, program: Program, match: Match) -> str | None:
        if match.node("weight").op != "get_attr":
            return "the weight is computed by the program"
        return None

    def rewrite(self, program: Program, match: Match) -> Node:
        x, weight = match.node("x"), match.node("weight")
        return program.call(ew.linear.default, x, weight, match.get("bias"), where=match.where)


class Product(Rule):
    """Replaces x @ weight with a weight [K, N], with or without a bias, by ``ew.linear``. Convolutions of width 1 have
    this form.
    """

    name = "product"
    pattern = Call((aten.mm.default, aten.matmul.default), Bind("x"), Weight("weight", rank=2)) | Call(
        aten.addmm.default, Weight("bias"), Bind("x"), Weight("weight", rank=2), beta=1, alpha=1
    )

    def check(self, program: Program, match: Match) -> str | None:
        bias, n = match.get("bias"), program.shape(match.node("weight"))[1]
        if bias is not None and program.shape(bias) != (n,):
            return f"the bias has the shape {program.shape(bias)}, not [{n}]"
        if program.value(match.node("x")).dim() < 2:
            return "x is a vector"
        return None

    def rewrite(self, program: Program, match: Match) -> Node:
        weight = match.node("weight")
        expr = program.weight_of(weight)
        assert expr is not None
        turned = program.weight(f"{weight.target}_transposed", transposed(expr), where=weight.meta["where"])
        return program.call(ew.linear.default, match.node("x"), turned, match.get("bias"), where=match.where)


class ProductOfColumns(Rule):
    """Replaces weight @ x, with a weight [N, K] and x [.., K, T], by ``ew.linear`` of the transposed x."""

    name = "product_of_columns"
    pattern = Call(aten.matmul.default, Weight("weight", rank=2), Bind("x"))

    def check(self, program: Program, match: Match) -> str | None:
        return "x is a vector" if program.value(match.node("x")).dim() < 2 else None

    def rewrite(self, program: Program, match: Match) -> Node:
        rank = program.value(match.node("x")).dim()
        axes = (rank - 2, rank - 1)
        rows = program.call(aten.transpose.int, match.node("x"), *axes, where=match.where)
        product = program.call(ew.linear.default, rows, match.node("weight"), None, where=match.where)
        return program.call(aten.transpose.int, product, *axes, where=match.where)


class ProductOfEachHead(Rule):
    """Replaces weight @ x, with one matrix for each head (weight [H, .., N, K], x [H, .., K, T]), by H linears."""

    name = "product_of_each_head"
    pattern = Call(aten.matmul.default, Weight("weight"), Bind("x"))

    def check(self, program: Program, match: Match) -> str | None:
        shape, columns = program.shape(match.node("weight")), program.shape(match.node("x"))
        if len(shape) < 3 or len(shape) != len(columns) or shape[0] != columns[0]:
            return "weight and x don't have the same heads"
        return None if all(size == 1 for size in shape[1:-2]) else "a head has several matrices"

    def rewrite(self, program: Program, match: Match) -> Node:
        weight, x, where = match.node("weight"), match.node("x"), match.where
        expr = program.weight_of(weight)
        assert expr is not None
        rows = program.call(aten.transpose.int, x, -2, -1, where=where)  # [H, .., T, K]
        heads = []
        for head in range(expr.shape[0]):
            matrix = Apply(
                aten.reshape.default, (Slice(expr, 0, head, head + 1), expr.shape[-2:]), (), expr.shape[-2:], expr.dtype
            )
            weight_of_head = program.weight(f"{weight.target}_{head}", matrix, where=weight.meta["where"])
            of_head = program.call(aten.slice.Tensor, rows, 0, head, head + 1, where=where)
            heads.append(program.call(ew.linear.default, of_head, weight_of_head, None, where=where))
        product = program.call(aten.cat.default, heads, 0, where=where)
        return program.call(aten.transpose.int, product, -2, -1, where=where)


class AddBias(Rule):
    """Moves an addition of a bias after a linear into the linear."""

    name = "add_bias"
    pattern = Call(
        aten.add.Tensor, Call(ew.linear.default, Bind("x"), Bind("weight"), None), Weight("bias", rank=1), alpha=1
    )

    def check(self, program: Program, match: Match) -> str | None:
        n = program.shape(match.node("weight"))[0]
        return None if program.shape(match.node("bias")) == (n,) else f"what is added is not of shape [{n}]"

    def rewrite(self, program: Program, match: Match) -> Node:
        x, weight, bias = match.node("x"), match.node("weight"), match.node("bias")
        return program.call(ew.linear.default, x, weight, bias, where=match.where)


class NormalizeLinear(RewritePass):
    """Replaces aten.linear, mm, matmul and addmm with a weight by ``ew.linear``. A weight [K, N] is transposed
    lazily.
    """

    name = "normalize_linear"
    rules: ClassVar[tuple[Rule, ...]] = (
        Linear(),
        Product(),
        ProductOfColumns(),
        ProductOfEachHead(),
        AddBias(),
    )
