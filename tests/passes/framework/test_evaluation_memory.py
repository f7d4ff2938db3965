from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.node import Node

from enginewright.passes.framework.evaluation_memory import evaluation_bytes
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.program import Program
from tests.passes.captured import normalized

ew = torch.ops.ew


def held(program: Program, tokens: int) -> int:
    """The most bytes of values alive during a run, counted by storages, so that views count once."""
    last_use = {a: n for n in program.graph.nodes for a in n.all_input_nodes}
    alive: dict[Node, Any] = {}
    most = 0

    def observe(node: Node, value: Any) -> None:
        nonlocal most
        alive[node] = value
        tensors = [
            t for v in alive.values() for t in (v if isinstance(v, tuple) else (v,)) if isinstance(t, torch.Tensor)
        ]
        most = max(most, sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))
        for used in node.all_input_nodes:
            if last_use[used] is node:
                alive.pop(used, None)

    program.evaluate(packed_inputs(program, [torch.arange(tokens) % 250]), observe)
    return most


@pytest.mark.parametrize("tokens", [64, 320])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_no_less_than_what_is_held(family: str, tokens: int) -> None:
    """With room for what ops take while they run, which is a few times the largest value."""
    program, _ = normalized(family)
    measured, worked_out = held(program, tokens), evaluation_bytes(program, tokens)
    assert measured <= worked_out < 6 * measured


def test_what_is_behind_the_last_call_counts_nothing() -> None:
    program, _ = normalized("Llama")
    first = program.nodes_of(ew.linear.default)[0]
    whole, part = evaluation_bytes(program, 256), evaluation_bytes(program, 256, {first: 0}, until=first)
    assert part < whole / 2
    assert evaluation_bytes(program, 256, {first: 10 << 20}, until=first) == pytest.approx(part + (10 << 20), rel=0.02)
    assert evaluation_bytes(program, 512) > 1.8 * whole - (1 << 20)
