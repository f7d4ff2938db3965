"""The op registry against definitions and other implementations."""

from __future__ import annotations

import pytest
import torch

from enginewright.passes import ops
from enginewright.passes.ops.library import accumulate_dtype


@pytest.mark.parametrize("name", sorted(ops.REFERENCES))
def test_every_op_is_pure_and_registered_with_its_reference(name):
    schema = getattr(torch.ops.ew, name).default._schema
    assert not any(a.alias_info for a in (*schema.arguments, *schema.returns))
    assert getattr(ops, name) is ops.REFERENCES[name]


def test_accumulation_is_at_least_float32():
    assert accumulate_dtype(torch.empty(0, dtype=torch.bfloat16)) is torch.float32
    assert accumulate_dtype(torch.empty(0, dtype=torch.float64)) is torch.float64
