"""GGUF files of embedding models and rerankers: the numbers of transformers' model; wrong files are errors by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from enginewright.optimizer.capture.capture_model import build_from_gguf, capture
from enginewright.optimizer.capture.gguf.file import open_gguf
from enginewright.optimizer.export import export
from enginewright.optimizer.measure.pooled_runner import PooledRunner
from enginewright.optimizer.recipes.sections import PoolingSection
from enginewright.passes.ir.prequantized import SourceCodes
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.shared.errors import RecipeError, RequestError, SourceError, UnsupportedModelError

from . import gguf_models
from .gguf_encoders import ENCODERS, EPSILON, SIZES, build, hidden_states, tensors_of, write_encoder

# Both sides are f32 with sums in another order; a wrong pooling or mask moves a normalized vector by 1e-2 and more.
TOLERANCE = 1e-5
TEXTS = [[3, 17, 99, 4], [5], list(range(3, 60)), [9, 8, 7, 6, 5, 4, 3, 2, 1, 100, 111, 120]]
POOLINGS = {1: lambda rows: rows.mean(0), 2: lambda rows: rows[0], 3: lambda rows: rows[-1]}


def vectors(path: Path, recipe: str = "f32", **arguments: Any) -> Any:
    bundle = path.with_suffix(".bundle")
    export(path, bundle, recipe=recipe, overwrite=True)
    with LLM(bundle) as llm:
        together = llm.embed(TEXTS, **arguments)
        np.testing.assert_array_equal(llm.embed(TEXTS[2], **arguments), together[2])  # the same bits alone
    return together


def expected(model: Any, pooling: int, texts: Sequence[Sequence[int]] = TEXTS) -> Any:
    rows = np.stack([POOLINGS[pooling](hidden_states(model, text)) for text in texts])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_vectors_are_those_of_transformers_model(architecture: str, tmp_path: Path) -> None:
    model = build(architecture)
    pooling = 3 if architecture.startswith("qwen") else 1
    path = write_encoder(tmp_path / "tiny.gguf", architecture, model, pooling=pooling)
    np.testing.assert_allclose(vectors(path), expected(model, pooling), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("pooling", "normalize"), [(2, None), (3, None), (1, False)])
def test_poolings(pooling: int, normalize: bool | None, tmp_path: Path) -> None:
    model = build("bert")
    path = write_encoder(tmp_path / "tiny.gguf", "bert", model, pooling=pooling)
    result, reference = vectors(path, normalize=normalize), expected(model, pooling)
    if normalize is False:
        reference = np.stack([POOLINGS[pooling](hidden_states(model, text)) for text in TEXTS])
    np.testing.assert_allclose(result, reference, atol=TOLERANCE, rtol=0)


def test_a_file_that_states_no_pooling_is_read_as_the_mean_with_a_warning(tmp_path: Path) -> None:
    model = build("bert")
    path = write_encoder(tmp_path / "tiny.gguf", "bert", model, pooling=None)
    with pytest.warns(UserWarning, match=r"bert\.pooling_type is missing"):
        result = vectors(path)
    np.testing.assert_allclose(result, expected(model, 1), atol=TOLERANCE, rtol=0)


def test_without_token_types_and_with_fused_queries(tmp_path: Path) -> None:
    """DistilBERT's files have no types, and newer converters may join queries, keys and values."""
    model = build("bert")
    model.embeddings.token_type_embeddings.weight.data.zero_()
    tensors = tensors_of("bert", model)
    joined: dict[str, Any] = {"token_types.weight": None}
    for block in range(3):
        for end in ("weight", "bias"):
            names = [f"blk.{block}.attn_{one}.{end}" for one in "qkv"]
            joined |= {f"blk.{block}.attn_qkv.{end}": np.concatenate([tensors[name] for name in names])}
            joined |= dict.fromkeys(names)
    others = {"tokenizer.ggml.token_type_count": None}
    path = write_encoder(tmp_path / "tiny.gguf", "bert", model, tensors=joined, others=others)
    np.testing.assert_allclose(vectors(path), expected(model, 1), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("heads", [2, 8])
def test_jina_with_a_gate_of_its_own_and_other_heads(heads: int, tmp_path: Path) -> None:
    model = build("jina-bert-v2", num_attention_heads=heads)
    tensors = tensors_of("jina-bert-v2", model)
    apart: dict[str, Any] = {}
    for block in range(3):
        gate, up = np.split(tensors[f"blk.{block}.ffn_up.weight"], 2)
        apart |= {f"blk.{block}.ffn_up.weight": up, f"blk.{block}.ffn_gate.weight": gate}
    keys = {"attention.head_count": heads}
    path = write_encoder(tmp_path / "tiny.gguf", "jina-bert-v2", model, keys=keys, tensors=apart)
    np.testing.assert_allclose(vectors(path), expected(model, 1), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("architecture", ["bert", "nomic-bert"])
def test_blocks_of_8_bits_are_kept(architecture: str, tmp_path: Path) -> None:
    """The reference has the values of the file's blocks; attn_qkv of nomic-bert is split without rounding anew."""
    model = build(architecture)
    q8 = gguf.GGMLQuantizationType.Q8_0
    path = write_encoder(tmp_path / "tiny.gguf", architecture, model, quantized=q8)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "layer" in name:
            parameter.data.copy_(
                parameter.new_tensor(gguf.dequantize(gguf.quantize(parameter.numpy(force=True), q8), q8))
            )
    rounded_again = vectors(path, "gguf")
    # The recipe rounds activations to 8 bits.
    np.testing.assert_allclose(rounded_again, expected(model, 1), atol=2e-2, rtol=0)
    np.testing.assert_allclose(vectors(path), expected(model, 1), atol=TOLERANCE, rtol=0)
    weights = capture(path).program.weights
    names = [name for name in weights if name.endswith(("query.weight", "q_proj.weight"))]
    assert len(names) == 3 and all(isinstance(weights[name], SourceCodes) for name in names)


def test_dense_layers_follow_the_pooling(tmp_path: Path) -> None:
    model = build("gemma-embedding")
    random = np.random.default_rng(0)
    dense = [random.normal(0, 0.1, shape).astype(np.float32) for shape in ((96, 64), (64, 96))]
    keys = {"dense_2_feat_in": 64, "dense_2_feat_out": 96, "dense_3_feat_in": 96, "dense_3_feat_out": 64}
    tensors = {"dense_2.weight": dense[0], "dense_3.weight": dense[1]}
    path = write_encoder(tmp_path / "tiny.gguf", "gemma-embedding", model, keys=keys, tensors=tensors)
    rows = np.stack([hidden_states(model, text).mean(0) for text in TEXTS]) @ dense[0].T @ dense[1].T
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors(path), rows, atol=TOLERANCE, rtol=0)


def head(outputs: int, norm: bool = False) -> dict[str, Any]:
    random = np.random.default_rng(1)
    tensors = {
        "cls.weight": (64, 64),
        "cls.bias": (64,),
        "cls.output.weight": (outputs, 64),
        "cls.output.bias": (outputs,),
    }
    tensors = {name: random.normal(0, 0.2, shape).astype(np.float32) for name, shape in tensors.items()}
    return tensors | ({"cls.norm.weight": random.normal(1, 0.2, 64).astype(np.float32)} if norm else {})


WORDS = ("tide", "low", "high", "six", "beach")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
FIRST_WORD = len(SPECIAL)


def vocabulary() -> dict[str, Any]:
    """The keys of a WordPiece tokenizer."""
    tokens = [*SPECIAL, *(f"\u2581{word}" for word in WORDS)]
    tokens += [f"unused{i}" for i in range(SIZES["vocab_size"] - len(tokens))]
    keys = {"model": "bert", "tokens": tokens, "token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))}
    ids = {"padding": 0, "unknown": 1, "bos": 2, "seperator": 3, "eos": 3}
    keys |= {f"{name}_token_id": number for name, number in ids.items()}
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def ids_of(*texts: str) -> list[int]:
    """The tokens of a text or a pair, as BERT has them."""
    words = [[*(FIRST_WORD + WORDS.index(word) for word in text.split()), 3] for text in texts]
    return [2, *(token for text in words for token in text)]


def logits(model: Any, tensors: dict[str, Any], texts: Sequence[Sequence[int]]) -> Any:
    """The results of ``head`` for the first token of each text."""
    rows = np.stack([hidden_states(model, text)[0] for text in texts])
    rows = np.tanh(rows @ tensors["cls.weight"].T + tensors["cls.bias"])
    return rows @ tensors["cls.output.weight"].T + tensors["cls.output.bias"]


def test_a_text_has_llama_cpp_s_tokens_around_it(tmp_path: Path) -> None:
    model = build("bert")
    path = write_encoder(tmp_path / "tiny.gguf", "bert", model, pooling=2, others=vocabulary())
    export(path, tmp_path / "tiny.bundle", recipe="f32")
    with LLM(tmp_path / "tiny.bundle") as llm:
        result = llm.embed(["Tide low", "beach"])
    np.testing.assert_allclose(
        result, expected(model, 2, [ids_of("tide low"), ids_of("beach")]), atol=TOLERANCE, rtol=0
    )


def test_a_reranker_scores_pairs(tmp_path: Path) -> None:
    model, tensors = build("bert"), head(1)
    path = write_encoder(tmp_path / "tiny.gguf", "bert", model, pooling=None, tensors=tensors, others=vocabulary())
    export(path, tmp_path / "tiny.bundle", recipe="f32")
    documents = ["high tide", "six", "beach low low"]
    reference = logits(model, tensors, [ids_of("low tide", one) for one in documents])[:, 0]
    with LLM(tmp_path / "tiny.bundle") as llm:
        assert llm.info()["kind"] == "rerank"
        np.testing.assert_allclose(llm.score("low tide", documents, raw_scores=True), reference, atol=1e-4, rtol=0)
        np.testing.assert_allclose(llm.score("low tide", documents), 1 / (1 + np.exp(-reference)), atol=1e-4, rtol=0)
        with pytest.raises(RequestError, match="rerank"):
            llm.embed("six")


def test_a_classifier_has_the_labels_of_its_file(tmp_path: Path) -> None:
    model, tensors, labels = build("bert"), head(3), ["bad", "fair", "good"]
    keys = {"classifier.output_labels": labels}
    path = write_encoder(tmp_path / "tiny.gguf", "bert", model, pooling=4, tensors=tensors, keys=keys)
    export(path, tmp_path / "tiny.bundle", recipe="f32")
    with LLM(tmp_path / "tiny.bundle") as llm:
        results = llm.classify(TEXTS, raw_scores=True)
    assert all(list(result.labels) == labels for result in results)
    np.testing.assert_allclose([r.scores for r in results], logits(model, tensors, TEXTS), atol=1e-4, rtol=0)


def test_a_decoder_reranker_is_the_softmax_of_yes_and_no(tmp_path: Path) -> None:
    model = build("qwen3")
    answers = np.random.default_rng(2).normal(0, 0.3, (2, 64)).astype(np.float32)
    template = "<q>{query}</q><d>{document}</d>"
    others = vocabulary() | {"tokenizer.chat_template.rerank": template}
    path = write_encoder(
        tmp_path / "tiny.gguf",
        "qwen3",
        model,
        pooling=4,
        tensors={"cls.output.weight": answers},
        keys={"classifier.output_labels": ["yes", "no"]},
        others=others,
    )
    captured = capture(path)
    pooling = captured.model_info.pooling
    assert pooling is not None and (pooling.task, pooling.dimensions, pooling.activation) == ("rerank", 1, "sigmoid")
    assert (pooling.query_template, pooling.document_template) == ("<q>{query}</q><d>", "{document}</d>")
    runner = PooledRunner(path)
    for text in TEXTS:
        yes, no = hidden_states(model, text)[-1] @ answers.T
        np.testing.assert_allclose(runner.rows(text), [[yes - no]], atol=1e-4, rtol=0)


def test_modern_bert_s_head(tmp_path: Path) -> None:
    model, tensors = build("modern-bert"), head(1, norm=True)
    del tensors["cls.bias"]
    path = write_encoder(tmp_path / "tiny.gguf", "modern-bert", model, pooling=None, tensors=tensors)
    runner = PooledRunner(path)
    for text in TEXTS:
        row = torch.from_numpy(hidden_states(model, text).mean(0) @ tensors["cls.weight"].T)
        weight = torch.from_numpy(tensors["cls.norm.weight"])
        row = torch.nn.functional.layer_norm(torch.nn.functional.gelu(row), (64,), weight, eps=EPSILON)
        score = row.numpy() @ tensors["cls.output.weight"].T + tensors["cls.output.bias"]
        np.testing.assert_allclose(runner.rows(text)[0], score, atol=1e-4, rtol=0)


def test_a_chat_file_can_t_embed_and_an_embedding_file_can_t_generate(tmp_path: Path) -> None:
    chat = gguf_models.write_model(tmp_path / "chat.gguf", "qwen3", gguf_models.build(gguf_models.CASES["qwen3"]))
    export(chat, tmp_path / "chat.bundle", recipe="f32")
    with LLM(tmp_path / "chat.bundle") as llm, pytest.raises(RequestError, match="generate"):
        llm.embed([[3, 4]])
    path = write_encoder(tmp_path / "tiny.gguf", "bert", build("bert"))
    with pytest.raises(UnsupportedModelError, match="is a model for embed"):
        build_from_gguf(open_gguf(path))


Change = dict[str, Any]
SQUARE = np.ones((64, 64))
WRONG: list[tuple[str, int | None, Change, Change, Change, str]] = [
    ("bert", 0, {}, {}, {}, r"bert\.pooling_type is 0: a vector for each token"),
    ("bert", 7, {}, {}, {}, r"bert\.pooling_type is 7"),
    ("bert", None, {"pooling_type": "mean"}, {}, {}, r"bert\.pooling_type is 'mean'"),
    ("bert", 4, {}, {}, {}, r"bert\.pooling_type is 4 \(rank\), and the tensors of a classifier .* missing"),
    ("bert", 1, {}, head(1), {}, r"bert\.pooling_type is 1 \(mean\).* cls\.weight"),
    ("bert", 4, {"classifier.output_labels": ["a", "b"]}, head(3), {}, r"output_labels has 2 .* give 3"),
    ("bert", 4, {}, head(1) | {"cls.output.weight": np.ones((1, 63))}, {}, r"cls\.output\.weight has shape \(1, 63\)"),
    ("bert", 1, {"attention.causal": True}, {}, {}, r"bert\.attention\.causal isn't false"),
    ("bert", 1, {"attention.causal": None}, {}, {}, r"bert\.attention\.causal isn't false"),
    ("bert", 1, {"context_length": 255}, {}, {}, r"bert\.context_length is 255, and there are 256 rows"),
    ("bert", 1, {}, {}, {"tokenizer.ggml.token_type_count": 3}, r"token_type_count is 3, and there are 2 rows"),
    ("bert", 1, {"attention.head_count_kv": 2}, {}, {}, r"bert\.attention\.head_count_kv is 2, for 4 heads"),
    ("bert", 1, {"rope.freq_base": 10.0}, {}, {}, r"bert\.rope\.freq_base is 10\.0"),
    ("bert", 1, {}, {"blk.1.ffn_up.weight": None}, {}, r"layer\.1\.intermediate\.dense\.weight is missing"),
    ("bert", 1, {}, {"blk.1.attn_q.weight": np.ones((64, 60))}, {}, r"attn_q\.weight|query\.weight"),
    ("bert", 1, {}, {"blk.1.strange.weight": np.ones((64, 64))}, {}, r"blk\.1\.strange\.weight has no place"),
    ("nomic-bert", 1, {}, {"blk.0.attn_qkv.weight": np.ones((191, 64))}, {}, r"attn_qkv\.weight has 191 rows"),
    ("nomic-bert", 1, {"rope.dimension_count": 8}, {}, {}, r"rope\.dimension_count is 8"),
    ("jina-bert-v2", 1, {"attention.max_alibi_bias": 4.0}, {}, {}, r"attention\.max_alibi_bias isn't 8"),
    ("modern-bert", 1, {"hidden_activation": "relu"}, {}, {}, r"hidden_activation is 'relu'"),
    ("gemma-embedding", 1, {"attention.sliding_window": 0}, {}, {}, r"attention\.sliding_window is 0"),
    (
        "gemma-embedding",
        1,
        {"dense_2_feat_out": 5},
        {"dense_2.weight": np.ones((64, 64))},
        {},
        r"dense_2_feat_out is 5",
    ),
    ("gemma-embedding", 1, {}, {"dense_2.weight": np.ones((64, 60))}, {}, r"dense_2\.weight has shape \(64, 60\)"),
    (
        "qwen3",
        4,
        {"classifier.output_labels": ["a", "b"]},
        {"cls.output.weight": np.ones((2, 64))},
        {},
        "output_labels",
    ),
    ("qwen3", None, {"attention.causal": False}, {}, {}, r"qwen3\.attention\.causal is false"),
    ("qwen3", 3, {}, {"output_norm.weight": None}, {}, r"norm\.weight is missing"),
]


@pytest.mark.parametrize(("architecture", "pooling", "keys", "tensors", "others", "message"), WRONG)
def test_wrong_files_are_errors_by_name(
    architecture: str, pooling: int | None, keys: Change, tensors: Change, others: Change, message: str, tmp_path: Path
) -> None:
    path = write_encoder(
        tmp_path / "tiny.gguf",
        architecture,
        build(architecture),
        pooling=pooling,
        keys=keys,
        tensors=tensors,
        others=others,
    )
    with pytest.raises((SourceError, UnsupportedModelError), match=message):
        export(path, tmp_path / "tiny.bundle")
    assert {one.name for one in tmp_path.iterdir()} == {"tiny.gguf"}


def test_a_recurrent_model_isn_t_pooled(tmp_path: Path) -> None:
    model = gguf_models.build(gguf_models.CASES["lfm2"])
    path = gguf_models.write_model(tmp_path / "tiny.gguf", "lfm2", model, keys={"pooling_type": 1})
    with pytest.raises(UnsupportedModelError, match=r"lfm2\.pooling_type is of a recurrent model"):
        export(path, tmp_path / "tiny.bundle")


def test_a_recipe_states_what_a_file_doesn_t(tmp_path: Path) -> None:
    """Vectors may be cut to sizes that a recipe names; tokens of answers are for folders."""
    path = write_encoder(tmp_path / "tiny.gguf", "bert", build("bert"))
    pooling = capture(path, pooling=PoolingSection(dimensions=(32, 16))).model_info.pooling
    assert pooling is not None and pooling.dimension_choices == (16, 32)
    with pytest.raises(RecipeError, match="answers is for models in Hugging Face folders"):
        capture(path, pooling=PoolingSection(answers=("yes",)))
    chat = gguf_models.write_model(tmp_path / "chat.gguf", "qwen3", gguf_models.build(gguf_models.CASES["qwen3"]))
    with pytest.raises(RecipeError, match="generates text"):
        capture(chat, pooling=PoolingSection(dimensions=(32,)))
