"""GGUF files of embedding models: the vectors of llama.cpp, and of files that its own converter makes.

``llama_cpp_oracle`` says how to run it; test_gguf_converter.py says what LLAMA_CPP names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from enginewright.optimizer.export import export
from enginewright.optimizer.measure.text_results import run_texts
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.open import make_executor
from tests.acceptance.llama_cpp_oracle import MARKS, Oracle
from tests.acceptance.test_gguf_converter import CONVERT, SOURCES, bytes_tokenizer
from tests.optimizer.capture.gguf.gguf_encoders import ENCODERS, Array, build, hidden_states, write_encoder

pytestmark = MARKS
CONVERTS = pytest.mark.skipif(not SOURCES, reason="LLAMA_CPP names no folder of llama.cpp's sources")
TEXTS = ([3, 17, 99, 4], [5], list(range(3, 60)), [9, 8, 7, 6, 5, 4, 3, 2, 1, 100, 111, 120])

NO_VOCABULARY: dict[str, Any] = {"keys": {"vocab_size": 128}, "others": {"tokenizer.ggml.model": "no_vocab"}}

TABLE_OF_GELU = frozenset({"bert", "jina-bert-v2", "jina-bert-v3", "modern-bert", "gemma-embedding"})
"""Architectures with GELU, which llama.cpp reads from a table in float16, and by tanh."""


RANK = 4
"""llama.cpp's number of the pooling of rerankers."""
POOLINGS = {"bert": 2, "qwen2": 3, "qwen3": 3}
"""llama.cpp's numbers of poolings other than the mean."""


def tolerance(architecture: str) -> float:
    """The largest difference of a number of a normalized vector: rounding in float32, or that of GELU's table."""
    return 5e-4 if architecture in TABLE_OF_GELU else 1e-5


def normalized(row: Array) -> Array:
    return row / np.linalg.norm(row)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    oracle = Oracle(tmp_path_factory.mktemp("oracle"))
    yield oracle
    oracle.close()


def compare(path: Path, oracle: Oracle, most: float, recipe: str = "f32") -> Array:
    """Exports a file, compares its vectors with llama.cpp's, and returns them."""
    export(path, path.with_suffix(".bundle"), recipe=recipe)
    with LLM(path.with_suffix(".bundle")) as llm:
        vectors: Array = llm.embed(list(TEXTS))
    theirs = [oracle.pooled(path, text) for text in TEXTS]
    assert all(one is not None for one in theirs), "llama.cpp doesn't take the file"
    difference = float(np.abs(vectors - [normalized(one) for one in theirs if one is not None]).max())
    print(f"{path.stem}: {difference:.1e} from llama.cpp")
    assert difference <= most
    return vectors


@pytest.mark.parametrize("architecture", ENCODERS)
def test_vectors_are_llama_cpp_s(architecture: str, oracle: Oracle, tmp_path: Path) -> None:
    model, pooling = build(architecture), POOLINGS.get(architecture, 1)
    path = write_encoder(tmp_path / f"{architecture}.gguf", architecture, model, pooling=pooling, **NO_VOCABULARY)
    compare(path, oracle, tolerance(architecture))


@pytest.mark.parametrize("architecture", ["bert", "nomic-bert", "jina-bert-v2", "qwen3"])
def test_vectors_with_weights_of_8_bits(architecture: str, oracle: Oracle, tmp_path: Path) -> None:
    """Both round activations to 8 bits, each in its own way."""
    q8 = gguf.GGMLQuantizationType.Q8_0
    path = tmp_path / f"{architecture}.gguf"
    write_encoder(path, architecture, build(architecture), quantized=q8, **NO_VOCABULARY)
    compare(path, oracle, 2e-2, "gguf")


