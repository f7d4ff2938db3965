"""Folders of sentence-transformers, saved by the library itself, give its vectors; wrong files are errors by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
)

from enginewright.optimizer.capture.sentence_transformers_files import read_sentence_model
from enginewright.optimizer.export import export
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.shared.errors import EnginewrightError, SourceError, UnsupportedModelError

library = pytest.importorskip("sentence_transformers", reason="the dev extra has it")

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS = ["the tide is low", "When is it high?", "a", "walk on the beach at six in the morning or walk home"]
WORDS = sorted({word for text in TEXTS for word in text.lower().replace("?", " ?").split()} | {"query:", "passage"})

# Both sides are f32 with sums in another order; a wrong pooling or prompt moves a normalized vector by 1e-2 and more.
TOLERANCE = 1e-5


def tokenizer(lower: bool = True, types: bool = False) -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokens = dict.fromkeys([*special, *WORDS, *"abcdefghijklmnopqrstuvwxyz:?"])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    inputs = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]} if types else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64, **names, **inputs)


def random_model(kind: Callable[[Any], PreTrainedModel], config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.125)
            else:
                parameter.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
    return model


def encoder(folder: Path, kind: str = "bert", lower: bool = True) -> Path:
    words = tokenizer(lower)
    built = {
        "bert": (BertModel, BertConfig(vocab_size=len(words), max_position_embeddings=64, **SIZES)),
        "roberta": (RobertaModel, RobertaConfig(vocab_size=len(words), max_position_embeddings=66, **SIZES)),
        "qwen3": (
            Qwen3Model,
            Qwen3Config(vocab_size=len(words), max_position_embeddings=64, num_key_value_heads=2, head_dim=16, **SIZES),
        ),
        "gemma3": (  # both sides within a window, as EmbeddingGemma
            Gemma3TextModel,
            Gemma3TextConfig(
                vocab_size=len(words),
                max_position_embeddings=64,
                num_key_value_heads=1,
                head_dim=16,
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention"],
                use_bidirectional_attention=True,
                **SIZES,
            ),
        ),
    }[kind]
    random_model(*built).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def sentence_model(folder: Path, *modules: Any, kind: str = "bert", lower: bool = True, **options: Any) -> Any:
    """Saves and returns a model of sentence-transformers: a transformer, a pooling, and what follows."""
    source = encoder(folder.with_suffix(".transformer"), kind, lower)
    sentences = library.SentenceTransformer(
        modules=[parts().Transformer(str(source), max_seq_length=48), *modules], device="cpu", **options
    )
    sentences.save(str(folder))
    return library.SentenceTransformer(str(folder), device="cpu")


def vectors_of(folder: Path, **arguments: Any) -> np.ndarray:
    bundle = folder.with_suffix(".bundle")
    export(folder, bundle, recipe="f32", overwrite=True)
    with LLM(bundle) as llm:
        return llm.embed(TEXTS, **arguments)


def parts() -> Any:
    """The library's modules, which take seconds to import."""
    from sentence_transformers.sentence_transformer import modules

    return modules


@pytest.mark.parametrize(
    ("kind", "poolings"),
    [
        ("bert", ("mean",)),
        ("roberta", ("cls", "max")),
        ("qwen3", ("lasttoken",)),
        ("bert", ("weightedmean",)),
        ("gemma3", ("mean",)),
    ],
)
def test_vectors_are_the_library_s(kind: str, poolings: tuple[str, ...], tmp_path: Path) -> None:
    modules = [parts().Pooling(64, pooling_mode=poolings), parts().Normalize()]
    reference = sentence_model(tmp_path / "model", *modules, kind=kind)
    vectors = vectors_of(tmp_path / "model")
    np.testing.assert_allclose(vectors, reference.encode(TEXTS), atol=TOLERANCE, rtol=0)
    assert vectors.shape == (len(TEXTS), 64 * len(poolings))


