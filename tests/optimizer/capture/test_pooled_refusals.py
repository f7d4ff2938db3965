"""Kinds of models that aren't compiled are refused by name, from saved folders, with what to use instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PretrainedConfig

from enginewright.optimizer.export import export
from enginewright.runtime.shared.errors import UnsupportedModelError

SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def t5(kind: str) -> PretrainedConfig:
    small = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return getattr(transformers, kind)(**small, eos_token_id=2, pad_token_id=0)  # type: ignore[no-any-return]


def bart() -> PretrainedConfig:
    sizes: dict[str, Any] = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in _BART.items()}
    return transformers.BartConfig(vocab_size=99, d_model=32, **sizes, **ENDS)


_BART = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
BERT: Callable[[], PretrainedConfig] = lambda: transformers.BertConfig(**SIZES)  # noqa: E731
T5_INSTEAD, FOR_SEARCH = "an embedding model of another family", "an embedding model with a Pooling.* and a reranker"

CASES: dict[str, tuple[str, Callable[[], PretrainedConfig], str, str]] = {
    "t5": ("T5EncoderModel", lambda: t5("T5Config"), "T5EncoderModel is a T5 encoder", T5_INSTEAD),
    "umt5": ("UMT5EncoderModel", lambda: t5("UMT5Config"), "UMT5EncoderModel is a T5 encoder", T5_INSTEAD),
    "t5-classes": ("T5ForSequenceClassification", lambda: t5("T5Config"), "is a T5 encoder", T5_INSTEAD),
    "t5-text": (
        "T5ForConditionalGeneration",
        lambda: t5("T5Config"),
        "isn't a decoder-only language model: it is an encoder with a decoder",
        "decoders that write text, and encoders",
    ),
    "clip": (
        "CLIPTextModel",
        lambda: transformers.CLIPTextConfig(**SIZES, **ENDS),
        "CLIPTextModel is a text encoder whose vectors are compared with those of images",
        "an embedding model of texts",
    ),
    "siglip": (
        "SiglipTextModel",
        lambda: transformers.SiglipTextConfig(**SIZES, **ENDS),
        "compared with those of images",
        "an embedding model of texts",
    ),
    "bart": ("BartModel", bart, "it is an encoder with a decoder", "decoders that write text, and encoders"),
    "bart-classes": (
        "BartForSequenceClassification",
        bart,
        "BartForSequenceClassification is an encoder with a decoder",
        "an encoder alone, such as XLM-RoBERTa or ModernBERT",
    ),
    "colbert": ("BertModel", BERT, "HF_ColBERT gives a vector for each token", FOR_SEARCH),
    "pylate": ("BertModel", BERT, "'ColBERT': a vector for each token", FOR_SEARCH),
    "splade": ("BertForMaskedLM", BERT, "MLMTransformer, which makes sparse vectors", FOR_SEARCH),
    "sparse": ("BertForMaskedLM", BERT, "'SparseEncoder': sparse vectors", FOR_SEARCH),
    "multi-vector": ("BertModel", BERT, "'MultiVectorEncoder': a vector for each token", FOR_SEARCH),
}
FILES: dict[str, dict[str, Any]] = {
    "colbert": {"config.json": {"architectures": ["HF_ColBERT"]}},
    "pylate": {
        "config_sentence_transformers.json": {"model_type": "ColBERT"},
        "modules.json": ["Transformer", "Dense"],
    },
    "splade": {"modules.json": ["MLMTransformer", "SpladePooling"]},
    "sparse": {
        "config_sentence_transformers.json": {"model_type": "SparseEncoder"},
        "modules.json": ["MLMTransformer", "SpladePooling"],
    },
    "multi-vector": {
        "config_sentence_transformers.json": {"model_type": "MultiVectorEncoder"},
        "modules.json": ["Transformer", "Dense", "Normalize"],
    },
}
"""Case -> the files that are added or changed; a list has the names of modules."""


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    kind, config, message, instead = CASES[case]
    folder = tmp_path / "model"
    getattr(transformers, kind)(config()).save_pretrained(folder)
    for name, content in FILES.get(case, {}).items():
        if isinstance(content, list):
            content = [
                {"idx": i, "name": str(i), "path": "" if not i else f"{i}_{part}", "type": f"library.models.{part}"}
                for i, part in enumerate(content)
            ]
        else:
            path = folder / name
            content = (json.loads(path.read_text()) if path.is_file() else {}) | content
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(UnsupportedModelError, match=rf"(?s){message}.*\n  .*{instead}"):
        export(folder, tmp_path / "model.bundle")
    assert not (tmp_path / "model.bundle").exists()
