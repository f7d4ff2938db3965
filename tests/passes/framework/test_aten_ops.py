"""The tables on ATen ops, compared with the ops themselves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from enginewright.passes.framework.aten_ops import (
    SPELLINGS,
    activation_kind,
    dimension_order,
    dims_of,
    is_log_of_one_more_exp,
    of_each,
    ops_of,
)
from enginewright.passes.framework.match import bound_arguments
from enginewright.passes.lowering import lower_program
from enginewright.passes.ops.epilogue import LINEAR_ACTIVATIONS
from enginewright.plugins.graphs import emit_model
from tests.passes.small_programs import program_from

aten = torch.ops.aten


def call(target, *args, **kwargs):
    """A call node of a program, whose first argument stands for a tensor."""
    graph = torch.fx.Graph()
    return graph.call_function(target, (graph.placeholder("x"), *args), kwargs)


def test_lowering_knows_every_op_and_graphs_no_other():
    every = Counter(op for ops in SPELLINGS.values() for op in ops)
    assert set(every.values()) == {1}
    lowered, emitted = (
        {op for op in handlers if getattr(op, "namespace", "") == "aten"}
        for handlers in (lower_program.HANDLERS, emit_model.HANDLERS)
    )
    assert lowered == set(every)
    assert emitted <= lowered


def test_what_is_given_for_a_name_is_for_each_of_its_ops():
    assert ops_of("mul", "neg") == (aten.mul.Tensor, aten.mul.Scalar, aten.neg.default)
    assert of_each({"mul": 1, "neg": 2}) == {aten.mul.Tensor: 1, aten.mul.Scalar: 1, aten.neg.default: 2}
    with pytest.raises(KeyError, match="conv"):
        of_each({"conv": 1})


@pytest.mark.parametrize("shape", [(1, 3, 1), (1, 2, 1, 4)])
@pytest.mark.parametrize("dim", [None, 0, -1, [0], [-2, 0], []])
def test_dims_of_a_squeeze(shape, dim):
    x = torch.empty(shape)
    squeeze = call(aten.squeeze.default) if dim is None else call(aten.squeeze.dims, [dim] if dim in (0, -1) else dim)
    if isinstance(dim, int):
        squeeze = call(aten.squeeze.dim, dim)
    dims = dims_of(bound_arguments(squeeze), x.dim())
    assert [n for i, n in enumerate(shape) if i not in dims or n != 1] == list(
        squeeze.target(x, *squeeze.args[1:]).shape
    )


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.transpose.int, (0, -1)),
        (aten.transpose.int, (-2, 1)),
        (aten.transpose.int, (1, 1)),
        (aten.permute.default, ([2, 0, 1],)),
        (aten.permute.default, ([-1, 0, -2],)),
    ],
)
@pytest.mark.parametrize("shape", [(2, 3, 5), (7, 1, 4)])
def test_dimension_order(target, args, shape):
    order = dimension_order(bound_arguments(call(target, *args)), 3)
    assert torch.empty(shape).permute(order).shape == target(torch.empty(shape), *args).shape


@pytest.mark.parametrize(("rank", "order"), [(0, []), (1, [0]), (2, [1, 0])])
def test_dimension_order_of_t(rank, order):
    assert dimension_order(bound_arguments(call(aten.t.default)), rank) == order


@pytest.mark.parametrize("size", [3, 64])
@pytest.mark.parametrize(
    ("target", "given"),
    [
        *((op, {}) for op in ops_of("silu", "gelu", "relu", "sigmoid", "tanh")),
        (aten.gelu.default, {"approximate": "tanh"}),
    ],
)
def test_activation_kind(target, given, size):
    x = torch.linspace(-4, 4, size)
    assert torch.equal(LINEAR_ACTIVATIONS[activation_kind(call(target, **given))](x), target(x, **given))


def test_a_softplus_of_a_high_threshold_is_a_logarithm_everywhere():
    x = torch.linspace(-30, 30, 1001)
    matched = []
    for beta, threshold in ((1, 20), (1, 17), (1, 16), (2, 20), (1, 3)):
        a = bound_arguments(call(aten.softplus.default, beta, threshold))
        matched.append(is_log_of_one_more_exp(a))
        exact = torch.log1p(torch.exp(x.double())).float()
        if matched[-1]:  # float32's last place, twice: torch's own function and its result are rounded
            torch.testing.assert_close(aten.softplus.default(x, beta, threshold), exact, rtol=2.4e-7, atol=0)
    assert matched == [True, True, False, False, False]


def test_arguments_of_a_captured_call():
    program = program_from(lambda m, i: i["ids"].float()[:, None].transpose(-2, -1).sum(-1, keepdim=True), nn.Module())
    arguments = {n.target: bound_arguments(n) for n in program.graph.nodes if n.op == "call_function"}
    assert dimension_order(arguments[aten.transpose.int], 2) == [1, 0]
    assert dims_of(arguments[aten.sum.dim_IntList], 2) == [1]
