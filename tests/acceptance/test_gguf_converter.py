"""Files by llama.cpp's own converter: the logits of transformers' model, and of llama.cpp.

``llama_cpp_oracle`` says how to run it. The environment variable LLAMA_CPP names the folder of llama.cpp's sources:
``vendor/llama.cpp`` in the source package of llama-cpp-python
(`pip download --no-binary :all: --no-deps llama-cpp-python==0.3.36`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.acceptance.llama_cpp_oracle import MARKS, Oracle
from tests.acceptance.tiny_configs import tiny_family
from tests.optimizer.capture.gguf.test_architectures import ids_of, logits_of

SOURCES = os.environ.get("LLAMA_CPP", "")
pytestmark = [*MARKS, pytest.mark.skipif(not SOURCES, reason="LLAMA_CPP names no folder of llama.cpp's sources")]

CONVERT = """import runpy, sys
sys.path.insert(0, ".")
from conversion import base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
base.TextModel._set_vocab_llama_hf = base.TextModel._set_vocab_gpt2
runpy.run_path("convert_hf_to_gguf.py", run_name="__main__")"""
"""The converter, for a tokenizer whose digest it doesn't know."""

TOLERANCE = 2e-4
"""The largest difference, relative to the largest logit: rounding in float32."""


@dataclass(frozen=True)
class Conversion:
    """A family's tiny model, and the converter's view of its folder.

    Attributes:
        fields: fields of the configuration, beside those of the tiny model.
        replaced: fields of config.json that the converter reads by another name or value; None leaves one out.
        options: options of the converter.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    replaced: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()


_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rms_norm_eps": 1e-6,
}
_SECTIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    }
}
_KIMI = {
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["sparse", "sparse"],  # transformers saves dense layers by a name that nobody reads
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
}
CONVERSIONS: Mapping[str, Conversion] = {
    "qwen3_5_text": Conversion(_DELTA | _SECTIONS, options=("--no-mtp",)),
    "qwen3_5_moe_text": Conversion(_DELTA | _SECTIONS, options=("--no-mtp",)),
    "qwen3_next": Conversion(_DELTA, options=("--no-mtp",)),
    "lfm2": Conversion(),
    "lfm2_moe": Conversion({"num_dense_layers": 1}),
    "granitemoehybrid": Conversion(
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
        {"layer_types": ["mamba", "attention"], "num_experts_per_tok": None},
    ),
    "falcon_h1": Conversion(
        {
            "head_dim": 16,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 2,
            "key_multiplier": 0.5,
            "ssm_multipliers": [0.5, 0.7, 1.1, 1.2, 0.9],
            "mlp_multipliers": [0.8, 1.2],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 0.7,
            "ssm_out_multiplier": 1.3,
        },
        {"head_dim": 16},
    ),
    "nemotron_h": Conversion(
        {"layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"]},
        {
            "hybrid_override_pattern": "M*-M",
            "num_hidden_layers": 4,
            # Without a model type the converter reads the fields of config.json alone, and not transformers' defaults.
            **dict.fromkeys(("model_type", "layers_block_type")),
            **dict.fromkeys(("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group")),
        },
    ),
    "nemotron_h moe": Conversion(
        {"layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"]},
        {"hybrid_override_pattern": "M*EM", "layers_block_type": None},
    ),
    "jamba": Conversion({"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1}),
    "kimi_linear": Conversion(
        _KIMI,
        {
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1],
                "head_dim": 32,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
            "first_k_dense_replace": 0,
            "moe_router_activation_func": "sigmoid",
        },
    ),
    "mamba": Conversion(),
    "mamba2": Conversion({"expand": 2}),
}
"""A model of each family with recurrent layers; a word after the family tells variants apart."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    oracle = Oracle(tmp_path_factory.mktemp("oracle"))
    yield oracle
    oracle.close()


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, with the one merge that llama.cpp asks for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet, "th"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def converted(folder: Path, conversion: Conversion, target: Path) -> None:
    """Has the converter make ``target`` of a folder, whose config.json is afterwards as it was."""
    config = folder / "config.json"
    text = config.read_text(encoding="utf-8")
    fields = json.loads(text) | dict(conversion.replaced)
    config.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}), encoding="utf-8")
    command = [sys.executable, "-c", CONVERT, str(folder), "--outfile", str(target), "--outtype", "f32"]
    done = subprocess.run([*command, *conversion.options], cwd=SOURCES, capture_output=True, text=True, check=False)
    config.write_text(text, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("family", CONVERSIONS)
def test_a_converted_file_has_the_logits_of_its_model(family: str, oracle: Oracle, tmp_path: Path) -> None:
    conversion, folder, target = CONVERSIONS[family], tmp_path / "model", tmp_path / "model.gguf"
    tiny_family(family.split()[0], vocab_size=272, **conversion.fields).save_pretrained(folder)
    bytes_tokenizer().save_pretrained(folder)
    converted(folder, conversion, target)
    ids = ids_of()
    logits = logits_of(target, ids).numpy()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0].numpy()
    theirs = oracle.logits(target, ids.tolist())
    assert theirs is not None, "llama.cpp doesn't load the file"
    for name, reference in (("transformers", expected), ("llama.cpp", theirs)):
        difference = float(np.abs(logits - reference).max() / np.abs(reference).max())
        assert difference <= TOLERANCE, f"{difference:.1e} from {name}"
