"""ew.pool against sentence-transformers' definitions, written out for one request at a time."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from enginewright.passes.ops.pool import KINDS, pool

LENGTHS = [(1, 5, 3), (40, 1, 17, 2)]


def _packed(lengths):
    torch.manual_seed(sum(lengths))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return torch.randn(sum(lengths), 12), starts


def _by_hand(rows, kind):
    rows = rows.double().tolist()
    if kind == "cls":
        return rows[0]
    if kind == "last":
        return rows[-1]
    columns = list(zip(*rows, strict=True))
    if kind == "max":
        return [max(column) for column in columns]
    weights = [i + 1 if kind == "weighted" else 1 for i in range(len(rows))]
    return [sum(w * x for w, x in zip(weights, column, strict=True)) / sum(weights) for column in columns]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_pool_is_its_definition(lengths, kind):
    hidden, starts = _packed(lengths)
    want = torch.tensor([_by_hand(rows, kind) for rows in hidden.split(lengths)]).float()
    # Sums of at most 40 values of f32 in another order.
    torch.testing.assert_close(pool(hidden, starts, kind), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_is_pooled_alone(kind):
    """A vector has equal bits in a batch and alone."""
    hidden, starts = _packed(LENGTHS[1])
    got = pool(hidden, starts, kind)
    for row, tokens in zip(got, hidden.split(LENGTHS[1]), strict=True):
        assert torch.equal(pool(tokens, torch.tensor([0, len(tokens)]), kind)[0], row)


def test_fake_and_schema():
    hidden, starts = _packed(LENGTHS[0])
    opcheck(torch.ops.ew.pool.default, (hidden, starts, "mean"), test_utils=("test_schema", "test_faketensor"))


def test_unknown_kind():
    hidden, starts = _packed(LENGTHS[0])
    with pytest.raises(ValueError, match="'sum', and there are mean, cls"):
        pool(hidden, starts, "sum")
