"""Lowers captured recurrences to ops that read a state from a cache and write the new state back.

All states of a layer, such as the last inputs of a convolution and the matrix of a delta rule, are stored in one block,
one after the other. Layers whose states have the same size form a cache group.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import Node

from enginewright.passes.attention.lower_attention import block_count
from enginewright.passes.framework.base import Condition, Pass, PassContext, PassResult, free_of
from enginewright.passes.framework.match import bound_arguments
from enginewright.runtime.shared.contracts import STATE, STATE_TOKENS, CacheGroup
from enginewright.runtime.shared.step_schema import BLOCK_TABLE, KV_LEN, SLOTS, group_port

from ..ir.program import Program
from ..ir.provenance import WHERE

ew = torch.ops.ew

ALIGNMENT = 16
"""The alignment of each state within a block: 16 float32 values, 64 bytes."""


def _padded(channels: int) -> int:
    """Returns the number of channels rounded up to whole vectors, as kernels read and write these."""
    return -(-channels // ALIGNMENT) * ALIGNMENT


Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a call's arguments by name."""


class _Form(NamedTuple):
    """The lowered form of a captured op.

    Attributes:
        op: the lowered op. Its arguments are those of the captured op without the layer, plus those of the cache and
            the position of the state in a block.
        size: returns the number of values in a request's state, given the shapes of the captured op's arguments.
    """

    op: Any
    size: Callable[[Shapes], int]


FORMS: Mapping[Any, _Form] = {
    ew.short_convolution.default: _Form(ew.stored_convolution.default, lambda s: s["weight"][0] * (s["weight"][1] - 1)),
    ew.selective_scan.default: _Form(ew.stored_scan.default, lambda s: _padded(s["x"][1] * s["x"][2]) * s["b"][2]),
    ew.gated_delta_rule.default: _Form(
        ew.stored_delta_rule.default, lambda s: s["v"][1] * _padded(s["v"][2]) * s["k"][2]
    ),
}
"""Captured recurrences -> their lowered forms."""


def _has_step_inputs(program: Program) -> list[str]:
    return [f"there is no input {n}" for n in (BLOCK_TABLE, KV_LEN, SLOTS) if n not in program.inputs]


class LowerRecurrence(Pass):
    """Replaces every captured recurrence by its lowered form, and adds cache groups for the states.

    The new inputs are ``state:LAYER`` [P, F], and ``block_table:GROUP`` [B, M] and ``slots:GROUP`` [T] for each group.
    The pass runs before ``lower_attention``, which removes the table and the slots of the captured form.
    """

    name = "lower_recurrence"
    requires = (Condition("step inputs for a cache of states", _has_step_inputs),)
    ensures = (free_of(*FORMS, name="no recurrence in the captured form is left"),)

    def call(self, program: Program, context: PassContext) -> PassResult:
        calls = program.nodes_of(*FORMS)
        by_layer: dict[int, list[Node]] = {}
        for call in calls:
            by_layer.setdefault(bound_arguments(call)["layer"], []).append(call)
        offsets = dict.fromkeys(calls, 0)
        sizes: dict[int, int] = {}
        for layer, of_layer in by_layer.items():
            end = 0
            for call in of_layer:
                offsets[call] = end
                end += _padded(_state_size(program, call))
            sizes[layer] = end
        groups = _groups(sizes)
        for group in groups:
            for port in (BLOCK_TABLE, SLOTS):
                program.add_input(group_port(port, group.name), program.value(program.inputs[port]))
            blocks = block_count(program)
            for layer in group.layers:
                with program.fake_mode:
                    value = torch.empty((blocks, group.state_size))
                assert isinstance(value, FakeTensor)
                _store(program, by_layer[layer], offsets, program.add_input(f"{STATE}:{layer}", value), group)
        program.cache_groups += groups
        return PassResult(matched=len(calls))


def _state_size(program: Program, call: Node) -> int:
    """Returns the number of values in the state that a captured recurrence has for each request."""
    values = {n: program.value(a) for n, a in bound_arguments(call).items() if isinstance(a, Node)}
    return FORMS[call.target].size({name: tuple(value.shape) for name, value in values.items()})


def _groups(sizes: Mapping[int, int]) -> tuple[CacheGroup, ...]:
    """Returns a cache group for each size of states, in the order of the first layers.

    ``sizes`` has the number of values in the state of each layer.
    """
    layers: dict[int, list[int]] = {}
    for layer, size in sizes.items():
        layers.setdefault(size, []).append(layer)
    return tuple(
        CacheGroup(
            STATE if not number else f"{STATE}-{number + 1}",
            tuple(sorted(members)),
            *(1, 1, 1),
            kind=STATE,
            state_size=size,
            block_size=STATE_TOKENS,
        )
        for number, (size, members) in enumerate(layers.items())
    )


def _store(program: Program, calls: list[Node], offsets: Mapping[Node, int], state: Node, group: CacheGroup) -> None:
    """Replaces the recurrences of a layer by their lowered forms. Each reads the cache that the one before it wrote.

    Args:
        program: the program.
        calls: the captured recurrences, in order.
        offsets: the position of each recurrence's state in a block.
        state: the input with the layer's cache.
        group: the layer's cache group.
    """
    for call in calls:
        arguments, where = bound_arguments(call), call.meta[WHERE]
        form = FORMS[call.target]
        new = {
            "state": state,
            "block_table": program.inputs[group_port(BLOCK_TABLE, group.name)],
            "kv_len": program.inputs[KV_LEN],
            "slots": program.inputs[group_port(SLOTS, group.name)],
            "first": offsets[call],
        }
        names = [argument.name for argument in form.op._schema.arguments]
        with program.inserting_before(call):
            stored = program.call(form.op, *({**arguments, **new}[name] for name in names), where=where)
            result, state = (program.call(operator.getitem, stored, i, where=where) for i in (0, 1))
        program.replace(call, result)
