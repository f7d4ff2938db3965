"""Single ops tried out on two sequences packed together and on each by itself."""

from __future__ import annotations

import pytest
import torch

from enginewright.optimizer.capture.packed_and_apart import same_packed_and_apart

from .test_token_independence import program_of

aten = torch.ops.aten

KEEPS = {
    aten.where.ScalarOther: lambda x, w: torch.where(x > 0, x, 1.0),
    aten.view_as_complex.default: lambda x, w: torch.view_as_complex(x.view(-1, x.shape[1] // 2, 2)).abs().repeat(1, 2),
    aten.cumsum.default: lambda x, w: x.cumsum(1),
    aten.roll.default: lambda x, w: x.roll(1, dims=1),
    aten.embedding.default: lambda x, w: torch.nn.functional.embedding(x[:, 0].clamp(0, 1).long(), w),
}

MIXES = {
    aten.roll.default: lambda x, w: x.roll(1),
    aten.cumsum.default: lambda x, w: x.cumsum(0),
    aten.flip.default: lambda x, w: x.flip(0),
    aten.softmax.int: lambda x, w: x.softmax(0),
}


def node_of(function, target, width):
    program = program_of(function, width)
    node = program.nodes_of(target)[0]
    return program, node


@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("target", KEEPS, ids=str)
def test_keeps_tokens_apart(target, width):
    assert same_packed_and_apart(*node_of(KEEPS[target], target, width))


@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("target", MIXES, ids=str)
def test_mixes_tokens(target, width):
    assert not same_packed_and_apart(*node_of(MIXES[target], target, width))


def test_an_op_that_turns_random_arguments_down_is_not_shown_to():
    """A look-up in a table without rows."""
    program, node = node_of(KEEPS[aten.embedding.default], aten.embedding.default, 8)
    with program.inserting_before(node):
        empty = program.call(aten.slice.Tensor, node.args[0], 0, 0, 0, where=("layer",))
    node.replace_input_with(node.args[0], empty)
    assert not same_packed_and_apart(program, node)
