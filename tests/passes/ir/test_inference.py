from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.node import Node

from enginewright.passes.framework.verify_program import verify_program
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.errors import PassError
from tests.passes.small_programs import program_from

aten, ew = torch.ops.aten, torch.ops.ew


class Layers(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, width))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, width)) for _ in range(layers))


def _program(layers: int = 4, width: int = 4) -> Program:
    def call(m: Any, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = ew.embedding(i["ids"], m.table)
        for weight in m.weights:
            x = torch.tanh(ew.linear(x, weight, None))
        return ew.take_rows(x, i["rows"])

    return program_from(call, Layers(layers, width))


@pytest.fixture
def inferred(monkeypatch: pytest.MonkeyPatch) -> Counter[object]:
    """Counts the fake values that are made, by op."""
    counts: Counter[object] = Counter()
    make = Program._infer

    def counted(program: Program, node: Node) -> Any:
        counts[node.target] += 1
        return make(program, node)

    monkeypatch.setattr(Program, "_infer", counted)
    return counts


@pytest.mark.parametrize(("layers", "width"), [(4, 4), (7, 9)])
def test_layers_that_repeat_are_inferred_once(layers: int, width: int, inferred: Counter[object]) -> None:
    program = _program(layers, width)
    program.verified.clear()
    inferred.clear()
    program._inferences = type(program._inferences)()
    verify_program(program)
    verify_program(program.copy())
    counted = (ew.embedding.default, ew.linear.default, aten.tanh.default, ew.take_rows.default)
    assert inferred == dict.fromkeys(counted, 1)


@pytest.mark.parametrize("layer", [0, 3])
def test_a_wrong_value_is_found_in_any_of_them(layer: int) -> None:
    program = _program()
    verify_program(program)
    node = program.nodes_of(aten.tanh.default)[layer]
    with program.fake_mode:
        node.meta["val"] = program.value(node).double()
    with pytest.raises(PassError, match=r"gives torch\.float32, recorded is torch\.float64"):
        verify_program(program)


def test_numbers_that_are_equal_and_of_other_types_are_told_apart() -> None:
    program = _program()
    ids = program.inputs["ids"]
    with program.inserting_before(program.output):
        whole, real, yes = (program.call(aten.mul.Tensor, ids, n, where=("test",)) for n in (1, 1.0, True))
        first, second = (program.call(aten.add.Tensor, ids, ids, where=("test",), alpha=n) for n in (1, 1))
    assert [program.value(n).dtype for n in (whole, real, yes)] == [torch.int64, torch.float32, torch.int64]
    assert program.value(whole) is not program.value(yes)
    assert program.value(first) is program.value(second)


def test_other_sizes_types_and_strides_are_told_apart() -> None:
    program = _program(width=4)
    linear, tanh = program.nodes_of(ew.linear.default)[0], program.nodes_of(aten.tanh.default)[0]
    with program.inserting_before(program.output):
        turned = program.call(aten.permute.default, linear.args[1], [1, 0], where=("test",))
        copied = [program.call(aten.clone.default, n, where=("test",)) for n in (linear.args[1], turned)]
        double = program.call(aten._to_copy.default, tanh, where=("test",), dtype=torch.float64)
        ends = [program.call(aten.tanh.default, n, where=("test",)) for n in (tanh, double, program.logits)]
    assert [program.value(n).stride() for n in copied] == [(4, 1), (1, 4)]
    assert [program.value(n).dtype for n in ends] == [torch.float32, torch.float64, torch.float32]
    assert program.shape(ends[0]) != program.shape(ends[2])


def test_a_size_of_its_own_is_not_shared(inferred: Counter[object]) -> None:
    """An op that makes a new size, such as how many numbers aren't zero, is asked each time."""
    program = _program()
    with program.inserting_before(program.output):
        for _ in range(2):
            program.call(aten.nonzero.default, program.inputs["ids"], where=("test",))
    assert inferred[aten.nonzero.default] == 2
