"""ew.kv_write against definitions and other implementations."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from enginewright.passes.ops.cache import kv_write


@pytest.mark.parametrize(("blocks", "slots", "tokens"), [(3, 4, 5), (7, 32, 40)])
def test_writes_only_the_slots_and_leaves_its_inputs(blocks, slots, tokens):
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(blocks, slots, 2, 8), torch.randn(blocks, slots, 2, 6)
    k, v = torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 6)
    places = torch.randperm(blocks * slots)[:tokens].int()
    before = k_cache.clone(), v_cache.clone()
    new_k, new_v = kv_write(k_cache, v_cache, k, v, places)
    for old, new, rows, written in zip((k_cache, v_cache), (new_k, new_v), (k, v), before, strict=True):
        assert torch.equal(old, written)
        for place in range(blocks * slots):
            where = (places == place).nonzero().flatten().tolist()
            want = rows[where[0]] if where else old[place // slots, place % slots]
            assert torch.equal(new[place // slots, place % slots], want)
    opcheck(torch.ops.ew.kv_write.default, (k_cache, v_cache, k, v, places))


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 2**-8), ("i8", 0.5 / 127), ("fp8", 2**-4)])
@pytest.mark.parametrize(("tokens", "sizes"), [(5, (8, 6)), (40, (33, 64))])
def test_a_cache_of_fewer_bits_gives_back_what_they_stand_for(dtype, error, tokens, sizes):
    torch.manual_seed(1)
    k_cache, v_cache = (torch.randn(2, 32, 3, size) for size in sizes)
    k, v = (torch.randn(tokens, 3, size) * torch.logspace(-6, 6, tokens)[:, None, None] for size in sizes)
    places = torch.randperm(64)[:tokens]
    after = kv_write(k_cache, v_cache, k, v, places, dtype)
    opcheck(torch.ops.ew.kv_write.default, (k_cache, v_cache, k, v, places, dtype))
    for old, new, rows in zip((k_cache, v_cache), after, (k, v), strict=True):
        got, largest = new.flatten(0, 1)[places], rows.abs().amax(-1, keepdim=True)
        assert not torch.equal(got, rows)
        # bf16 and fp8 round a share of the value (fp8's smallest a share of the largest), i8 of a head's largest.
        assert ((got - rows).abs() <= error * (largest if dtype == "i8" else rows.abs() + largest * 2**-9)).all()
        others = torch.ones(64, dtype=torch.bool)
        others[places] = False
        assert torch.equal(new.flatten(0, 1)[others], old.flatten(0, 1)[others]), "what is there is not rounded again"


def test_an_unknown_dtype_is_refused():
    cache = torch.zeros(2, 4, 1, 2)
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        kv_write(cache, cache.clone(), torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.tensor([0]), "int8")


def test_slot_outside_the_cache_is_refused():
    cache = torch.zeros(2, 4, 1, 2)
    with pytest.raises(IndexError):
        kv_write(cache, cache.clone(), torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.tensor([8]))
