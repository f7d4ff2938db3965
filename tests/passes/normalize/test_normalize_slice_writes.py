from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from enginewright.passes.cleanup.remove_dead_code import RemoveDeadCode
from enginewright.passes.framework.base import PassContext
from enginewright.passes.ir.program import Program
from enginewright.passes.normalize.normalize_slice_writes import NormalizeSliceWrites
from tests.passes.rewriting import op_counts, rewrite
from tests.passes.small_programs import Table, program_from

aten = torch.ops.aten
Inputs = dict[str, torch.Tensor]
Write = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _write(into: torch.Tensor, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The functional form of ``into[..., start:stop].copy_(x)``."""
    copy = aten.copy.default(aten.slice.Tensor(into, -1, start, stop), x)
    return aten.slice_scatter.default(into, copy, -1, start, stop)


def _program(write: Write, width: int) -> Program:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = aten.embedding.default(m.table, i["ids"])
        return write(x.new_empty(x.shape[0], 3, 2 * x.shape[1]), x[:, None].expand(-1, 3, -1)).flatten(1)

    return program_from(call, Table(width))


def two_halves(new: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    n = x.shape[-1]
    return _write(_write(new, x, 0, n), -x, n, 2 * n)


def spread_over_heads(new: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    n = x.shape[-1]
    return _write(_write(new, x, 0, n), x[:, :1] * 2, n, 2**63 - 1)


def written_twice(new: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    n = x.shape[-1]
    first = _write(_write(new, x, 0, n), -x, n, 2 * n)
    return _write(first, x * 3, n // 2, n // 2 + n)


@pytest.mark.parametrize(("write", "parts"), [(two_halves, 2), (spread_over_heads, 2), (written_twice, 3)])
@pytest.mark.parametrize("width", [4, 6])
def test_becomes_a_concatenation(write: Write, parts: int, width: int) -> None:
    program = _program(write, width)
    rewrite(program, NormalizeSliceWrites(), RemoveDeadCode())
    counts = op_counts(program)
    assert not {"aten.new_empty", "aten.copy", "aten.slice_scatter"} & set(counts)
    (cat,) = program.nodes_of(aten.cat.default)
    assert len(cat.args[0]) == parts  # type: ignore[arg-type]


def test_another_dtype_is_cast() -> None:
    def call(m: nn.Module, i: Inputs) -> torch.Tensor:
        x = aten.embedding.default(m.table, i["ids"])
        return aten.copy.default(x, i["ids"][:, None]) + x

    program = program_from(call, Table(4))
    rewrite(program, NormalizeSliceWrites())
    assert op_counts(program)["aten._to_copy"] == 1
    assert op_counts(program)["aten.expand"] == 1


UNFINISHED: dict[str, tuple[Write, str]] = {
    "a part left out": (lambda new, x: _write(new, x, 0, x.shape[-1]), "slice_writes: a part is never written"),
    "every other place": (
        lambda new, x: aten.slice_scatter.default(new, x, -1, 0, 2 * x.shape[-1], 2),
        "slice_writes: is not written along one dimension of known size, one by one",
    ),
}


@pytest.mark.parametrize("name", UNFINISHED)
def test_what_is_left_alone(name: str) -> None:
    write, reason = UNFINISHED[name]
    program = _program(lambda new, x: write(torch.zeros_like(new) if "other" in name else new, x), 4)
    record = NormalizeSliceWrites().run(program, PassContext())
    assert reason in [r.reason for r in record.rejected]
    assert op_counts(program)["aten.slice_scatter"] == 1


def _interleaved(m: nn.Module, i: Inputs, equal: bool) -> torch.Tensor:
    """Every third value of row 0 written from row 1, as rotary embeddings of three axes do."""
    x = aten.embedding.default(m.table, i["ids"])
    rows = x[None].expand(3, -1, -1) if equal else torch.stack((x, -x, x * 2))
    rows = aten.cos.default(rows)
    first = aten.select.int(rows, 0, 0)
    part = aten.slice.Tensor(aten.select.int(rows, 0, 1), 1, 1, 7, 3)
    written = aten.slice_scatter.default(
        first, aten.copy.default(aten.slice.Tensor(first, 1, 1, 7, 3), part), 1, 1, 7, 3
    )
    return aten.select.int(aten.select_scatter.default(rows, written, 0, 0), 0, 0)


def test_a_value_written_over_itself_is_left_out() -> None:
    program = program_from(lambda m, i: _interleaved(m, i, equal=True), Table(8))
    rewrite(program, NormalizeSliceWrites())
    assert not {"aten.slice_scatter", "aten.select_scatter"} & set(op_counts(program))


def test_a_value_written_over_another_stays() -> None:
    program = program_from(lambda m, i: _interleaved(m, i, equal=False), Table(8))
    rewrite(program, NormalizeSliceWrites())
    assert "aten.slice_scatter" in op_counts(program)
