from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from enginewright.passes.normalize.normalize_complex import NormalizeComplex
from tests.passes.normalize.test_normalize_rope import HEADS, PASSES, TOLERANCE, Heads
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import program_from

ew = torch.ops.ew
Inputs = dict[str, torch.Tensor]
Table = Callable[[torch.Tensor], torch.Tensor]


def _polar(f: torch.Tensor) -> torch.Tensor:
    return torch.polar(torch.ones_like(f), f)


def _call(table: Table, size: int) -> Callable[[nn.Module, Inputs], torch.Tensor]:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        assert isinstance(m, Heads)
        q = m.q(i)
        pairs = torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2))
        rotated = torch.view_as_real(pairs * table(m.angles(i)).unsqueeze(1)).flatten(3)
        return rotated.transpose(1, 2)[0].reshape(-1, HEADS * size)

    return call


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_becomes_rope(size: int, scale: float) -> None:
    program = program_from(_call(lambda f: _polar(f) * scale, size), Heads(size, size // 2))
    first, *_ = rewrite(program, NormalizeComplex(), *(p() for p in PASSES), tolerance=TOLERANCE)
    assert first.matched == 1
    assert op_counts(program) == {"aten.embedding": 1, "aten.view": 2, "ew.rope_table": 1, "ew.rope": 1}
    (rope,), (table,) = program.nodes_of(ew.rope.default), program.nodes_of(ew.rope_table.default)
    assert rope.args[2] is True
    assert table.args[2] == scale


NO_ROTATION: dict[str, Table] = {
    "another length": lambda f: torch.polar(f, f),
    "a sum": lambda f: _polar(f) + 1,
    "a complex factor": lambda f: _polar(f) * 1j,
}


@pytest.mark.parametrize("name", NO_ROTATION)
def test_what_is_no_rotation(name: str) -> None:
    program = program_from(_call(NO_ROTATION[name], 8), Heads(8, 4))
    (record,) = rewrite(program, NormalizeComplex(), tolerance=TOLERANCE)
    assert record.matched == 0
    assert [r.reason for r in record.rejected] == [
        "complex_rotation: the factor isn't a table of complex numbers of length 1"
    ]
