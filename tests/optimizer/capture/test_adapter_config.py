"""Every key of PEFT's LoraConfig is honoured, has no effect on merged weights, or is refused by its name."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from enginewright.optimizer.capture.adapter_config import read_adapter_config
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError


def config(folder: Path, **keys: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]} | keys))
    return folder


def test_every_key_of_pefts_own_configuration_is_known(tmp_path: Path) -> None:
    from peft import LoraConfig

    LoraConfig(target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert {field.name for field in dataclasses.fields(LoraConfig)} - set(saved) <= {"runtime_config"}
    read_adapter_config(tmp_path)
    for key in saved:  # one that is unknown and on would be called so
        try:
            read_adapter_config(config(tmp_path, **{key: {"some": "thing"}}))
        except (SourceError, UnsupportedModelError) as e:
            if "isn't known, and may change" in e.message:
                pytest.fail(f"{key} is unknown")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', and only LORA can be merged"),
        ({"peft_type": "ADALORA"}, "peft_type is 'ADALORA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa': its training began by changing the base"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga'"),
        ({"init_lora_weights": "new"}, "init_lora_weights is 'new', which isn't known"),
        ({"use_qalora": True}, "use_qalora: QA-LoRA"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication: the adapter is of a model with repeated layers"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: an activated LoRA"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config: a router"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora: block-diagonal"),
        ({"kasa_config": {"beta": 1}}, "kasa_config: KaSA"),
        ({"monteclora_config": {"num_samples": 2}}, "monteclora_config: the adapter draws samples"),
        ({"megatron_config": {"a": 1}}, "megatron_config: the adapter is of Megatron's"),
        ({"use_next_lora": True}, "use_next_lora isn't known, and may change what the adapter means"),
    ],
)
def test_a_key_that_can_t_be_honoured_is_refused_by_name(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"adapter_config\.json: {re.escape(message)}"):
        read_adapter_config(config(tmp_path, **keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"r": "8"}, "Expected `int`, got `str` - at `$.r`"),
        ({"bias": "some"}, "Invalid enum value 'some' - at `$.bias`"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: '(' isn't a regular expression"),
        ({"target_modules": "q_(proj"}, "target_modules: 'q_(proj' isn't a regular expression"),
    ],
)
def test_a_wrong_value_is_named(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=rf"adapter_config\.json: {re.escape(message)}"):
        read_adapter_config(config(tmp_path, **keys))


def test_keys_that_are_off_or_of_the_training_change_nothing(tmp_path: Path) -> None:
    keys = {"use_next_lora": False, "lora_dropout": 0.1, "eva_config": {"rho": 2}, "layer_replication": None}
    read_adapter_config(config(tmp_path, **keys, init_lora_weights="eva", megatron_core="megatron.core"))


def test_a_rank_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"the rank of model\.q_proj is 0"):
        read_adapter_config(config(tmp_path, r=0)).scaling("model.q_proj")


def test_patterns_choose_rank_and_alpha_by_the_end_of_a_name(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {r"layers\.\d.q_proj": 4}, "alpha_pattern": {"q_proj": 2}, "lora_alpha": 16, "r": 8}
    adapter = read_adapter_config(config(tmp_path, **patterns))
    assert adapter.scaling("model.layers.3.q_proj") == (4, 0.5)
    assert adapter.scaling("model.layers.3.k_proj") == (8, 2.0)
    assert read_adapter_config(config(tmp_path, use_rslora=True, r=16, lora_alpha=8)).scaling("q_proj") == (16, 2.0)
