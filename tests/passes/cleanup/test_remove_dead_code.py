from __future__ import annotations

import pytest
import torch
from torch import nn

from enginewright.passes.cleanup.remove_dead_code import RemoveDeadCode
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import program_from

ew = torch.ops.ew


class Two(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(256, width))
        self.unused = nn.Parameter(torch.randn(256, width))


@pytest.mark.parametrize("width", [4, 9])
def test_unread_calls_and_weights_go_and_inputs_stay(width: int) -> None:
    program = program_from(lambda m, i: ew.embedding(i["ids"], m.table), Two(width))
    spare = program.weight("unused")
    table = program.nodes_of(ew.embedding.default)[0]
    with program.inserting_before(program.output):
        x = program.call(ew.embedding.default, program.inputs["ids"], spare, where=("a",))
        program.call(torch.ops.aten.tanh.default, x, where=("a",))
    (record,) = rewrite(program, RemoveDeadCode())
    assert record.matched == 3
    assert op_counts(program) == {"ew.embedding": 1}
    assert list(program.weights) == ["table"]
    assert program.logits is table
    assert {"positions", "q_start", "rows"} <= set(program.inputs)


def test_what_is_read_stays() -> None:
    program = program_from(lambda m, i: ew.embedding(i["ids"], m.table) + 1.0, Two(4))
    program.remove_dead_code()
    (record,) = rewrite(program, RemoveDeadCode())
    assert record.matched == 0
    assert op_counts(program) == {"ew.embedding": 1, "aten.add": 1}
