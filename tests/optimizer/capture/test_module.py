"""Live models: traced through a twin, weights by reference."""

from __future__ import annotations

import pytest
import torch
import transformers

from enginewright.optimizer.capture import capture
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .test_trace import TOLERANCE, eager_logits, step_inputs


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_weights_are_references(tiny_model, family):
    model = tiny_model(family)
    captured = capture(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shared = [n for n in captured.program.weights if n in parameters]
    assert shared
    for name in shared:
        assert captured.program.weights[name].evaluate().data_ptr() == parameters[name].data_ptr()
    assert (captured.source.kind, captured.source.name) == ("module", type(model).__name__)
    assert captured.tokenizer_files is None


def test_16_bit_models(tiny_model):
    model = tiny_model("Llama")
    captured = capture(model.to(torch.bfloat16))
    weight = captured.program.weights["model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight.evaluate(), model.model.layers[0].mlp.up_proj.weight.float())


def test_frequencies_that_someone_changed_are_kept(tiny_model):
    model = tiny_model("Llama")
    model.model.rotary_emb.inv_freq.mul_(0.5)
    sequences = [torch.randint(3, 250, (6,))]
    got = capture(model).program.evaluate(step_inputs(sequences))[0]
    torch.testing.assert_close(got, eager_logits(model, sequences), **TOLERANCE)


def test_a_model_that_was_rebuilt_is_refused(tiny_model):
    model = tiny_model("Llama")
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 96, bias=False)
    with pytest.raises(SourceError, match=r"up_proj\.weight has shape \(96, 64\).*\(128, 64\)"):
        capture(model)
    model = tiny_model("Llama")
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 128, bias=True)
    with pytest.raises(SourceError, match=r"up_proj\.bias has no place"):
        capture(model)


def test_a_tied_table_that_was_replaced_is_refused(tiny_model):
    model = tiny_model("Llama", tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    capture(model)  # still equal
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(SourceError, match=r"embed_tokens\.weight and lm_head\.weight differ.*tie_word_embeddings"):
        capture(model)


def test_other_modules_are_refused():
    with pytest.raises(UnsupportedModelError, match="Linear isn't a transformers model"):
        capture(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification"])
def test_objects_of_encoders_are_refused_with_what_to_do(kind):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = getattr(transformers, kind)(transformers.BertConfig(**sizes, intermediate_size=48))
    with pytest.raises(UnsupportedModelError, match=f"{kind}: an encoder's pooling") as error:
        capture(model)
    assert "export the folder" in error.value.hint
