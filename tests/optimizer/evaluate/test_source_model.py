from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.evaluate.models import open_reference
from enginewright.optimizer.evaluate.source_model import SourceModel
from enginewright.runtime.shared.errors import MissingDependencyError

from .conftest import Pair


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma2", "Mistral", "GPT2", "Phi3"])
def test_logits_are_transformers(family: str, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """Both compute the same with the same weights, in the same order."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(1).integers(3, 256, 40).tolist()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    source = SourceModel(tmp_path)
    np.testing.assert_array_equal(source.logits(ids), expected)
    assert source.tokenizer is None
    assert source.vocab_size == 256
    assert source.context_length == 512


@pytest.mark.parametrize("tied", [False, True])
def test_tied_tables_are_one_tensor(tied: bool, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    model = tiny_model("Llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    ids = [5, 6, 7]
    source = SourceModel(tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    np.testing.assert_array_equal(source.logits(ids), expected)
    loaded = source._runner.model
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == tied


def test_the_tokenizer_is_the_bundle_s(pair: Pair) -> None:
    source = open_reference(pair.folder, threads=0, memory=None)
    bundle = open_reference(pair.bundle, threads=1, memory="16MiB")
    assert source.tokenizer is not None
    assert bundle.tokenizer is not None
    assert source.tokenizer.encode("Où?") == bundle.tokenizer.encode("Où?")
    source.close()
    bundle.close()


def test_without_torch_it_says_what_to_install(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("enginewright.optimizer.evaluate.source_model")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match="needs torch") as caught:
        open_reference(pair.folder, threads=1, memory=None)
    assert "enginewright[export]" in str(caught.value.hint)


def test_a_gguf_file_is_close_to_its_bundle(smollm2_gguf: Path, smollm2_bundle: Path) -> None:
    source = SourceModel(smollm2_gguf)
    bundle = open_reference(smollm2_bundle, threads=0, memory="64MiB")
    assert source.tokenizer is not None
    assert bundle.tokenizer is not None
    ids = source.tokenizer.encode("The capital of France is Paris, and that of Spain is Madrid.")
    assert ids == bundle.tokenizer.encode("The capital of France is Paris, and that of Spain is Madrid.")
    # f32 sums in another order over 30 layers, of logits up to 30: measured 1e-4.
    np.testing.assert_allclose(bundle.logits(ids), source.logits(ids), atol=1e-3, rtol=0)
    bundle.close()
