"""One run over calibration tokens: what is looked at, what goes on from there, and how many there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.fx.node import Node

from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.evaluation_memory import evaluation_bytes
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.weights import Source
from enginewright.passes.quantization.calibrated_walk import calibration_tokens, walk
from enginewright.runtime.shared.errors import CapacityError
from tests.passes.small_programs import Shape, decoder
from tests.passes.sparsity.pruned import tokens

ew = torch.ops.ew


def linears(program: Program, name: str) -> list[Node]:
    return [n for n in program.nodes_of(ew.linear.default) if name in str(n.args[1])]


@pytest.mark.parametrize(("shape", "lengths"), [(Shape(), (9, 4)), (Shape(hidden=48, intermediate=64), (1, 6, 5))])
def test_targets_are_given_what_they_would_be_given(shape: Shape, lengths: tuple[int, ...]) -> None:
    program = decoder(shape)
    sequences = tokens(*lengths)
    sequences = tuple(s % shape.vocabulary for s in sequences)
    targets = linears(program, "down_proj")
    expected: dict[Node, Any] = {}
    program.evaluate(packed_inputs(program, sequences), lambda n, v: expected.setdefault(n, v))
    seen: list[Node] = []

    def look(node: Node, args: Sequence[Any]) -> torch.Tensor:
        seen.append(node)
        # The fast way to attention sums in another order.
        torch.testing.assert_close(args[0], expected[node.args[0]], rtol=1e-5, atol=1e-5)  # type: ignore[index]
        value: torch.Tensor = ew.linear(*args)
        return value

    walk(program, dict.fromkeys(targets, look), sequences)
    assert seen == targets and len(targets) == 2


def test_what_a_target_gives_goes_on() -> None:
    program = decoder()
    first, second = linears(program, "down_proj")
    outputs: list[torch.Tensor] = []
    before: list[torch.Tensor] = []

    def nothing(node: Node, args: Sequence[Any]) -> torch.Tensor:
        return torch.zeros(len(args[0]), 32)

    def note(node: Node, args: Sequence[Any]) -> torch.Tensor:
        outputs.append(args[0])
        return args[0]

    def plain(node: Node, args: Sequence[Any]) -> torch.Tensor:
        before.append(args[0])
        return args[0]

    sequences = tuple(s % 67 for s in tokens(7))
    walk(program, {second: plain}, sequences)
    walk(program, {first: nothing, second: note}, sequences)
    assert not torch.allclose(outputs[0], before[0])


def test_nothing_behind_the_last_target_runs_or_is_read() -> None:
    program = decoder()
    first, second = linears(program, "down_proj")
    name = str(second.args[1].target)  # type: ignore[union-attr]
    read: list[str] = []

    def note(value: torch.Tensor) -> torch.Tensor:
        read.append(name)
        return value

    expr = program.weights[name]
    value = expr.evaluate()
    program.weights.change(name, Source(name, expr.shape, expr.dtype, lambda: note(value)))
    sequences = tuple(s % 67 for s in tokens(7))
    walk(program, {first: lambda node, args: ew.linear(*args)}, sequences)
    assert not read
    walk(program, {linears(program, "embed")[0]: lambda node, args: ew.linear(*args)}, sequences)
    assert read == [name]


@pytest.mark.parametrize("length", [8, 20])
def test_as_many_tokens_as_there_is_room_for(length: int) -> None:
    program = decoder()
    sequences = tokens(*[length] * 16)
    last = linears(program, "down_proj")[1]
    working = {last: 1000}

    def chosen(memory_budget: int | None, most: int = 1000) -> int:
        return len(
            calibration_tokens(
                program, PassContext(calibration=sequences, memory_budget=memory_budget), "one", working, most
            )
        )

    needed = evaluation_bytes(program, 4 * length, working, until=last)
    assert chosen(None) == 16 and chosen(None, most=5 * length) == 5
    assert 1 < chosen(needed) <= 4 < chosen(3 * needed)
    least = evaluation_bytes(program, length, working, until=last)
    assert chosen(least) == 1
    with pytest.raises(CapacityError, match=rf"max_memory: one takes {least:,} bytes") as caught:
        chosen(least - 7)
    assert caught.value.hint == "Allow 7 bytes more, or take a recipe without calibration."
