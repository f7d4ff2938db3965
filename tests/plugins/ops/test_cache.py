"""ew.kv_write against definitions and other implementations."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from enginewright.plugins.ops import kv_write


@pytest.mark.parametrize(("blocks", "slots", "tokens"), [(3, 4, 5), (7, 32, 40)])
def test_writes_only_the_slots_and_leaves_its_inputs(blocks, slots, tokens):
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(blocks, slots, 2, 8), torch.randn(blocks, slots, 2, 6)
    k, v = torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 6)
    places = torch.randperm(blocks * slots)[:tokens].int()
    before = k_cache.clone(), v_cache.clone()
    new_k, new_v = kv_write(k_cache, v_cache, k, v, places)
    for old, new, rows, kept in zip((k_cache, v_cache), (new_k, new_v), (k, v), before, strict=True):
        assert torch.equal(old, kept)
        for place in range(blocks * slots):
            where = (places == place).nonzero().flatten().tolist()
            want = rows[where[0]] if where else old[place // slots, place % slots]
            assert torch.equal(new[place // slots, place % slots], want)
    opcheck(torch.ops.ew.kv_write.default, (k_cache, v_cache, k, v, places))


def test_slot_outside_the_cache_is_refused():
    cache = torch.zeros(2, 4, 1, 2)
    with pytest.raises(IndexError):
        kv_write(cache, cache.clone(), torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.tensor([8]))
