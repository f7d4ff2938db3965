"""Tiny models that give numbers for texts, as folders: of vectors, of a reranker, of classes of texts and of tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from enginewright.runtime.bundle.reader import Bundle
from tests.runtime.pooled_toy import VOCABULARY, bert_tokenizer

LONGEST = 64
LABELS = ("low", "middle", "high")
PROMPTS = {"query": "q: ", "document": "d: "}

CLASSES = {
    "embed": "BertModel",
    "rerank": "BertForSequenceClassification",
    "classify": "BertForSequenceClassification",
    "token_classify": "BertForTokenClassification",
}


def save_text_model(folder: Path, kind: str, **config: Any) -> None:
    """Writes the folder of a model of a kind.

    Args:
        folder: the folder, which is created.
        kind: a key of ``CLASSES``.
        config: fields of BertConfig.
    """
    torch.manual_seed(7)
    labels = {} if kind == "embed" else {"id2label": dict(enumerate(LABELS[: 1 if kind == "rerank" else 3]))}
    of_model = transformers.BertConfig(
        **{
            "vocab_size": len(VOCABULARY),
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": LONGEST,
            "initializer_range": 0.2,
            **labels,
            **config,
        }
    )
    model = getattr(transformers, CLASSES[kind])(of_model).eval()
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bert_tokenizer(),
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_max_length=LONGEST,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    if kind == "embed":
        _save_modules(folder, of_model.hidden_size)


def spoiled_copy(bundle: Path, copy: Path, letter: str) -> Path:
    """Copies the f32 bundle of such a model, and writes NaN into the embedding of a letter."""
    shutil.copytree(bundle, copy)
    index = Bundle.open(bundle).index
    table = index.tensors["embeddings.word_embeddings.weight"]
    with (copy / index.blobs[table.blob].file).open("r+b") as file:
        file.seek(table.offset + VOCABULARY[letter] * table.bytes // len(VOCABULARY))
        file.write(np.full(table.shape[1], np.nan, np.float32).tobytes())
    return copy


def _save_modules(folder: Path, size: int) -> None:
    """Writes sentence-transformers' files: the mean of a text's tokens, normalized, and prompts by name."""
    parts = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(parts.items())
    ]
    pooling = {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": LONGEST, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": None},
        "1_Pooling/config.json": pooling,
        "2_Normalize/config.json": {},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
