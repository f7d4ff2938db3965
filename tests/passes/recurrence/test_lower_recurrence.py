"""Captured recurrences become stored ones: states of one layer in one block, layers of one size in one group."""

from __future__ import annotations

import torch

from enginewright.passes.framework.base import PassContext
from enginewright.passes.ir.program import Program
from enginewright.passes.recurrence.lower_recurrence import LowerRecurrence
from enginewright.runtime.shared.contracts import STATE, STATE_TOKENS
from tests.passes.small_programs import program_from

ew = torch.ops.ew


def captured(layers: tuple[tuple[int, int], ...]) -> Program:
    """A program that convolves its tokens once for each (layer, width)."""

    def call(_: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        x = inputs["ids"].float()[:, None].expand(-1, 8)
        for layer, width in layers:
            x = x + ew.short_convolution(x, torch.ones(8, width), None, inputs["q_start"], layer, "")
        return x

    return program_from(call)


def lowered(layers: tuple[tuple[int, int], ...]) -> Program:
    program = captured(layers)
    LowerRecurrence().run(program, PassContext())
    return program


def test_layers_with_states_of_one_size_share_a_group() -> None:
    program = lowered(((0, 3), (1, 7), (2, 3)))
    groups = [(g.name, g.layers, g.kind, g.state_size, g.block_size) for g in program.cache_groups]
    assert groups == [
        ("state", (0, 2), STATE, 16, STATE_TOKENS),
        ("state-2", (1,), STATE, 48, STATE_TOKENS),
    ]
    assert {"block_table:state", "block_table:state-2", "state:0", "state:1", "state:2"} <= set(program.inputs)
    assert {"slots:state", "slots:state-2"} <= set(program.inputs)
    assert not program.nodes_of(ew.short_convolution.default)


def test_the_states_of_one_layer_follow_each_other() -> None:
    """Each begins at a multiple of 16 values, and the second recurrence gets the cache that the first has written."""
    program = lowered(((0, 3), (0, 4)))
    first, second = program.nodes_of(ew.stored_convolution.default)
    assert [group.state_size for group in program.cache_groups] == [16 + 32]
    assert (first.args[8], second.args[8]) == (0, 16)
    assert second.args[3].args == (first, 1)


def test_a_program_without_recurrences_stays_as_it_is() -> None:
    program = lowered(())
    assert program.cache_groups == ()
    assert "block_table" in program.inputs
