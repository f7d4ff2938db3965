from __future__ import annotations

import pytest
import sympy
import torch
from torch import nn

from enginewright.passes.framework.verify_program import verify_program
from enginewright.passes.ir.program import Program, affine_of, from_exported, named_symbol, tensor_arguments
from enginewright.passes.ir.weights import Source
from enginewright.runtime.shared.errors import PassError
from enginewright.runtime.shared.lowered_program import Affine
from tests.passes.captured import captured, packed, tiny
from tests.passes.small_programs import program_from

aten, ew = torch.ops.aten, torch.ops.ew
T, B, R = (named_symbol(s) for s in "TBR")


class Table(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, width))


def _program(width: int = 4) -> Program:
    return program_from(lambda m, i: ew.take_rows(torch.tanh(ew.embedding(i["ids"], m.table)), i["rows"]), Table(width))


@pytest.mark.parametrize("width", [4, 9])
def test_reading(width: int) -> None:
    program = _program(width)
    assert list(program.inputs) == ["ids", "positions", "q_start", "kv_len", "slots", "rows", "block_table"]
    assert program.logits.target is ew.take_rows.default
    assert program.output.op == "output"
    assert program.shape(program.logits) == (R, width)
    assert program.shape(program.inputs["q_start"]) == (B + 1,)
    assert [n.target for n in program.nodes_of(aten.tanh.default, ew.embedding.default)] == [
        ew.embedding.default,
        aten.tanh.default,
    ]
    embedding = program.nodes_of(ew.embedding.default)[0]
    weight = program.weight_of(embedding.args[1])
    assert weight is not None
    assert weight.describe() == "table"
    assert program.weight_of(embedding.args[0]) is None
    assert program.weight_of(3) is None
    assert tensor_arguments(embedding) == [program.inputs["ids"], embedding.args[1]]


def test_affine() -> None:
    program = _program()
    sizes = {n: program.affine(program.value(program.inputs[n]).shape[0]) for n in ("ids", "q_start", "rows")}
    assert sizes == {"ids": Affine(0, 1, 0, 0), "q_start": Affine(1, 0, 1, 0), "rows": Affine(0, 0, 0, 1)}
    assert affine_of(2 * T + 3 * B - R + 5) == Affine(5, 2, 3, -1)
    assert affine_of(sympy.Integer(7)) == Affine(7, 0, 0, 0)
    for bad in (T * B, T / 2, T**2, named_symbol("M")):
        with pytest.raises(PassError, match="not affine"):
            affine_of(bad)


def test_evaluate_observes_every_value() -> None:
    program = _program()
    inputs = {k: v.long() for k, v in packed((2, 3)).items()}
    seen = {}
    (logits,) = program.evaluate(inputs, lambda node, value: seen.__setitem__(node.target, value))
    table = program.weights["table"].evaluate()
    torch.testing.assert_close(logits, torch.tanh(table[inputs["ids"]])[inputs["rows"]], rtol=0, atol=0)
    assert seen[aten.tanh.default].shape == (5, 4)
    assert seen["ids"] is inputs["ids"]


def test_evaluate_names_what_is_missing() -> None:
    with pytest.raises(PassError, match=r"inputs \['positions', 'rows'\] are missing"):
        _program().evaluate({k: torch.zeros(1) for k in ("ids", "q_start", "kv_len", "slots", "block_table")})


def test_changing_a_program() -> None:
    program = _program()
    (tanh,) = program.nodes_of(aten.tanh.default)
    with program.inserting_before(tanh):
        relu = program.call(aten.relu.default, tanh.args[0], where=("a",))
    assert program.shape(relu) == (T, 4)
    program.replace(tanh, relu)
    assert tanh not in program.graph.nodes
    assert program.remove_dead_code() == 0
    verify_program(program)


def test_a_replacement_may_use_what_it_replaces() -> None:
    program = _program()
    (tanh,) = program.nodes_of(aten.tanh.default)
    with program.graph.inserting_after(tanh):
        twice = program.call(aten.mul.Tensor, tanh, 2.0, where=("a",))
    program.replace(tanh, twice)
    assert twice.args[0] is tanh
    assert program.logits.args[0] is twice


def test_arguments_that_an_op_turns_down() -> None:
    program = _program()
    wide = program.weight("wide", Source("wide", (2, 5), torch.float32, lambda: torch.ones(2, 5)))
    before = len(program.graph.nodes)
    with program.inserting_before(program.output), pytest.raises(PassError, match="does not accept its arguments"):
        program.call(ew.linear.default, program.logits, wide, None, where=("",))
    assert len(program.graph.nodes) == before


def test_weights_have_one_node() -> None:
    program = _program()
    expr = Source("w", (2, 4), torch.float32, lambda: torch.ones(2, 4))
    first = program.weight("layers.0.w", expr)
    assert program.weight("layers.0.w") is first
    assert program.weight("layers.0.w", expr) is first
    other = program.weight("layers.0.w", Source("v", (4, 4), torch.float32, lambda: torch.ones(4, 4)), where=("a",))
    assert (first.target, other.target) == ("layers.0.w", "layers.0.w.2")
    assert (first.meta["where"], other.meta["where"]) == (("layers.0",), ("a",))
    assert tuple(program.value(other).shape) == (4, 4)
    assert program.remove_dead_code() == 2
    assert list(program.weights) == ["table"]


def test_inputs_can_be_added_once() -> None:
    program = _program()
    new = program.add_input("more", program.value(program.inputs["ids"]))
    assert list(program.inputs)[-1] == "more"
    assert program.inputs["more"] is new
    with pytest.raises(PassError, match="has an input more already"):
        program.add_input("more", program.value(program.inputs["ids"]))


def test_a_copy_is_independent() -> None:
    program = _program()
    other = program.copy()
    (tanh,) = other.nodes_of(aten.tanh.default)
    other.replace(tanh, tanh.args[0])  # type: ignore[arg-type]
    other.remove_dead_code()
    assert program.nodes_of(aten.tanh.default)
    verify_program(program)
    verify_program(other)


def test_weights_missing_or_of_another_shape() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    exported = torch.export.export(
        Plain(), (torch.zeros(5, 3),), dynamic_shapes=({0: torch.export.Dim("T")},)
    ).run_decompositions({})
    with pytest.raises(PassError, match="no source for the weight weight"):
        from_exported(exported, {}, module_prefix="", symbols={})
    wrong = Source("weight", (4, 3), torch.float32, lambda: torch.zeros(4, 3))
    with pytest.raises(PassError, match=r"weight weight: the model has torch.float32 \(3, 4\), its source .*\(4, 3\)"):
        from_exported(exported, {"weight": wrong}, module_prefix="", symbols={})


def test_captured_provenance() -> None:
    program = captured("Llama")
    linears = program.nodes_of(aten.linear.default)
    assert linears[0].meta["where"] == ("model.layers.0.self_attn.q_proj",)
    assert linears[-1].meta["where"] == ("lm_head",)
    weights = set(program.weights)
    assert set(tiny("Llama")[0].state_dict()) <= weights
