from __future__ import annotations

import pytest
import torch

from enginewright.passes.cleanup.merge_common_subexpressions import MergeCommonSubexpressions
from enginewright.passes.cleanup.remove_noops import RemoveNoops
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.ir.program import Program
from enginewright.runtime.shared.errors import PassError
from tests.passes.small_programs import program_from


def _program(repeats: int = 2) -> Program:
    def call(m: torch.nn.Module, i: dict[str, torch.Tensor]) -> torch.Tensor:
        x = i["ids"][:, None].float()
        return torch.cat([torch.tanh(x * 1.0) for _ in range(repeats)], 1)

    return program_from(call)


@pytest.mark.parametrize("repeats", [2, 5])
def test_passes_run_in_the_order_given(repeats: int) -> None:
    seen: list[tuple[str, int]] = []
    program = _program(repeats)
    manager = PassManager(
        [RemoveNoops(), MergeCommonSubexpressions()],
        after_pass=lambda p, record: seen.append((record.name, len(p.graph.nodes))),
    )
    records = manager.run(program)
    assert [r.name for r in records] == ["remove_noops", "merge_common_subexpressions"]
    assert seen == [(r.name, r.nodes_after) for r in records]
    assert records[0].nodes_after == records[1].nodes_before
    assert len(program.nodes_of(torch.ops.aten.tanh.default)) == 1


def test_the_other_order_finds_less_at_first() -> None:
    records = PassManager([MergeCommonSubexpressions(), RemoveNoops()]).run(_program(3))
    assert records[0].matched > 0
    assert records[1].matched == 1  # one product with 1 is left of three


def test_a_broken_program_is_refused_before_the_first_pass() -> None:
    program = _program()
    del program.nodes_of(torch.ops.aten.tanh.default)[0].meta["val"]
    with pytest.raises(PassError, match="after capture: node tanh"):
        PassManager([RemoveNoops()]).run(program)


def test_the_context_reaches_every_pass() -> None:
    context = PassContext(required=frozenset({"remove_noops"}))
    program = _program()
    assert PassManager([RemoveNoops()], context).run(program)[0].matched == 2
    with pytest.raises(PassError, match="remove_noops is required and matched nothing"):
        PassManager([RemoveNoops()], context).run(program)