@dataclass(frozen=True)
class Conversion:
    """A tiny model's folder, as the converter reads it.

    Attributes:
        model_type: transformers' configuration class.
        model_class: the class whose folder it is; "AutoModel..." or its own.
        config: what differs from ``SIZES``.
        replaced: fields of config.json for the converter.
        pooling: sentence-transformers' name of a pooling; None for a folder without.
        tokenizer: "words" for WordPiece, "bytes" for byte-level BPE.
        most: the largest difference from llama.cpp.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    model_class: Any = AutoModel
    replaced: Mapping[str, Any] = field(default_factory=dict)
    pooling: str | None = "mean"
    tokenizer: str = "bytes"
    most: float = 5e-4


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 272,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "id2label": {0: "score"},
}
_HEADS = {"num_key_value_heads": 2, "head_dim": 16}
CONVERSIONS: Mapping[str, Conversion] = {
    "bert": Conversion("bert", tokenizer="words"),
    "bert cls": Conversion("bert", tokenizer="words", pooling="cls"),
    "distilbert": Conversion(
        "distilbert",
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
        replaced={"max_position_embeddings": 256},
        tokenizer="words",
    ),
    "roberta": Conversion("roberta", {"max_position_embeddings": 257}),
    "roberta reranker": Conversion(
        "roberta", {"max_position_embeddings": 257}, AutoModelForSequenceClassification, pooling=None
    ),
    "modernbert": Conversion(
        "modernbert", {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}, replaced={"layer_norm_eps": 1e-5}
    ),
    "eurobert": Conversion("eurobert", {**_HEADS, "mask_token_id": 3, "classifier_pooling": "mean"}, most=1e-5),
    "gemma": Conversion(
        "gemma3_text",
        {
            **_HEADS,
            "vocab_size": 263,  # the converter leaves out rows beyond those of its tokenizer's file
            "num_hidden_layers": 6,
            "sliding_window": 8,
            "use_bidirectional_attention": True,
            "query_pre_attn_scalar": 16,
        },
    ),
    "qwen3": Conversion("qwen3", _HEADS, pooling="lasttoken", most=1e-5),
    "qwen2": Conversion("qwen2", {"num_key_value_heads": 2}, pooling="lasttoken", most=1e-5),
}
"""Folders of the converter's families; a word after the family tells variants apart."""

CONVERT_ENCODERS = CONVERT.replace(
    "runpy.run_path",
    "base.TextModel._set_vocab_sentencepiece = base.TextModel._set_vocab_gpt2\n"
    "from conversion import gemma\n"
    "gemma.Gemma3Model.set_vocab = base.TextModel._set_vocab_gpt2\n"
    "runpy.run_path",
)


def words_tokenizer() -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer."""
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
    words = [f"word{i}" for i in range(SMALL["vocab_size"] - len(special))]
    backend = Tokenizer(models.WordPiece({t: i for i, t in enumerate([*special, *words])}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    names = dict(zip(("pad_token", "cls_token", "sep_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def save(folder: Path, conversion: Conversion) -> Any:
    """Saves a random model with its pooling and its tokenizer, and returns it."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[conversion.model_type](**(SMALL | dict(conversion.config)))
    model = conversion.model_class.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    of_norms = 0.0 if "gemma" in conversion.model_type else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(of_norms if parameter.dim() == 1 and name.endswith("weight") else 0.0, 0.1)
    model.save_pretrained(folder)
    (words_tokenizer() if conversion.tokenizer == "words" else bytes_tokenizer()).save_pretrained(folder)
    if conversion.pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": conversion.pooling}))
        modules = [{"type": f"sentence_transformers.models.{one}", "path": path} for one, path in _MODULES]
        (folder / "modules.json").write_text(json.dumps(modules))
    return model


_MODULES = (("Transformer", ""), ("Pooling", "1_Pooling"))


@CONVERTS
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_converted_folder_has_the_vectors_of_its_model(name: str, oracle: Oracle, tmp_path: Path) -> None:
    conversion, folder, target = CONVERSIONS[name], tmp_path / "model", tmp_path / f"{name.replace(' ', '-')}.gguf"
    model = save(folder, conversion)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(conversion.replaced)))
    command = [sys.executable, "-c", CONVERT_ENCODERS, str(folder), "--outfile", str(target), "--outtype", "f32"]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    if conversion.pooling is None:
        compare_scores(target, model, oracle, conversion.most)
        return
    vectors = compare(target, oracle, conversion.most)
    pool = {"mean": lambda rows: rows.mean(0), "cls": lambda rows: rows[0], "lasttoken": lambda rows: rows[-1]}
    rows = [normalized(pool[conversion.pooling](hidden_states(model, text))) for text in TEXTS]
    np.testing.assert_allclose(vectors, rows, atol=1e-5, rtol=0)


def compare_scores(path: Path, model: Any, oracle: Oracle, most: float) -> None:
    """Exports a reranker, and compares the scores of texts with llama.cpp's and with the model's."""
    export(path, path.with_suffix(".bundle"), recipe="f32")
    bundle = Bundle.open(path.with_suffix(".bundle"))
    executor = make_executor(bundle, "cpu", {}, bundle.model.context_length)
    with closing(executor):
        scores = np.concatenate(run_texts(executor, TEXTS))
    with torch.no_grad():
        expected = np.concatenate([model(input_ids=torch.tensor([text])).logits.numpy() for text in TEXTS])
    np.testing.assert_allclose(scores, expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(scores, [oracle.pooled(path, text, RANK) for text in TEXTS], atol=most, rtol=0)
