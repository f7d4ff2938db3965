"""Numbers of texts, from saved folders: those of sentence-transformers, and the same bits alone and in any batch."""

from __future__ import annotations

import asyncio
import random
import string
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from enginewright import LLM, ContextError, EnginewrightError, SamplingParams, export
from enginewright.optimizer.cli.app import app
from enginewright.runtime.server.engines import records
from enginewright.runtime.server.engines.engine_client import Limits, Model
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.tasks.base import Task
from enginewright.runtime.tasks.classify import Classify
from enginewright.runtime.tasks.embed import Embed
from enginewright.runtime.tasks.rank import Rank
from tests.runtime.pooled_toy import VOCABULARY
from tests.simulator.seeds import first_seed
from tests.text_models import CLASSES, LABELS, LONGEST, save_text_model, spoiled_copy

QUERY = "low tide"

Numbers = Callable[[LLM, Sequence[str]], list[Any]]
"""Returns an array for each text."""

NUMBERS: dict[str, Numbers] = {
    "embed": lambda llm, texts: list(llm.embed(texts, progress=False)),
    "rerank": lambda llm, texts: list(llm.score(QUERY, texts, progress=False)),
    "classify": lambda llm, texts: [one.scores for one in llm.classify(texts, progress=False)],
    "token_classify": lambda llm, texts: [one.scores for one in llm.classify(texts, progress=False)],
}


def draw_texts(count: int, seed: int = 0, longest: int = 20) -> list[str]:
    """Returns texts of 1 to ``longest`` words, most of them short."""
    draw = random.Random(seed)

    def text() -> str:
        words = min(int(draw.expovariate(0.2)) + 1, longest)
        return " ".join("".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 3))) for _ in range(words))

    return [text() for _ in range(count)]


@pytest.fixture(scope="session")
def text_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """``text_bundle(kind, recipe)`` returns the folder of a tiny model and its bundle for the cpu target."""
    folder = tmp_path_factory.mktemp("texts")

    def make(kind: str, recipe: str = "f32") -> tuple[Path, Path]:
        source, bundle = folder / kind, folder / f"{kind}.{recipe}.bundle"
        if not source.exists():
            save_text_model(source, kind)
        if not bundle.exists():
            export(source, bundle, recipe=recipe, targets=("cpu",))
        return source, bundle

    return make


def test_vectors_are_those_of_sentence_transformers(text_bundle: Any) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the dev extra has it: the oracle of vectors")
    source, bundle = text_bundle("embed")
    theirs, texts = library.SentenceTransformer(str(source), device="cpu"), draw_texts(200)
    with LLM(bundle) as llm:
        for prompt in (None, "query", "document"):
            expected = theirs.encode(texts, prompt_name=prompt)
            np.testing.assert_allclose(llm.embed(texts, prompt=prompt), expected, atol=1e-6)
        plain = theirs.encode(texts, normalize_embeddings=False)
        assert (np.linalg.norm(plain, axis=1) - 1 < 1e-5).all(), "the folder has a module that normalizes"
        long = "ab c " * 400
        with pytest.raises(ContextError, match=f"a text may have {LONGEST}"):
            llm.embed(long)
        np.testing.assert_allclose(llm.embed(long, truncate=True), theirs.encode(long), atol=1e-6)


def test_scores_are_those_of_a_cross_encoder(text_bundle: Any) -> None:
    library = pytest.importorskip("sentence_transformers", reason="the dev extra has it: the oracle of scores")
    source, bundle = text_bundle("rerank")
    theirs, texts = library.CrossEncoder(str(source), device="cpu"), [*draw_texts(100), "ab c " * 400]
    expected = theirs.predict([(QUERY, text) for text in texts], convert_to_numpy=True)
    with LLM(bundle) as llm:
        np.testing.assert_allclose(llm.score(QUERY, texts, truncate=True), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["classify", "token_classify"])
