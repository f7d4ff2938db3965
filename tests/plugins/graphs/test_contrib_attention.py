from __future__ import annotations

from typing import Any

import pytest
import torch

from enginewright.plugins.graphs.contrib_attention import GroupQuery, group_queries
from tests.acceptance.tiny_configs import tiny_family
from tests.plugins.graphs.linear_session import lowered

ew = torch.ops.ew


@pytest.mark.parametrize(
    ("family", "overrides", "packed", "rotated"),
    [
        ("llama", {}, True, True),
        ("qwen3", {}, False, True),  # norms of q and k lie between
        ("gpt2", {}, True, False),
        ("llama", {"head_dim": 8}, False, False),  # rotations of so few numbers stay operators of their own
    ],
)
def test_what_goes_into_the_operator(family: str, overrides: dict[str, Any], packed: bool, rotated: bool) -> None:
    program = lowered(tiny_family(family, **overrides))
    groups = group_queries(program)
    assert list(groups) == program.nodes_of(ew.paged_attention.default) and len(groups) == 2
    for layer, group in enumerate(groups.values()):
        assert isinstance(group, GroupQuery)
        assert (group.layer, group.counts[0]) == (layer, 4) and group.counts[0] % group.counts[1] == 0
        assert (group.packed is not None, group.table is not None) == (packed, rotated)
        assert (group.q.target is ew.rope.default) == (family == "llama" and not rotated)
        assert group.write.target is ew.kv_write.default
        if group.packed is not None:
            assert int(program.shape(group.packed)[-1]) == sum(group.counts) * group.size
