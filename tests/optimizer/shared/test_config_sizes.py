"""Sizes that no model has are refused, at once, and with the name that the file has for them or transformers."""

from __future__ import annotations

import json
import time

import pytest
import transformers

from enginewright.optimizer.capture import capture
from enginewright.optimizer.shared.config_sizes import check_sizes
from enginewright.runtime.shared.errors import SourceError


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 2**31), ("hidden_size", 2**40), ("vocab_size", -5), ("head_dim", 2**20)],
)
def test_sizes_that_no_model_has(field, value, tiny_model, tmp_path):
    tiny_model("Llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = time.thread_time()
    with pytest.raises(SourceError, match=rf"config\.json: {field} is {value}"):
        capture(tmp_path)
    assert time.thread_time() - start < 10


@pytest.mark.parametrize("config", [transformers.LlamaConfig(), transformers.XLNetConfig(), transformers.GPT2Config()])
def test_sizes_of_models(config):
    check_sizes(config, "config.json")


def test_a_size_that_differs_between_layers_is_left_to_the_model():
    config = transformers.Gemma4TextConfig(head_dim=16, global_head_dim=32)
    with pytest.raises(RuntimeError):
        _ = config.head_dim
    check_sizes(config, "config.json")
    with pytest.raises(SourceError, match="hidden_size is"):
        check_sizes(transformers.Gemma4TextConfig(head_dim=16, global_head_dim=32, hidden_size=1 << 40), "config.json")


def test_names_of_an_older_family():
    with pytest.raises(SourceError, match="num_hidden_layers is 20000"):
        check_sizes(transformers.GPT2Config(n_layer=20000), "config.json")