def test_dense_layers_prompts_and_sizes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    modules = [
        parts().Pooling(64, pooling_mode="mean"),
        parts().Dense(64, 48, activation_function=torch.nn.Tanh()),
        parts().Dense(48, 32, bias=False, activation_function=torch.nn.Identity()),
    ]
    prompts = {"query": "query: ", "document": ""}
    reference = sentence_model(tmp_path / "model", *modules, prompts=prompts, default_prompt_name="query")
    folder = tmp_path / "model"
    np.testing.assert_allclose(vectors_of(folder), reference.encode(TEXTS), atol=TOLERANCE, rtol=0)
    with LLM(folder.with_suffix(".bundle")) as llm:
        plain = llm.embed(TEXTS, prompt="document")
        pooling = llm.model.pooling
        assert llm.model.context_length == 48
    np.testing.assert_allclose(plain, reference.encode(TEXTS, prompt_name="document"), atol=TOLERANCE, rtol=0)
    assert pooling is not None
    assert (pooling.dimensions, pooling.normalize, pooling.default_prompt) == (32, False, "query")
    assert pooling.prompts == prompts


@pytest.mark.parametrize(("kind", "pooling"), [("qwen3", "lasttoken"), ("gemma3", "mean")])
def test_prompts_by_name_as_qwen3_embedding_and_embedding_gemma_have_them(
    kind: str, pooling: str, tmp_path: Path
) -> None:
    prompts = {"query": "walk on: query:", "document": "" if kind == "qwen3" else "the beach is home or passage :"}
    modules = [parts().Pooling(64, pooling_mode=pooling), parts().Normalize()]
    if kind == "gemma3":
        identity = torch.nn.Identity()
        modules[1:1] = [parts().Dense(64, 96, False, identity), parts().Dense(96, 64, False, identity)]
    reference = sentence_model(tmp_path / "model", *modules, kind=kind, prompts=prompts)
    vectors_of(tmp_path / "model")
    with LLM((tmp_path / "model").with_suffix(".bundle")) as llm:
        query, document, plain = (llm.embed(TEXTS, prompt=name) for name in ("query", "document", None))
    np.testing.assert_allclose(query, reference.encode_query(TEXTS), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(document, reference.encode_document(TEXTS), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(plain, reference.encode(TEXTS), atol=TOLERANCE, rtol=0)
    assert np.abs(query - plain).max() > 100 * TOLERANCE


def test_texts_are_in_lower_case_where_the_file_says_so(tmp_path: Path) -> None:
    reference = sentence_model(tmp_path / "model", parts().Pooling(64), lower=False)
    expected = reference.encode([text.lower() for text in TEXTS])
    path = tmp_path / "model" / "sentence_bert_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"do_lower_case": True}))
    np.testing.assert_allclose(vectors_of(tmp_path / "model"), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("labels", "types"), [(1, False), (1, True), (3, True)])
def test_cross_encoders(labels: int, types: bool, tmp_path: Path) -> None:
    """The tokens of a pair have types if the tokenizer gives them to the model."""
    words = tokenizer(types=types)
    config = BertConfig(vocab_size=len(words), max_position_embeddings=64, num_labels=labels, **SIZES)
    random_model(BertForSequenceClassification, config).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    reference = library.CrossEncoder(str(tmp_path / "model"), device="cpu")
    pairs = [(TEXTS[1], text) for text in TEXTS]
    export(tmp_path / "model", tmp_path / "model.bundle")
    with LLM(tmp_path / "model.bundle") as llm:
        pooling = llm.model.pooling
        assert pooling is not None and pooling.dimensions == labels
        if labels == 1:
            scores = llm.score(TEXTS[1], TEXTS)
            assert (pooling.task, pooling.activation) == ("rerank", "sigmoid")
        else:
            scores = np.array([result.scores for result in llm.classify(pairs)])
            assert pooling.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    expected = reference.predict(pairs, apply_softmax=labels > 1)
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=0)


def _reranker(folder: Path) -> None:
    """A decoder whose logits of two tokens make a score, with the files of sentence-transformers."""
    words = tokenizer()
    config = Qwen3Config(vocab_size=len(words), max_position_embeddings=64, num_key_value_heads=2, head_dim=16, **SIZES)
    random_model(Qwen3ForCausalLM, config).save_pretrained(folder)
    words.save_pretrained(folder)
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 7, "false_token_id": 9}')
    listed = [("Transformer", ""), ("LogitScore", "1_LogitScore")]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
                for i, (name, path) in enumerate(listed)
            ]
        )
    )


def test_scores_of_a_decoder_are_differences_of_logits(tmp_path: Path) -> None:
    _reranker(tmp_path / "model")
    report = export(tmp_path / "model", tmp_path / "model.bundle")
    assert report.verification[0].exact
    with LLM(tmp_path / "model.bundle") as llm:
        assert llm.model.pooling is not None
        assert (llm.model.pooling.task, llm.model.pooling.dimensions) == ("rerank", 1)


