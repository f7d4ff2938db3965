"""ew.embedding against definitions and other implementations."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from enginewright.passes.ops.embedding import embedding, take_rows


@pytest.mark.parametrize(("tokens", "vocab", "hidden"), [(3, 10, 8), (20, 300, 33)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_takes_rows_of_the_table(tokens, vocab, hidden, dtype):
    torch.manual_seed(8)
    ids, table = torch.randint(0, vocab, (tokens,), dtype=dtype), torch.randn(vocab, hidden)
    assert torch.equal(embedding(ids, table), torch.stack([table[i] for i in ids.tolist()]))
    opcheck(torch.ops.ew.embedding.default, (ids, table))


def test_id_outside_the_table_is_refused():
    with pytest.raises(IndexError):
        embedding(torch.tensor([4]), torch.randn(4, 2))


@pytest.mark.parametrize(("vocabulary", "hidden"), [(9, 4), (40, 7)])
def test_rows_of_a_sixteen_bit_table_are_float32(vocabulary, hidden):
    table = torch.randn(vocabulary, hidden).bfloat16()
    ids = torch.tensor([vocabulary - 1, 0, 3])
    assert torch.equal(embedding(ids, table), table[ids].float())
    opcheck(torch.ops.ew.embedding.default, (ids, table))


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
