from __future__ import annotations

import pytest
import torch
from torch import nn

from enginewright.passes.framework.print_program import print_program
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.contracts import CacheGroup
from tests.passes.small_programs import program_from

ew = torch.ops.ew


class Weights(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, width))
        self.weight = nn.Parameter(torch.randn(6, width))


def _program(width: int = 4) -> Program:
    def call(m: nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = ew.linear(ew.embedding(i["ids"], m.table), m.weight, None)
        return ew.take_rows(torch.cat([x.to(torch.float64), x[:, 1:].double()], -1), i["rows"])

    program = program_from(call, Weights(width))
    program.remove_dead_code()  # torch.export's checks of dtypes
    return program


@pytest.mark.parametrize("width", [4, 9])
def test_text(width: int) -> None:
    program = _program(width)
    for node in program.nodes_of(ew.linear.default):
        node.meta["where"] = ("a.q", "a.k")
    lines = print_program(program).splitlines()
    assert lines[:4] == [
        "input  %ids: i64[T]",
        "input  %positions: i64[T]",
        "input  %q_start: i64[B + 1]",
        "input  %kv_len: i64[B]",
    ]
    assert f"weight @table: f32[256, {width}] = table" in lines
    assert "%1 = ew.linear(%0, @weight, None) : f32[T, 6]  # a.q + a.k" in lines
    assert lines[-1] == "return [%6]"


def test_the_same_program_has_the_same_text_whatever_its_nodes_are_called() -> None:
    program = _program()
    other = program.copy()
    for node in list(other.graph.nodes):
        if node.op == "call_function":
            node._rename(f"renamed_{node.name}")
    assert print_program(other) == print_program(program)
    assert print_program(_program(5)) != print_program(program)


def test_provenance() -> None:
    program = _program()
    program.nodes_of(ew.linear.default)[0].meta["where"] = ("somewhere",)
    assert "# somewhere" in print_program(program)


def test_dtypes() -> None:
    program = _program()
    with program.inserting_before(program.output):
        program.call(torch.ops.aten._to_copy.default, program.logits, where=("",), dtype=torch.complex64)
    text = print_program(program)
    assert "f64[R, 11]" in text
    assert "complex64[R, 11]" in text
    assert "torch." not in text


def test_cache_groups() -> None:
    program = _program()
    program.cache_groups = (
        CacheGroup(
            name="full", layers=(0, 1), kv_heads=2, key_head_size=16, value_head_size=16, window=0, dtype="f32",
            block_size=32,
        ),
    )  # fmt: skip
    assert "cache  full: layers 0,1 kv_heads 2 head 16/16 window 0 f32 block 32" in print_program(program)