def _change(path: str, **fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / path
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def _without_prompt_in_pooling(folder: Path) -> None:
    _change("1_Pooling/config.json", include_prompt=False)(folder)
    _change("config_sentence_transformers.json", prompts={"query": "query: "})(folder)


def _replace_module(number: int, **fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "modules.json"
        listed = json.loads(file.read_text())
        listed[number] |= fields
        file.write_text(json.dumps(listed))

    return change


BAD: list[tuple[Callable[[Path], None], type[EnginewrightError], str]] = [
    (lambda f: (f / "modules.json").write_text("{"), SourceError, r"modules\.json: can't be read as JSON"),
    (lambda f: (f / "modules.json").write_text("{}"), SourceError, r"modules\.json: must be a list"),
    (
        lambda f: (f / "modules.json").write_text("[]"),
        UnsupportedModelError,
        r"modules\.json: the first module is missing",
    ),
    (lambda f: (f / "modules.json").write_text("[3]"), SourceError, r"modules\.json: module 0 must be an object"),
    (_replace_module(1, type=3), SourceError, r"modules\.json: module 1: type is 3"),
    (_replace_module(1, path="../x"), SourceError, r"modules\.json: path '\.\./x' is outside"),
    (_replace_module(1, type="a.CNN"), UnsupportedModelError, r"modules\.json: the module CNN can't be compiled"),
    (_replace_module(1, type="a.SpladePooling"), UnsupportedModelError, "SpladePooling, which makes sparse vectors"),
    (_replace_module(1, path="9_Pooling"), SourceError, r"9_Pooling.config\.json: can't be read"),
    (
        _change("1_Pooling/config.json", pooling_mode="sum"),
        UnsupportedModelError,
        "pooling_mode 'sum' can't be compiled",
    ),
    (_without_prompt_in_pooling, UnsupportedModelError, r"include_prompt"),
    (_change("1_Pooling/config.json", pooling_mode=3), SourceError, r"1_Pooling.config\.json: pooling_mode is 3"),
    (_change("1_Pooling/config.json", include_prompt="no"), SourceError, r"1_Pooling.config\.json: include_prompt"),
    (_change("1_Pooling/config.json", embedding_dimension=63), SourceError, r"2_Dense.config\.json: in_features is 64"),
    (_change("2_Dense/config.json", in_features=0), SourceError, r"2_Dense.config\.json: in_features is 0"),
    (
        _change("2_Dense/config.json", out_features=16),
        SourceError,
        r"2_Dense: tensor linear\.weight has shape \(32, 64\)",
    ),
    (_change("2_Dense/config.json", use_residual=True), UnsupportedModelError, "use_residual"),
    (_change("2_Dense/config.json", activation_function="os.system"), UnsupportedModelError, "'os.system' can't be"),
    (lambda f: (f / "2_Dense" / "model.safetensors").unlink(), SourceError, "2_Dense.*no weights"),
    (_change("config_sentence_transformers.json", prompts=[1]), SourceError, "prompts must be an object of texts"),
    (_change("config_sentence_transformers.json", default_prompt_name="x"), SourceError, "default_prompt_name is 'x'"),
    (_change("config_sentence_transformers.json", similarity_fn_name="x"), SourceError, "similarity_fn_name is 'x'"),
    (
        _change("config_sentence_transformers.json", truncate_dim=33),
        SourceError,
        "truncate_dim is 33, and vectors have 32",
    ),
    (_change("config_sentence_transformers.json", model_type="SparseEncoder"), UnsupportedModelError, "sparse vectors"),
    (_change("sentence_bert_config.json", max_seq_length=-1), SourceError, "max_seq_length is -1"),
    (_change("sentence_bert_config.json", do_lower_case=1), SourceError, "do_lower_case is 1"),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "model"
    sentence_model(folder, parts().Pooling(64), parts().Dense(64, 32))
    return folder


@pytest.mark.parametrize("case", range(len(BAD)))
def test_wrong_files_are_errors_by_name(case: int, good: Path, tmp_path: Path) -> None:
    import shutil

    change, error, message = BAD[case]
    folder = Path(shutil.copytree(good, tmp_path / "model"))
    change(folder)
    with pytest.raises(error, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(folder, tmp_path / "model.bundle", cache=False)
    assert not (tmp_path / "model.bundle").exists()


def test_a_folder_without_modules(tmp_path: Path) -> None:
    assert read_sentence_model(tmp_path) is None
