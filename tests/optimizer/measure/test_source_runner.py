from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.measure import source_runner
from enginewright.optimizer.measure.source_runner import SourceRunner, weight_bytes
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.progress import ProgressEvent

IDS = torch.arange(5, 45).view(2, 20)


def expected(model: PreTrainedModel) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.numpy()


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma2", "Mistral", "GPT2", "Phi3"])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
def test_a_directory(family: str, keep_bytes: int, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """Both compute the same with the same weights, in the same order."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    runner = SourceRunner(tmp_path, keep_bytes=keep_bytes)
    np.testing.assert_array_equal(runner.logits(IDS), expected(model))


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
def test_progress_counts_the_modules_with_weights(keep_bytes: int, tiny_model: Callable[..., PreTrainedModel]) -> None:
    runner = SourceRunner(tiny_model("Llama", num_hidden_layers=2), keep_bytes=keep_bytes)
    events: list[ProgressEvent] = []
    logits = runner.logits(IDS, events.append, "the source")
    modules = 2 * (4 + 3 + 2) + 3  # of a layer: attention, MLP, norms; the embedding, the last norm and the head
    assert events == [ProgressEvent("measure", done, modules, "the source") for done in range(1, modules + 1)]
    np.testing.assert_array_equal(runner.logits(IDS), logits)
    assert len(events) == modules


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2", "Mixtral", "GPTNeoX"])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
def test_some_rows_at_a_time(family: str, keep_bytes: int, tiny_model: Callable[..., PreTrainedModel]) -> None:
    """The logits of all rows, from one run of the layers; the weights are read again after it."""
    runner = SourceRunner(tiny_model(family), keep_bytes=keep_bytes)
    layers: list[object] = []
    next(m for m in runner.model.modules() if isinstance(m, torch.nn.ModuleList))[0].register_forward_hook(
        lambda *_: layers.append(None)
    )
    whole = runner.logits(IDS)
    for ids, reference in zip(IDS.split(1), whole, strict=True):
        layers.clear()
        with runner.logits_of_rows(ids) as rows:
            for some in (slice(0, 7), slice(7, 20), slice(3, 4)):
                np.testing.assert_allclose(rows(some), reference[some], rtol=1e-5, atol=1e-6)  # sums in another order
        assert len(layers) == 1
    np.testing.assert_array_equal(runner.logits(IDS), whole)


def test_rows_of_a_model_that_computes_all_of_them(
    tiny_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = SourceRunner(tiny_model("Llama"))
    forward = type(runner.model).forward
    monkeypatch.setattr(
        type(runner.model), "forward", lambda self, input_ids, use_cache: forward(self, input_ids, use_cache=use_cache)
    )
    with runner.logits_of_rows(IDS[:1]) as rows:
        np.testing.assert_array_equal(rows(slice(4, 9)), runner.logits(IDS)[0, 4:9])


@pytest.mark.parametrize("hidden", [64, 96])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
def test_a_model_object_is_not_touched(
    hidden: int, keep_bytes: int, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    model = tiny_model("GPT2", n_embd=hidden, embd_pdrop=0.5, resid_pdrop=0.5, attn_pdrop=0.5)
    reference = expected(model)
    model.set_attn_implementation("sdpa")
    model.train()
    before = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    runner = SourceRunner(model, keep_bytes=keep_bytes)
    np.testing.assert_array_equal(runner.logits(IDS), reference)  # no dropout, eager
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    for name, value in model.state_dict(keep_vars=True).items():
        assert id(value) == before[name][0]
        assert torch.equal(value, before[name][1])
    assert all(p.requires_grad for p in model.parameters())


def test_what_was_changed_in_a_model_object_shows(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model("Llama")
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    np.testing.assert_array_equal(SourceRunner(model).logits(IDS), expected(model))


def test_half_precision_is_computed_in_single(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model("Llama").to(torch.bfloat16)
    logits = SourceRunner(model).logits(IDS)
    np.testing.assert_array_equal(logits, expected(model.float()))
    assert logits.dtype == np.float32


def test_a_model_that_cannot_be_copied(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model("Llama")
    model.handle = (i for i in range(3))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM: its modules can't be copied"):
        SourceRunner(model)


def test_weight_bytes_count_tied_ones_once(tiny_model: Callable[..., PreTrainedModel]) -> None:
    tied, apart = (weight_bytes(tiny_model("Llama", tie_word_embeddings=t)) for t in (True, False))
    assert apart - tied == 256 * 64 * 4


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2", "Granite"])
def test_its_speed_is_that_of_decode_steps(
    family: str, tiny_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = SourceRunner(tiny_model(family))
    assert runner.speed(64) is None  # a model for tests
    monkeypatch.setattr(source_runner, "_LEAST_TIMED", 1)
    monkeypatch.setattr(source_runner, "_TIMED_SECONDS", 0.0)  # one step with each number of threads
    threads = torch.get_num_threads()
    speed = runner.speed(64)
    assert speed is not None and speed.decode > 0 and speed.context == 32 and speed.threads in (1, threads)
    assert torch.get_num_threads() == threads
    assert runner.speed(32) is None  # no room for a prompt and a token
    assert SourceRunner(tiny_model(family), keep_bytes=0).speed(64) is None  # weights would be read meanwhile
