"""Decoders that rerank pass a query and a document through templates; recipes state what a checkpoint doesn't.

The oracles are CrossEncoder of sentence-transformers and the code of model cards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

from enginewright.optimizer.export import export
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.shared.contracts import PoolingInfo
from enginewright.runtime.shared.errors import RecipeError, RequestError, SourceWarning, UnsupportedModelError
from tests.optimizer.capture.test_sentence_transformers import SIZES, parts, random_model, sentence_model

library = pytest.importorskip("sentence_transformers", reason="the dev extra has it")

QUERY = "When is the tide low?"
DOCUMENTS = ["At six.", "The tide is low\nat six in the morning, <Query> or later.", "a", " Walk  on the beach. "]
ASKS = "Judge whether the Document meets the Query. The answer can only be yes or no."
INSTRUCT = "Given a web search query, retrieve relevant passages"

BEFORE = f"<|im_start|>system\n{ASKS}<|im_end|>\n<|im_start|>user\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

# As Qwen3-Reranker has it for sentence-transformers: roles named query and document, and the instruction as system.
FLAT = (
    '{%- set task = messages | selectattr("role", "eq", "system") | map(attribute="content") | first'
    ' | default("Find passages") -%}\n'
    '{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}\n'
    '{%- set document = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}\n'
    f"{BEFORE}<Instruct>: {{{{ task }}}}\n<Query>: {{{{ query }}}}\n<Document>: {{{{ document }}}}{AFTER}\n"
)
# As zerank-2 has it: the query is the system's message, and the assistant's turn begins with an option.
STRUCTURED = (
    '{%- for m in messages if m["role"] == "query" -%}<|im_start|>system\n{{ m["content"][0]["text"] }}<|im_end|>\n'
    '{% endfor %}{% for m in messages if m["role"] == "document" %}<|im_start|>user\n{{ m["content"][0]["text"] }}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Both sides are f32 with sums in another order; a template that differs in a token moves a score by 1e-3 and more.
TOLERANCE = 1e-5


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=control, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["yes no Yes yes no Yes yes no Yes", QUERY, ASKS], trainer)
    backend.add_special_tokens([AddedToken(text, special=True) for text in control])
    words = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=control[0], eos_token=control[2])
    words.chat_template = template
    return words


def decoder(folder: Path, kind: Any = Qwen3ForCausalLM, template: str | None = None, **config: Any) -> Any:
    """Saves a tiny random Qwen3 with its tokenizer; returns both."""
    words = tokenizer(template)
    of_model = Qwen3Config(
        vocab_size=len(words),
        max_position_embeddings=512,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=words.pad_token_id,
        **SIZES,
        **config,
    )
    model = random_model(kind, of_model)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model, words


def modality(form: str | None, output: str) -> dict[str, Any]:
    entry = {"method": "forward", "method_output_name": "logits"}
    modes = {"text": entry, **({} if form is None else {"message": entry | {"format": form}})}
    return {"modality_config": modes, "module_output_name": output}


def cross_encoder(folder: Path, template: str | None, form: str | None, no: bool = True, **options: Any) -> Any:
    """Saves a decoder with LogitScore by the library, and returns it as the library loads it."""
    source = folder.with_suffix(".transformer")
    _, words = decoder(source, template=template)
    answers = [words.convert_tokens_to_ids(text) for text in ("yes", "no")]
    processing = options.pop("processing", {})
    transformer = parts().Transformer(
        str(source), transformer_task="text-generation", processing_kwargs=processing, **modality(form, "causal_logits")
    )
    from sentence_transformers.cross_encoder.modules import LogitScore

    score = LogitScore(answers[0], answers[1] if no else None)
    library.CrossEncoder(modules=[transformer, score], device="cpu", **options).save_pretrained(str(folder))
    return library.CrossEncoder(str(folder), device="cpu")


def scores_of(folder: Path, recipe: Any = "f32", documents: Any = DOCUMENTS, **options: Any) -> Any:
    bundle = folder.with_suffix(".bundle")
    report = export(folder, bundle, recipe=recipe, overwrite=True)
    assert report.verification[0].exact
    with LLM(bundle) as llm:
        assert llm.model.pooling is not None
        return llm.score(QUERY, documents, **options), llm.model.pooling


@pytest.mark.parametrize(
    ("template", "form", "no", "options"),
    [
        (FLAT, "flat", True, {}),
        (FLAT, "flat", True, {"prompts": {"web": INSTRUCT}, "default_prompt_name": "web"}),
        (STRUCTURED, "structured", False, {"processing": {"chat_template": {"add_generation_prompt": True}}}),
        (STRUCTURED, "structured", True, {}),
    ],
)
def test_pairs_pass_through_the_chat_template(
    template: str, form: str, no: bool, options: Mapping[str, Any], tmp_path: Path
) -> None:
    reference = cross_encoder(tmp_path / "model", template, form, no, **options)
    expected = reference.predict([(QUERY, text) for text in DOCUMENTS])
    scores, pooling = scores_of(tmp_path / "model")
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=0)
    assert pooling.query_template is not None and "{query}" in pooling.query_template
    assert np.ptp(scores) > 100 * TOLERANCE


@pytest.mark.parametrize("prompt", [{}, {"prompts": {"web": INSTRUCT}, "default_prompt_name": "web"}])
def test_pairs_without_a_chat_template_follow_each_other(prompt: Mapping[str, Any], tmp_path: Path) -> None:
    reference = cross_encoder(tmp_path / "model", None, None, **prompt)
    expected = reference.predict([(QUERY, text) for text in DOCUMENTS])
    with pytest.warns(SourceWarning, match="no file states the text around a query and a document"):
        scores, pooling = scores_of(tmp_path / "model")
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=0)
    assert pooling.query_template is None


def test_a_classifier_with_one_label_may_have_a_chat_template(tmp_path: Path) -> None:
    decoder(tmp_path / "transformer", Qwen3ForSequenceClassification, FLAT, num_labels=1)
    transformer = parts().Transformer(
        str(tmp_path / "transformer"), transformer_task="sequence-classification", **modality("flat", "scores")
    )
    library.CrossEncoder(modules=[transformer], device="cpu").save_pretrained(str(tmp_path / "model"))
    reference = library.CrossEncoder(str(tmp_path / "model"), device="cpu")
    expected = reference.predict([(QUERY, text) for text in DOCUMENTS])
    scores, _ = scores_of(tmp_path / "model")
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=0)


def recipe(folder: Path, section: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(f'name = "mine"\n\n[pooling]\n{section}\n')
    return path


def test_a_recipe_states_the_answers_and_the_text_of_qwen3_reranker(tmp_path: Path) -> None:
    """The oracle is the code of its model card: three parts are encoded, and a softmax of two logits is the score."""
    model, words = decoder(tmp_path / "model")
    text = f"{BEFORE}<Instruct>: {INSTRUCT}\n<Query>: {{query}}\n<Document>: {{document}}{AFTER}"
    mine = recipe(tmp_path, f'answers = ["yes", "no"]\ntemplate = {json.dumps(text)}')
    scores, _ = scores_of(tmp_path / "model", mine)
    yes, no = (words.convert_tokens_to_ids(answer) for answer in ("yes", "no"))
    for document, score in zip(DOCUMENTS, scores, strict=True):
        middle = f"<Instruct>: {INSTRUCT}\n<Query>: {QUERY}\n<Document>: {document}"
        ids = [i for part in (BEFORE, middle, AFTER) for i in words.encode(part, add_special_tokens=False)]
        with torch.no_grad():
            last = model(torch.tensor([ids])).logits[0, -1]
        expected = torch.nn.functional.log_softmax(torch.stack([last[no], last[yes]]), 0)[1].exp()
        assert score == pytest.approx(float(expected), abs=TOLERANCE)


def test_a_recipe_states_one_answer_as_of_bge_reranker_v2_gemma(tmp_path: Path) -> None:
    """The score is the logit of Yes after both texts and the question."""
    model, words = decoder(tmp_path / "model")
    asks = "Given a query A and a passage B, predict either 'Yes' or 'No'."
    text = f"<|endoftext|>A: {{query}}\nB: {{document}}\n{asks}"
    scores, _ = scores_of(
        tmp_path / "model", recipe(tmp_path, f'answers = ["Yes"]\ntemplate = {json.dumps(text)}'), raw_scores=True
    )
    sep = words.encode("\n")
    for document, score in zip(DOCUMENTS, scores, strict=True):
        parted = [words.encode(part) for part in (f"A: {QUERY}", f"B: {document}", asks)]
        ids = [words.pad_token_id, *parted[0], *sep, *parted[1], *sep, *parted[2]]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1, words.convert_tokens_to_ids("Yes")]
        assert score == pytest.approx(float(expected), abs=TOLERANCE)


def test_a_long_document_is_cut_and_the_text_after_it_stays(tmp_path: Path) -> None:
    reference = cross_encoder(tmp_path / "model", FLAT, "flat")
    long = "the tide is low " * 200
    scores, _ = scores_of(tmp_path / "model", documents=[long], truncate=True)
    np.testing.assert_allclose(scores, reference.predict([(QUERY, long)]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "doesn't write a query, and a document"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "doesn't write a query, and a document"),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "doesn't write a query, and a document"),
        ("{{ raise_exception('no roles') }}", "refuses a query and a document: .*no roles"),
    ],
)
def test_chat_templates_that_do_not_write_pairs_are_refused(template: str, message: str, tmp_path: Path) -> None:
    cross_encoder(tmp_path / "model", FLAT, "flat")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        export(tmp_path / "model", tmp_path / "model.bundle")
    assert "template in the recipe's [pooling]" in str(caught.value)
    text = "{query} {document}"
    export(tmp_path / "model", tmp_path / "model.bundle", recipe=recipe(tmp_path, f'template = "{text}"'))


def test_a_chat_template_that_trims_is_told(tmp_path: Path) -> None:
    cross_encoder(tmp_path / "model", "{% for m in messages %}{{ m.content | trim }};{% endfor %}", "flat")
    with pytest.warns(SourceWarning, match="removes spaces around a query or a document"):
        export(tmp_path / "model", tmp_path / "model.bundle")


# ---- Matryoshka


def vectors(folder: Path, recipe: Any = "f32", **arguments: Any) -> tuple[Any, PoolingInfo]:
    bundle = folder.with_suffix(".bundle")
    export(folder, bundle, recipe=recipe, overwrite=True)
    with LLM(bundle) as llm:
        assert llm.model.pooling is not None
        return llm.embed(DOCUMENTS, **arguments), llm.model.pooling


@pytest.mark.parametrize("place", ["config.json", "config_sentence_transformers.json", "recipe"])
def test_sizes_of_vectors(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    reference = sentence_model(folder, parts().Pooling(64), parts().Normalize())
    chosen: Any = recipe(tmp_path, "dimensions = [32, 16]") if place == "recipe" else "f32"
    expected: tuple[int, ...] = (16, 32)
    if place == "config.json":
        _change(folder / place, matryoshka_dimensions=[16, 32, 64])
    elif place != "recipe":
        _change(folder / place, truncate_dim=16)
        expected = (16,)
    computed, pooling = vectors(folder, chosen, dimensions=16)
    assert pooling.dimension_choices == expected
    theirs = reference.encode(DOCUMENTS, truncate_dim=16, normalize_embeddings=True)
    np.testing.assert_allclose(computed, theirs, atol=TOLERANCE, rtol=0)
    with LLM(folder.with_suffix(".bundle")) as llm:
        listed = ", ".join(map(str, (*expected, 64)))
        for wrong in (17, 0, 65):
            with pytest.raises(RequestError, match=rf"dimensions: {wrong} isn't .*\n  It has {listed}\."):
                llm.embed("a", dimensions=wrong)
        with pytest.raises(RequestError, match="dimensions: "):
            llm.embed("a", dimensions="16")  # type: ignore[arg-type]


def _change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("kind", "section", "message"),
    [
        ("embed", "dimensions = [65]", "dimensions is 65, and vectors have 64 dimensions"),
        ("embed", "dimensions = [0]", "pooling.dimensions"),
        ("embed", 'template = "{query} {document}"', "template is for rerankers, and .* is for embed"),
        ("embed", 'template = "{document} {query}"', "pooling.template"),
        ("embed", 'answers = ["a"]', "answers is for decoders that write text, and .* is a model of embed"),
        ("chat", "dimensions = [16]", "dimensions is for models of vectors or scores, and .* generates text"),
        ("chat", 'answers = ["yes", "zebra crossing"]', r"answers: 'zebra crossing' has \d+ tokens"),
        ("chat", 'answers = ["yes"]\ndimensions = [16]', "dimensions is for models of vectors, and .* is for rerank"),
    ],
)
def test_a_section_that_is_not_for_the_model(kind: str, section: str, message: str, tmp_path: Path) -> None:
    if kind == "chat":
        decoder(tmp_path / "model")
    else:
        sentence_model(tmp_path / "model", parts().Pooling(64))
    with pytest.raises(RecipeError, match=message):
        export(tmp_path / "model", tmp_path / "model.bundle", recipe=recipe(tmp_path, section))
    assert not (tmp_path / "model.bundle").exists()


def test_sizes_that_a_checkpoint_has_wrong_are_errors(tmp_path: Path) -> None:
    from enginewright.runtime.shared.errors import SourceError

    sentence_model(tmp_path / "model", parts().Pooling(64))
    for value, message in (([128], "matryoshka_dimensions is 128, and vectors have 64"), ("x", "not a list of sizes")):
        _change(tmp_path / "model" / "config.json", matryoshka_dimensions=value)
        with pytest.raises(SourceError, match=message):
            export(tmp_path / "model", tmp_path / "model.bundle")
