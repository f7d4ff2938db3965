"""Rotary frequencies that depend on the batch are fixed for a length, and equal transformers' within it."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from enginewright.optimizer.capture import capture
from enginewright.optimizer.capture.build_model import build_model
from enginewright.optimizer.capture.freeze_rope import freeze_rope, own_context_length
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import UnsupportedModelError

from .test_trace import TOLERANCE, eager_logits, step_inputs

ORIGINAL, LONGEST = 24, 96


def longrope(frequencies):
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.05 * i for i in range(frequencies)],
        "long_factor": [2.0 + 0.5 * i for i in range(frequencies)],
    }


CASES = {
    "longrope": (
        "Phi3",
        {
            "rope_parameters": longrope(8),
            "max_position_embeddings": LONGEST,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
            "max_position_embeddings": ORIGINAL,
        },
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_by_default_the_original_context(tiny_model, case):
    """There transformers needs no scaling, so that it gives the same for every length."""
    family, settings = CASES[case]
    model = tiny_model(family, **settings)
    captured = capture(model)
    assert captured.model_info.context_length == ORIGINAL
    sequences = [torch.randint(3, 250, (n,)) for n in (ORIGINAL, 7)]
    got = captured.program.evaluate(step_inputs(sequences))[0]
    torch.testing.assert_close(got, eager_logits(model, sequences), **TOLERANCE)


@pytest.mark.parametrize("length", [48, LONGEST])
@pytest.mark.parametrize("case", CASES)
def test_a_stated_length(tiny_model, case, length):
    """Frequencies are those that transformers makes for a sequence of just that length."""
    family, settings = CASES[case]
    model = tiny_model(family, **settings)
    captured = capture(model, context_length=length)
    assert captured.model_info.context_length == length
    sequences = [torch.randint(3, 250, (length,))]
    got = captured.program.evaluate(step_inputs(sequences))[0]
    torch.testing.assert_close(got, eager_logits(model, sequences), **TOLERANCE)
    short = [s[:ORIGINAL] for s in sequences]
    differs = captured.program.evaluate(step_inputs(short))[0] - eager_logits(tiny_model(family, **settings), short)
    assert differs.abs().max() > 1e-3, "the frequencies of the original context were taken"


def test_a_model_that_has_grown_is_frozen_as_a_new_one(tiny_model):
    family, settings = CASES["dynamic"]
    model = tiny_model(family, **settings)
    fresh = tiny_model(family, **settings)
    eager_logits(model, [torch.randint(3, 250, (60,))])
    sequences = [torch.randint(3, 250, (20,))]
    got = capture(model).program.evaluate(step_inputs(sequences))[0]
    torch.testing.assert_close(got, eager_logits(fresh, sequences), **TOLERANCE)


@pytest.mark.parametrize(("family", "longest"), [("Llama", 512), ("GPT2", 512)])
def test_fixed_frequencies_are_left_alone(tiny_model, family, longest):
    twin = build_model(tiny_model(family).config)
    before = {n: b.clone() for n, b in twin.named_buffers()}
    assert freeze_rope(twin) == longest
    assert freeze_rope(twin, 100) == 100
    assert all(torch.equal(b, before[n]) for n, b in twin.named_buffers())
    with pytest.raises(UnsupportedModelError, match=r"at most 512 tokens.*context_length of 513"):
        freeze_rope(twin, 513)


@pytest.mark.parametrize("case", CASES)
def test_longer_than_the_scaling_goes(tiny_model, case):
    family, settings = CASES[case]
    twin = build_model(tiny_model(family, **settings).config)
    with pytest.raises(UnsupportedModelError, match=rf"at most {LONGEST} tokens"):
        freeze_rope(twin, LONGEST + 1)


def test_frequencies_that_can_not_be_fixed(tiny_model):
    twin = build_model(tiny_model("Llama").config)
    twin.model.rotary_emb.rope_type = "dynamic"
    del twin.model.rotary_emb.original_inv_freq
    with pytest.raises(UnsupportedModelError, match=r"model\.rotary_emb.*can't be fixed"):
        freeze_rope(twin)


def test_each_kind_of_layer_has_its_own(tiny_model):
    kinds = ["sliding_attention", "full_attention"] * 2
    rope = {"full_attention": longrope(8), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = tiny_model(
        "Gemma3Text", num_hidden_layers=4, head_dim=16, layer_types=kinds, rope_parameters=rope, sliding_window=8
    ).config
    assert isinstance(config, transformers.PretrainedConfig)
    twin = build_model(config)
    frequencies = twin.model.rotary_emb.sliding_attention_inv_freq.clone()
    assert freeze_rope(twin, 100) == 100
    rotary = twin.model.rotary_emb
    assert set(rotary.rope_type.values()) == {"default"}
    assert torch.equal(rotary.sliding_attention_inv_freq, frequencies)
    assert torch.equal(rotary.full_attention_inv_freq, rotary.full_attention_long_inv_freq)


@pytest.mark.parametrize("case", CASES)
def test_an_export_says_and_verifies_the_stated_length(tiny_model, tmp_path, case):
    """By the option, or by the recipe's key; the source that it is compared with has the same frequencies."""
    family, settings = CASES[case]
    model = tiny_model(family, **settings)
    recipe = load_recipe("f32").model_copy(update={"context_length": 48})
    for name, options in {"option": {"context_length": 48}, "recipe": {"recipe": recipe}}.items():
        report = export(model, tmp_path / name, **options)
        assert report.context_length == 48
        assert report.verification[0].random_tokens.tokens > 0
        assert Bundle.open(tmp_path / name).model.context_length == 48


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"max_position_embeddings": 77, "max_target_positions": 5}, 77),
        ({"max_target_positions": 448}, 448),  # as Whisper has it, whose positions end there
        ({}, 2048),
    ],
)
def test_the_context_that_a_model_says_it_is_made_for(fields: dict[str, int], length: int) -> None:
    assert own_context_length(PretrainedConfig(**fields)) == length
