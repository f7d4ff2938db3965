"""ew.rope_table and ew.rope against definitions and other implementations."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck
from transformers import LlamaConfig
from transformers.models.cohere.modeling_cohere import rotate_half as rotate_pairs
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from enginewright.passes.ops.rope import rope, rope_table

SIZES = [(5, 2, 8), (33, 3, 64)]  # T, N, D
# cos and sin of angles up to 100 in f32; the same function on both sides, products in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize(("tokens", "heads", "d"), SIZES)
def test_equals_transformers(tokens, heads, d):
    torch.manual_seed(4)
    config = LlamaConfig(hidden_size=heads * d, num_attention_heads=heads, head_dim=d)
    positions = torch.randint(0, 100, (tokens,), dtype=torch.int32)
    x = torch.randn(tokens, heads, d)
    module = LlamaRotaryEmbedding(config)
    cos, sin = module(x[None], positions[None].long())
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    table = rope_table(positions, module.inv_freq, 1.0)
    torch.testing.assert_close(rope(x, table, False), want[0].transpose(0, 1), **TOLERANCE)
    assert (rope(x, table, True) - want[0].transpose(0, 1)).abs().max() > 1e-2  # another pairing, another result
    torch.testing.assert_close(rope_table(positions, module.inv_freq, 2.5), table * 2.5, **TOLERANCE)


@pytest.mark.parametrize(("tokens", "heads", "d"), SIZES)
def test_interleaved_pairs_equal_transformers(tokens, heads, d):
    torch.manual_seed(5)
    x = torch.randn(tokens, heads, d)
    table = rope_table(torch.arange(tokens), torch.rand(d // 2), 1.0)
    cos, sin = (half.repeat_interleave(2, dim=-1)[:, None] for half in table.chunk(2, dim=-1))
    torch.testing.assert_close(rope(x, table, True), x * cos + rotate_pairs(x) * sin, **TOLERANCE)


@pytest.mark.parametrize("interleaved", [True, False])
def test_what_is_past_the_table_passes(interleaved):
    x = torch.randn(4, 2, 16)
    table = rope_table(torch.arange(4), torch.rand(3), 1.0)
    got = rope(x, table, interleaved)
    assert torch.equal(got[..., 6:], x[..., 6:])
    assert torch.equal(got[..., :6], rope(x[..., :6], table, interleaved))
    assert not torch.equal(got[1:, :, :6], x[1:, :, :6])


@pytest.mark.parametrize(("tokens", "heads", "d"), SIZES)
@pytest.mark.parametrize("interleaved", [True, False])
def test_fakes_agree(tokens, heads, d, interleaved):
    positions, inv_freq = torch.arange(tokens, dtype=torch.int32), torch.rand(d // 2)
    opcheck(torch.ops.ew.rope_table.default, (positions, inv_freq, 1.5))
    opcheck(torch.ops.ew.rope.default, (torch.randn(tokens, heads, d), torch.randn(tokens, d), interleaved))
    opcheck(torch.ops.ew.rope.default, (torch.randn(tokens, heads, d), torch.randn(tokens, d - 2), interleaved))
