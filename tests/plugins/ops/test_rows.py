"""ew.take_rows against definitions and other implementations."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from enginewright.plugins.ops import take_rows


@pytest.mark.parametrize(("shape", "rows"), [((5, 3), [4, 0]), ((40, 2, 7), [0, 39, 39, 12])])
def test_takes_rows(shape, rows):
    x, index = torch.randn(shape), torch.tensor(rows, dtype=torch.int32)
    assert torch.equal(take_rows(x, index), torch.stack([x[r] for r in rows]))
    opcheck(torch.ops.ew.take_rows.default, (x, index))


def test_no_rows():
    assert take_rows(torch.randn(3, 4), torch.zeros(0, dtype=torch.int32)).shape == (0, 4)


def test_row_outside_is_refused():
    with pytest.raises(IndexError):
        take_rows(torch.randn(3, 4), torch.tensor([3]))
