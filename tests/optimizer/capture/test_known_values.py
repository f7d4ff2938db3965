"""Positions that a model counts itself, and rows of tables that are the same for all tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from enginewright.optimizer.capture import capture
from enginewright.runtime.shared.errors import UnsupportedModelError

from .test_trace import TOLERANCE, eager_logits, step_inputs

LONGEST = 96


class Counting(torch.nn.Embedding):
    """The model's token embedding, with ``more(self, ids)`` added to it."""

    def __init__(self, like):
        super().__init__(like.num_embeddings, like.embedding_dim)
        self.positions = torch.nn.Embedding(LONGEST + 2, like.embedding_dim)
        self.types = torch.nn.Embedding(3, like.embedding_dim)
        self.register_buffer("rows", torch.arange(LONGEST)[None], persistent=False)

    def forward(self, ids):
        return super().forward(ids) + type(self).more(self, ids)


class CountingForCausalLM(LlamaForCausalLM):
    _tied_weights_keys = None

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens = Counting(self.model.embed_tokens)


RIGHT = {
    "counted": lambda m, ids: m.positions(torch.arange(ids.shape[1])[None] + 2),
    "from two on": lambda m, ids: m.positions(torch.arange(2, ids.shape[1] + 2)),
    "buffer": lambda m, ids: m.positions(m.rows[:, : ids.shape[1]]),
    "summed": lambda m, ids: m.positions(torch.ones_like(ids).cumsum(1) - 1),
    "one type": lambda m, ids: m.types(torch.full_like(ids, 2)),
}

WRONG = {
    "backwards": lambda m, ids: m.positions(ids.shape[1] - torch.arange(ids.shape[1])),
    "rows of a table": lambda m, ids: m.positions.weight[: ids.shape[1]],
    "tokens before": lambda m, ids: m.positions((ids == 3).long().cumsum(1)),
}


def model_of(more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, intermediate_size=48, vocab_size=64, max_position_embeddings=LONGEST)
    Counting.more = staticmethod(more)
    return CountingForCausalLM._from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("case", RIGHT)
def test_each_token_gets_its_own_position(case):
    model = model_of(RIGHT[case])
    program = capture(model).program
    sequences = [torch.randint(3, 64, (n,)) for n in (21, 1, 12)]
    got = program.evaluate(step_inputs(sequences))[0]
    torch.testing.assert_close(got, eager_logits(model, sequences), **TOLERANCE)


@pytest.mark.parametrize("case", WRONG)
def test_other_numbers_of_a_sequence_are_refused(case):
    with pytest.raises(UnsupportedModelError, match=r"one token could change another's result|embed_tokens"):
        capture(model_of(WRONG[case]))
