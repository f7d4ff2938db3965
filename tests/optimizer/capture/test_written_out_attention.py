"""Attention that a model writes out itself is known by its values, and anything else is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from enginewright.optimizer.capture import capture
from enginewright.runtime.shared.errors import UnsupportedModelError

from .test_trace import TOLERANCE, eager_logits, step_inputs

ALIBI = torch.tensor([0.5, 0.25, 0.125, 0.0625])
HEADS, LONGEST = 4, 96


class Written(LlamaAttention):
    """Calls ``spelling(q, k, v, mask)``, all [1, N, T, D]."""

    def forward(self, hidden_states, attention_mask=None, **_):
        q, k, v = (
            p(hidden_states).unflatten(-1, (HEADS, self.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(type(self).spelling(q, k, v, attention_mask).transpose(1, 2).flatten(2)), None


class WrittenForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = Written(config, number)


def positions(q):
    row = torch.arange(q.shape[-2])
    return row[:, None], row[None, :]


def scores(q, k, v, mask):
    return q @ k.transpose(-1, -2) * 0.25 + mask


def in_three_axes(q, k, v, mask):
    q, k, v = (x.flatten(0, 1) for x in (q * 0.5, k, v))
    products = torch.bmm(q, k.transpose(1, 2)).view(1, HEADS, q.shape[1], -1) + mask
    products = torch.max(products, torch.full((), torch.finfo(torch.float32).min)).view(HEADS, q.shape[1], -1)
    return torch.bmm(products.softmax(-1), v).view(1, HEADS, q.shape[1], -1)


def with_slopes(q, k, v, mask):
    bias = (ALIBI[:, None] * torch.arange(q.shape[-2])).view(HEADS, 1, -1)
    products = bias.baddbmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=0.25)
    return (products[None] + mask).softmax(-1) @ v


def in_a_window(q, k, v, mask):
    query, key = positions(q)
    seen = (key <= query) & (key > query - 7)
    return torch.where(seen, q @ k.transpose(-1, -2), -1e4).softmax(-1) @ v


def one_key_head(q, k, v, mask):
    k, v = k[:, :1], v[:, :1]
    return scores(q, k, v, mask).softmax(-1) @ v


def in_a_table(q, k, v, mask):
    seen = torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril()[: q.shape[-2], : k.shape[-2]]
    return (q @ k.transpose(-1, -2)).masked_fill(~seen, -torch.inf).softmax(-1) @ v


RIGHT = {  # scale, window, whether it has slopes
    "added mask": (lambda q, k, v, mask: scores(q, k, v, mask).softmax(-1) @ v, (0.25, 0, False)),
    "three axes": (in_three_axes, (1.0, 0, False)),
    "slopes": (with_slopes, (0.25, 0, True)),
    "window": (in_a_window, (1.0, 7, False)),
    "one key head": (one_key_head, (0.25, 0, False)),
    "table": (in_a_table, (1.0, 0, False)),
}

WRONG = {
    "no mask": (lambda q, k, v, mask: (q @ k.transpose(-1, -2)).softmax(-1) @ v, "its mask is neither causal"),
    "chunks": (
        lambda q, k, v, mask: (
            scores(q, k, v, mask).masked_fill(positions(q)[0] // 8 != positions(q)[1] // 8, -torch.inf).softmax(-1) @ v
        ),
        "its mask is neither causal nor causal within a sliding window",
    ),
    "capped": (
        lambda q, k, v, mask: (torch.tanh(q @ k.transpose(-1, -2)) + mask).softmax(-1) @ v,
        "its scores aren't products times a number",
    ),
    "curved": (
        lambda q, k, v, mask: (scores(q, k, v, mask) + 0.01 * positions(q)[1] ** 2).softmax(-1) @ v,
        "isn't linear in the distance",
    ),
    "by length": (
        lambda q, k, v, mask: (scores(q, k, v, mask) * q.shape[-2] ** 0.5).softmax(-1) @ v,
        "depend on how long the sequence is",
    ),
    "twice": (lambda q, k, v, mask: (2 * scores(q, k, v, mask).softmax(-1)) @ v, "aren't those that the softmax gives"),
    "two products": (
        lambda q, k, v, mask: (scores(q, k, v, mask) + q @ q.transpose(-1, -2)).softmax(-1) @ v,
        "makes scores of more than one product",
    ),
    "over queries": (lambda q, k, v, mask: scores(q, k, v, mask).softmax(-2) @ v, "isn't over keys"),
}


def model_of(spelling):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    config = LlamaConfig(**sizes, intermediate_size=48, vocab_size=64, max_position_embeddings=LONGEST)
    Written.spelling = staticmethod(spelling)
    return WrittenForCausalLM._from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("case", RIGHT)
def test_attention_is_found(case):
    spelling, (scale, window, slopes) = RIGHT[case]
    model = model_of(spelling)
    program = capture(model).program
    calls = program.nodes_of(torch.ops.ew.attention.default)
    assert [n.args[4] for n in calls] == [0]
    for call in calls:
        assert call.args[5:8] == pytest.approx((scale, window, 0.0))
        assert (call.args[9] is not None) == slopes
    sequences = [torch.randint(3, 64, (n,)) for n in (21, 1, 12)]
    got = program.evaluate(step_inputs(sequences))[0]
    torch.testing.assert_close(got, eager_logits(model, sequences), **TOLERANCE)


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_attention_is_refused(case):
    spelling, message = WRONG[case]
    with pytest.raises(UnsupportedModelError, match=rf"layers\.0\.self_attn writes its attention out.*{message}"):
        capture(model_of(spelling))
