"""Tiny encoders with random weights, as folders that Hugging Face's programs read: for vectors, scores and classes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROMPTS = {"query": "query: ", "document": "passage: "}
LABELS = ("bad", "fair", "good")
CONTEXT = 128
WIDTH = 32


def save_tiny_encoder(folder: Path, kind: str) -> None:
    """Saves a BERT of 2 layers (hidden 32, 2 heads) with a tokenizer of single bytes, the same at every call.

    ``kind`` is "embed" (mean pooling, prompts, normalized), "rerank" (a head with one number) or "classify" (a head of
    ``LABELS``).
    """
    import torch
    import transformers

    tokenizer, size = _tokenizer()
    config = transformers.BertConfig(
        vocab_size=size,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
        **({"num_labels": 1} if kind == "rerank" else {}),
        **({"id2label": dict(enumerate(LABELS)), "label2id": {}} if kind == "classify" else {}),
    )
    of_kind = transformers.BertModel if kind == "embed" else transformers.BertForSequenceClassification
    model = of_kind(config).eval()
    generator = torch.Generator().manual_seed(zlib.crc32(kind.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(1 + noise if "LayerNorm.weight" in name else noise)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind == "embed":
        _save_modules(folder)


def _tokenizer() -> tuple[Any, int]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ("[PAD]", "[CLS]", "[SEP]")
    vocabulary = {one: i for i, one in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = dict(zip(("pad_token", "cls_token", "sep_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=CONTEXT, **names), len(vocabulary)


def _save_modules(folder: Path) -> None:
    """Saves the files of sentence-transformers: mean pooling, normalized vectors, prompts, and their lengths."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True, "include_prompt": True}
    documents: Mapping[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": CONTEXT, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "similarity_fn_name": "cosine"},
        "1_Pooling/config.json": pooling,
        "2_Normalize/config.json": {},
    }
    for name, value in documents.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
