"""Models without memory for their weights, and the configurations that are refused."""

from __future__ import annotations

import pytest
import torch
import transformers

from enginewright.optimizer.capture import attention_interface
from enginewright.optimizer.capture.build_model import build_model
from enginewright.runtime.shared.errors import UnsupportedModelError


def resident_bytes() -> int:
    with open("/proc/self/statm") as handle:
        return int(handle.read().split()[1]) * 4096


@pytest.mark.parametrize("hidden", [512, 2048])
def test_weights_take_no_memory(hidden):
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=8, vocab_size=64000
    )
    build_model(transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=64))
    before = resident_bytes()  # of modules, which the first model loads, too
    model = build_model(config)
    weights = list(model.parameters())
    # The allocator writes a few bytes in front of each weight. They take a page of 2 MB where the system or an earlier
    # array of numpy, which asks for such pages, gave the heap huge pages.
    headers = len(weights) * 2**21
    size = sum(weight.numel() * 4 for weight in weights)
    assert size > 2 * headers
    assert resident_bytes() - before < headers + 2**24
    assert not model.training


def test_buffers_have_values(tiny_model):
    model = tiny_model("Llama")
    built = build_model(model.config)
    assert torch.equal(built.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert model.config._attn_implementation == "eager"


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(), "isn't a decoder-only language model"),
        (transformers.ViTConfig(), "isn't a decoder-only language model"),
        (transformers.CLIPConfig(), "isn't a decoder-only language model"),
        (transformers.BertConfig(architectures=["BertForMaskedLM"]), "BertForMaskedLM isn't a decoder-only"),
        (transformers.LlamaConfig(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        (transformers.LlamaConfig(**SIZES, hidden_act="no-such"), "can't build llama.*no-such"),
    ],
    ids=[
        "seq2seq",
        "vision",
        "contrastive",
        "encoder",
        "classifier",
        "activation",
    ],
)
def test_refused(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        build_model(config)


@pytest.mark.parametrize("kind", ["LlamaForTokenClassification", "LlamaModel"])
def test_a_class_without_a_language_model_head_is_refused(kind):
    with pytest.raises(UnsupportedModelError, match=f"{kind} isn't a decoder-only language model"):
        build_model(transformers.LlamaConfig(**SIZES), getattr(transformers, kind))


def test_a_class_derived_from_a_decoder_is_one():
    class Mine(transformers.LlamaForCausalLM):
        pass

    assert isinstance(build_model(transformers.LlamaConfig(**SIZES), Mine), Mine)


def test_code_that_comes_with_a_model_is_refused():
    config = transformers.LlamaConfig(**SIZES, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    with pytest.raises(UnsupportedModelError, match="auto_map"):
        build_model(config)


def test_attention_classes_of_its_own_get_masks_of_ours():
    config = transformers.GPTJConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=64, rotary_dim=8)
    model = build_model(config)
    assert type(model.transformer.h[0].attn).__name__ == "GPTJAttention"
    assert model.config._attn_implementation == attention_interface.NAME