def test_classes_are_those_of_transformers(text_bundle: Any, kind: str) -> None:
    import torch
    import transformers

    source, bundle = text_bundle(kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = getattr(transformers, CLASSES[kind]).from_pretrained(source).eval()
    with LLM(bundle) as llm, torch.no_grad():
        texts = draw_texts(50)
        for text, result in zip(texts, llm.classify(texts), strict=True):
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
            np.testing.assert_allclose(result.scores, torch.softmax(logits, -1).numpy(), atol=1e-6)
            names = [LABELS[i] for i in logits.argmax(-1).flatten().tolist()]
            assert result.labels == LABELS and result.label == (names[0] if kind == "classify" else tuple(names))
            assert list(result.token_ids) == tokenizer(text)["input_ids"]


def test_commands_say_what_a_bundle_is_for(text_bundle: Any) -> None:
    _, bundle = text_bundle("embed")
    shown = CliRunner().invoke(app, ["inspect", str(bundle)])
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    assert "kind embed: 32 numbers, pooling mean, normalized, cosine" in lines
    assert "prompts document: 'd: '" in lines and "query: 'q: '" in lines
    refused = CliRunner().invoke(app, ["generate", str(bundle), "Hello"])
    assert refused.exit_code != 0 and "is of kind 'embed', and this is for 'generate'" in refused.output


@contextmanager
def chatting(bundle: Path) -> Iterator[None]:
    """Has a model that writes text answer in this process, one request after another, until the end."""
    stop = threading.Event()

    def chat() -> int:
        with LLM(bundle, threads=2) as llm:
            answers = 0
            while not stop.is_set():
                llm.generate(["ab"] * 4, SamplingParams(max_tokens=16, ignore_eos=True), progress=False)
                answers += 4
            return answers

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(chat)
        try:
            yield
        finally:
            stop.set()
    assert answers.result() > 0


def assert_same_bits(kind: str, bundle: Path, texts: Sequence[str], alone: int, chat: Path) -> None:
    """Asserts that each text's numbers are the same bits in any batch and order, next to others' requests and to a chat
    model in the same process, and with any number of threads.

    Args:
        kind: the kind of the bundle.
        bundle: the bundle.
        texts: the texts.
        alone: how many texts are also computed alone.
        chat: the bundle of the chat model.
    """
    numbers = NUMBERS[kind]
    with LLM(bundle, threads=1) as llm:
        expected = numbers(llm, texts)
        for i in range(0, len(texts), -(-len(texts) // alone)):
            np.testing.assert_array_equal(numbers(llm, texts[i : i + 1])[0], expected[i])
    options: list[dict[str, Any]] = [
        {"threads": 2},
        {"threads": 3, "prefill_chunk": 37},
        {"threads": 4, "max_requests": 5},
        {"threads": 1, "ranks": 2, "prefill_chunk": 2048},
    ]
    for seed, one in enumerate(options):
        order = random.Random(seed).sample(range(len(texts)), len(texts))
        with LLM(bundle, **one) as llm, ThreadPoolExecutor(3) as callers, chatting(chat):
            parts = [order[i::3] for i in range(3)]
            computed = callers.map(lambda part: numbers(llm, [texts[i] for i in part]), parts)
            for part, arrays in zip(parts, computed, strict=True):
                for i, array in zip(part, arrays, strict=True):
                    np.testing.assert_array_equal(array, expected[i])


@pytest.mark.parametrize("recipe", ["f32", "int8"])
@pytest.mark.parametrize("kind", CLASSES)
def test_numbers_are_the_same_bits_alone_and_in_any_batch(
    text_bundle: Any, tiny_bundle: Path, kind: str, recipe: str
) -> None:
    """Half of the texts follow from the commit's hash."""
    texts = [*draw_texts(200), *draw_texts(200, first_seed())]
    assert_same_bits(kind, text_bundle(kind, recipe)[1], texts, 30, tiny_bundle)


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["f32", "int8"])
@pytest.mark.parametrize("kind", CLASSES)
def test_ten_thousand_texts(text_bundle: Any, tiny_bundle: Path, kind: str, recipe: str) -> None:
    assert_same_bits(kind, text_bundle(kind, recipe)[1], draw_texts(10_000, first_seed() + 1), 2000, tiny_bundle)


@pytest.mark.soak
def test_a_hundred_thousand_texts_in_one_call(text_bundle: Any) -> None:
    texts = draw_texts(100_000, first_seed(), longest=4)
    with LLM(text_bundle("embed")[1]) as llm:
        vectors = llm.embed(texts)
        assert vectors.shape[0] == len(texts)
        for i in range(0, len(texts), 997):
            np.testing.assert_array_equal(llm.embed(texts[i]), vectors[i])
        with pytest.raises(RequestError, match=r"texts\[99999\]: it is empty"):
            llm.embed([*texts[:-1], ""])


def test_weights_that_are_not_numbers_fail_their_texts_alone(text_bundle: Any, tmp_path: Path) -> None:
    """Texts with a spoiled token share steps with others, whose bits don't change."""
    _, bundle = text_bundle("embed")
    spoiled = spoiled_copy(bundle, tmp_path / "spoiled.bundle", "z")
    texts = [*draw_texts(200, longest=6), "z"]
    with LLM(bundle) as one, LLM(spoiled, verify=False) as other:
        expected = one.embed(texts)
        vectors = other.embed(texts, raise_errors=False)
        bad = [VOCABULARY["z"] in other.tokenizer.encode(text) for text in texts]
        assert 10 < sum(bad) < len(texts)
        for i, spoils in enumerate(bad):
            if not spoils:
                np.testing.assert_array_equal(vectors[i], expected[i])
                continue
            assert np.isnan(vectors[i]).all()
            with pytest.raises(EnginewrightError, match="the model's numbers for it are NaN or infinite"):
                other.embed(texts[i])


def test_an_engine_s_process_gives_the_same_numbers(text_bundle: Any) -> None:
    texts = draw_texts(40)
    tasks: dict[str, list[Task[Any]]] = {
        "embed": [Embed(texts, prompt_name="query"), Embed(texts[0], normalize=False)],
        "rerank": [Rank(QUERY, documents=texts), Rank(QUERY, documents=texts[0])],
        "classify": [Classify(texts), Classify([["ab", "c"], texts[0]], raw_scores=True)],
        "token_classify": [Classify(texts)],
    }
    wrong: dict[str, tuple[Task[Any], str]] = {
        "embed": (Embed(["a", "ab " * 100]), r"texts\[1\]: it has .* tokens; a text may have 64"),
        "rerank": (Rank(QUERY, documents=["a", ""]), r"documents\[1\]: it is empty"),
        "classify": (Embed("a"), "embed: the bundle of 'classify' is of kind 'classify'"),
        "token_classify": (Classify([]), "texts: there are none"),
    }
    for kind, of_kind in tasks.items():
        _, bundle = text_bundle(kind)
        with LLM(bundle) as llm:
            expected = [llm.run(task) for task in of_kind]
            tokens = [sum(one.prompt_length for one in llm.prepare(task).requests) for task in of_kind]
        ended = served(bundle, of_kind, *wrong[kind])
        assert [one.prompt_tokens for one in ended] == tokens
        for one, result in zip(ended, expected, strict=True):
            np.testing.assert_equal(one.result, result)
            assert (one.result[0] if isinstance(one.result, list) else one.result).dtype == np.float32


def served(bundle: Path, tasks: Sequence[Task[Any]], wrong: Task[Any], message: str) -> list[records.Ended]:
    """Runs tasks in an engine's process, next to a wrong one; returns their ends."""

    async def serve() -> list[records.Ended]:
        model = Model("m", str(bundle), {}, Limits(), records.Engine(str(bundle), {}))
        model.start()
        try:
            await model.wait_until_ready()
            running = [model.run(task) for task in tasks]
            with pytest.raises(RequestError, match=message):
                await model.run(wrong).result()
            return await asyncio.gather(*(one.result() for one in running))
        finally:
            await model.close()

    return asyncio.run(serve())


def test_a_folder_whose_model_saved_its_positions(tmp_path: Path) -> None:
    """Published models have buffers that transformers saved once, as all-MiniLM-L6-v2 has its positions."""
    save_text_model(tmp_path / "model", "embed")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    export(tmp_path / "model", tmp_path / "plain", recipe="f32")
    for name in ("position_ids", "token_type_ids"):
        tensors[f"embeddings.{name}"] = torch.arange(LONGEST)[None]
    save_file(tensors, weights, metadata={"format": "pt"})
    export(tmp_path / "model", tmp_path / "saved", recipe="f32")
    vectors = []
    for name in ("plain", "saved"):
        with LLM(tmp_path / name) as llm:
            vectors.append(llm.embed([QUERY], progress=False))
    assert np.array_equal(*vectors)
