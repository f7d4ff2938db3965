"""Tasks of models that compute texts whole, on a toy whose numbers are wrong if a text is divided or mixed up."""

from __future__ import annotations

import asyncio
import random
import string
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from enginewright import LLM, CapacityError, ContextError, EnginewrightError, RequestError
from enginewright.runtime.shared.contracts import ExecutorCaps, ModelInfo, PoolingInfo
from enginewright.runtime.tasks.embed import Embed, lengths
from enginewright.runtime.tasks.hidden_states import HiddenStates
from tests.runtime.pooled_toy import CLS, SEP, VOCABULARY, PooledToy, numbers, text_model, text_tokenizer
from tests.waiting import HANG

EMBED = PoolingInfo(
    task="embed",
    dimensions=8,
    dimension_choices=(4, 2),
    normalize=True,
    prompts={"query": "q: ", "document": "d: "},
)
RERANK = PoolingInfo(task="rerank", dimensions=1, activation="sigmoid")
CLASSES = PoolingInfo(task="classify", dimensions=3, activation="softmax", labels=("a", "b", "c"))
TOKENS = PoolingInfo(task="token_classify", dimensions=3, labels=("a", "b", "c"))

Opens = Callable[..., tuple[LLM, PooledToy]]


@pytest.fixture
def opens() -> Iterator[Opens]:
    """``opens(pooling)`` opens a toy with its ``LLM``."""
    opened: list[LLM] = []

    def make(pooling: PoolingInfo, context: int = 64, caps: ExecutorCaps = ExecutorCaps(), **options: Any) -> Any:
        executor = PooledToy(pooling.dimensions, caps=caps)
        opened.append(LLM.from_executor(executor, text_model(pooling, context), text_tokenizer(), **options))
        return opened[-1], executor

    yield make
    for llm in opened:
        llm.close()


def ids_of(text: str) -> list[int]:
    return text_tokenizer().encode(text)


def expected(text: str, count: int = 8, normalize: bool = True) -> Any:
    """Returns the vector of a text, in float64."""
    ids = np.array(ids_of(text), np.int32)
    vector = numbers(ids, np.zeros_like(ids), 8)[:count].astype(np.float64)
    return vector / np.linalg.norm(vector) if normalize else vector


def texts(count: int, seed: int = 0, longest: int = 30) -> list[str]:
    """Returns different texts of 1 to ``longest`` words of a letter."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, longest))) for _ in range(count)]


def test_vectors_of_one_text_and_of_several(opens: Opens) -> None:
    llm, executor = opens(EMBED)
    vectors = llm.embed(["a b c", "x", ids_of("a b c")])
    assert vectors.shape == (3, 8) and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, [expected(one) for one in ("a b c", "x", "a b c")], atol=1e-6)
    assert len(executor.steps) == 1, "one step has all"
    one = llm.embed("a b c")
    assert one.shape == (8,)
    np.testing.assert_array_equal(one, vectors[0])
    np.testing.assert_array_equal(llm.embed(iter(["x", "x"])), vectors[[1, 1]])
    np.testing.assert_array_equal(llm.embed(ids_of("x")), vectors[1])
    assert llm.embed([]).shape == (0, 8)
    np.testing.assert_array_equal(asyncio.run(llm.aembed(["x", "a b c"])), vectors[[1, 0]])


def test_prompts_dimensions_and_lengths(opens: Opens) -> None:
    llm, _ = opens(EMBED)
    np.testing.assert_array_equal(llm.embed("a b", prompt="query"), llm.embed("q: a b"))
    np.testing.assert_array_equal(llm.embed(["a b"], prompt=""), llm.embed(["a b"]))
    for count in (2, 4, 8):
        for normalize in (True, False, None):
            vector = llm.embed("a b", dimensions=count, normalize=normalize)
            np.testing.assert_allclose(vector, expected("a b", count, normalize is not False), atol=1e-6)
    default, _ = opens(PoolingInfo(task="embed", dimensions=8, prompts={"p": "p: "}, default_prompt="p"))
    np.testing.assert_array_equal(default.embed("a"), default.embed("p: a", prompt=""))
    np.testing.assert_array_equal(default.embed(ids_of("a")), default.embed("a", prompt=""))
    assert llm.info()["pooling"]["prompts"] == {"query": "q: ", "document": "d: "} and llm.info()["kind"] == "embed"


def test_vectors_are_the_same_bits_in_any_batch(opens: Opens) -> None:
    many = texts(200)
    alone, _ = opens(EMBED)
    first = np.stack([alone.embed(one, dimensions=4) for one in many])
    for options in ({}, {"prefill_chunk": 5}, {"max_requests": 3}, {"scheduling": "fair"}):
        llm, executor = opens(EMBED, **options)
        order = random.Random(1).sample(range(len(many)), len(many))
        np.testing.assert_array_equal(llm.embed([many[i] for i in order], dimensions=4), first[order])
        budget = options.get("prefill_chunk", 512)
        for step in executor.steps:
            assert len(step.ids) <= budget or len(step.counts) == 1, "a longer text has a step to itself"
            assert len(step.counts) <= options.get("max_requests", 64)


def test_steps_are_full(opens: Opens) -> None:
    llm, executor = opens(EMBED, prefill_chunk=60)
    llm.embed(["a b c d e f g h"] * 60)  # 10 tokens each
    sizes = [len(step.ids) for step in executor.steps]
    assert sizes == [60] * 10
    executor.steps.clear()
    llm.embed([" ".join("a" * 40), "a", "b", " ".join("a" * 50), "c"])
    assert [step.counts.tolist() for step in executor.steps] == [[42, 3, 3], [52, 3]]


def test_texts_that_are_too_long(opens: Opens) -> None:
    llm, executor = opens(EMBED, context=16)
    long, million = " ".join("a" * 15), "ab " * 500_000
    with pytest.raises(ContextError, match=r"^texts\[1\]: it has 17 tokens; a text may have 16") as e:
        llm.embed(["a", long])
    assert (e.value.tokens, e.value.context, e.value.exact) == (17, 16, True)
    with pytest.raises(ContextError, match=r"^texts: its first 1,440 characters have 962 tokens") as e:
        llm.embed(million)
    assert not e.value.exact
    with pytest.raises(ContextError, match="texts: it has 17 tokens; the context"):
        llm.embed([5] * 17)
    assert executor.steps == []
    cut = llm.embed(["a", long, million, [5] * 17], truncate=True)
    np.testing.assert_array_equal(cut[1], llm.embed(" ".join("a" * 14)))
    np.testing.assert_array_equal(cut[2], llm.embed("ab " * 7))
    np.testing.assert_array_equal(cut[3], llm.embed([5] * 16))
    np.testing.assert_array_equal(
        llm.embed("d: " + long, truncate=True), llm.embed(long, prompt="document", truncate=True)
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"texts": ""}, "texts: it is empty"),
    ({"texts": ["a", ""]}, r"texts\[1\]: it is empty"),
    ({"texts": ["a", []]}, r"texts\[1\]: it is empty"),
    ({"texts": ["a", None]}, r"texts\[1\]: None is of type NoneType"),
    ({"texts": ["a", "\ud800"]}, r"texts\[1\]: '\\ud800' isn't a character"),
    ({"texts": "\ud800"}, r"texts: '\\ud800' isn't a character"),
    ({"texts": ["a", [1, len(VOCABULARY)]]}, rf"texts\[1\]: token {len(VOCABULARY)} is outside the vocabulary"),
    ({"texts": ["a", [-1]]}, r"texts\[1\]: token -1 is outside"),
    ({"texts": 5}, "texts: 5 is of type int"),
    ({"texts": ["a", ("a", "b")]}, r"texts\[1\]: 'a' at place 0 isn't a token id"),
    ({"texts": "a", "prompt": "passage"}, "prompt: the model has no prompt 'passage'"),
    ({"texts": "a", "prompt": 3}, "prompt: 3 is of type int"),
    ({"texts": "a", "dimensions": 3}, "dimensions: 3 isn't a number to which"),
    ({"texts": "a", "dimensions": 0}, "dimensions: 0 isn.t a number to which .*\n  It has 2, 4, 8"),
    ({"texts": "a", "dimensions": 9}, "dimensions: 9 isn.t a number"),
    ({"texts": "a", "dimensions": 4.0}, "dimensions: 4.0 is of type float"),
    ({"texts": "a", "normalize": 1}, "normalize: 1 is of type int"),
    ({"texts": "a", "truncate": None}, "truncate: None is of type NoneType"),
    ({"texts": "a", "tenant": 3}, "tenant: 3 is of type int"),
    ({"texts": "a", "raise_errors": 3}, "raise_errors: 3 is of type int"),
    ({"texts": "a", "normalise": True}, "normalise"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments_name_themselves(opens: Opens, arguments: dict[str, Any], message: str) -> None:
    llm, executor = opens(EMBED)
    with pytest.raises(RequestError, match=message):
        llm.embed(**arguments)
    assert executor.steps == []


def test_numbers_that_are_not_finite_fail_their_text_alone(opens: Opens) -> None:
    llm, executor = opens(EMBED)
    good = llm.embed(["a", "b c"])
    executor.poison = VOCABULARY["z"]
    with pytest.warns(RuntimeWarning, match=r"1 of 3 texts failed, and their numbers are NaN: texts\[1\]: the model's"):
        vectors = llm.embed(["a", "y z", "b c"])
    np.testing.assert_array_equal(vectors[[0, 2]], good)
    assert np.isnan(vectors[1]).all()
    assert np.isnan(llm.embed(["z"], raise_errors=False)).all()
    for call in (lambda: llm.embed("z"), lambda: llm.embed(["a", "z"], raise_errors=True)):
        with pytest.raises(EnginewrightError, match="numbers for it are NaN or infinite"):
            call()
    np.testing.assert_array_equal(llm.embed(["a", "b c"]), good)


def test_a_reranker_scores_pairs(opens: Opens) -> None:
    llm, executor = opens(RERANK)
    scores = llm.score("a b", ["c d e", "f"])
    assert scores.shape == (2,) and scores.dtype == np.float32
    types = executor.steps[0].arrays["types"].tolist()
    assert types == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    raw = llm.score("a b", ["c d e", "f"], raw_scores=True)
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-raw.astype(np.float64))), rtol=1e-6)
    ids = np.array([*ids_of("a b"), *ids_of("f")[1:]], np.int32)
    np.testing.assert_array_equal(raw[1], numbers(ids, np.array([0, 0, 0, 0, 1, 1], np.int32), 1)[0])
    assert llm.score("a b", "f").shape == () and llm.score("a b", "f") == scores[1]
    np.testing.assert_array_equal(llm.score(["a b", "a b"], ["f", "c d e"]), scores[::-1])
    np.testing.assert_array_equal(asyncio.run(llm.ascore("a b", ["f"])), scores[1:])
    assert llm.score("a", []).shape == (0,)
    for query, documents, message in (
        ("", ["a"], "query: it is empty"),
        ("a", ["b", ""], r"documents\[1\]: it is empty"),
        (["a", "b"], ["c"], "query: 2 of them for 1 documents"),
        ([1, 2], ["c"], "query: "),
        ("a", [[1, 2]], r"documents\[0\]: \[1, 2\] is of type list"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.score(query, documents)  # type: ignore[arg-type]


def test_pairs_are_cut_at_the_longer_text(opens: Opens) -> None:
    llm, executor = opens(RERANK, context=12)
    with pytest.raises(ContextError, match=r"documents\[0\]: it has 15 tokens"):
        llm.score("a b", ["c " * 10])
    llm.score(["a b", "a " * 9, "a " * 9], ["c " * 10, "c d", "c " * 9000], truncate=True)
    assert executor.steps[0].counts.tolist() == [12, 12, 12]
    assert np.add.reduceat(executor.steps[0].arrays["types"], [0, 12, 24]).tolist() == [8, 3, 6]


def test_a_decoder_s_templates_write_control_tokens_alone(opens: Opens) -> None:
    pooling = PoolingInfo(
        task="rerank", dimensions=1, query_template="[CLS] q: {query} ", document_template="d: {document} [SEP] !"
    )
    llm, executor = opens(pooling, context=24)
    llm.score("a b", ["c {query} [SEP]"])
    ids = executor.steps[0].ids.tolist()
    assert ids.count(SEP) == 1 and ids.count(CLS) == 1 and len(ids) > 12
    llm.score("a b", ["c " * 10_000], truncate=True)
    ids = executor.steps[1].ids.tolist()
    assert len(ids) == 24 and ids[-2:] == [SEP, VOCABULARY["!"]] and ids.count(VOCABULARY["c"]) == 15
    for query, document, name in (("a", "a" * 500_000, r"documents\[0\]"), ("a" * 500_000, "a", "query")):
        with pytest.raises(ContextError, match=rf"^{name}: it has 500,000 characters"):
            llm.score(query, [document])
    with pytest.raises(ContextError, match=r"documents\[0\]: with the query it has .* tokens"):
        llm.score("a b", ["c " * 24])
    with pytest.raises(ContextError, match=r"documents\[0\]: .* tokens"):
        llm.score("a " * 24, ["c"], truncate=True)


def test_classes_of_texts_and_of_pairs(opens: Opens) -> None:
    llm, _ = opens(CLASSES)
    one, two = llm.classify(["a b", ("c", "d")])
    assert one.labels == ("a", "b", "c") and one.scores.dtype == np.float32 and one.token_ids == tuple(ids_of("a b"))
    assert one.label == one.labels[int(np.argmax(one.scores))] and one.score == one.scores.max()
    raw = llm.classify("a b", raw_scores=True)[0].scores.astype(np.float64)
    np.testing.assert_allclose(one.scores, np.exp(raw) / np.exp(raw).sum(), rtol=1e-6)
    assert two.token_ids == (*ids_of("c"), *ids_of("d")[1:])
    assert asyncio.run(llm.aclassify(["a b"]))[0].label == one.label


def test_classes_of_tokens(opens: Opens) -> None:
    llm, executor = opens(TOKENS)
    many = texts(40)
    together = llm.classify(many)
    for text, result in zip(many, together, strict=True):
        assert result.scores.shape == (len(ids_of(text)), 3) and len(result.label) == len(result.token_ids)
        np.testing.assert_array_equal(llm.classify(text)[0].scores, result.scores)
    executor.poison = VOCABULARY["z"]
    good, bad = llm.classify(["a", "z"], raise_errors=False)
    assert good.error is None and bad.error is not None and bad.scores.shape == (3, 3) and np.isnan(bad.scores).all()


def test_a_bundle_names_what_it_is_for(opens: Opens, make_llm: Callable[..., LLM], toy: Callable[..., Any]) -> None:
    embedder, _ = opens(EMBED)
    chat = make_llm(toy())
    messages = [{"role": "user", "content": "a"}]
    for call, message in (
        (lambda: embedder.generate("a"), "generate: the bundle of 'toy encoder' is of kind 'embed', and this is for"),
        (lambda: embedder.chat(messages), "generate: .* is of kind 'embed'"),
        (lambda: next(embedder.stream("a")), "generate: .* is of kind 'embed'"),
        (lambda: embedder.logits([1]), "logits: .* is of kind 'embed'"),
        (lambda: embedder.score("a", ["b"]), "rank: .* is of kind 'embed', and this is for 'rerank'\n  Use embed"),
        (lambda: embedder.classify("a"), "classify: .* is of kind 'embed'"),
        (lambda: chat.embed("a"), "embed: .* is of kind 'generate', and this is for 'embed'\n  Use generate or chat"),
        (lambda: chat.score("a", ["b"]), "rank: .* is of kind 'generate'"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
    with pytest.raises(RequestError, match="gives none"):  # this toy has none, but models of the kind may have them
        embedder.run(HiddenStates([1]))


def test_a_text_longer_than_a_step_is_refused(opens: Opens) -> None:
    llm, executor = opens(EMBED, caps=ExecutorCaps(max_tokens=10))
    with pytest.raises(CapacityError, match="prompt: it has 12 tokens, and a step, which must compute all of them"):
        llm.embed(" ".join("a" * 10))
    llm.embed([" ".join("a" * 8), "a"])
    assert [step.counts.tolist() for step in executor.steps] == [[10], [3]]


def test_a_step_without_memory_fails_its_texts_alone(opens: Opens) -> None:
    llm, executor = opens(EMBED, prefill_chunk=20)
    run, good = executor.run, llm.embed(["a", "b"])

    def fails(step: Any) -> Any:
        if len(step.ids) > 20:
            raise CapacityError("no memory for the step")
        return run(step)

    executor.run = fails  # type: ignore[method-assign]
    vectors = llm.embed(["a", " ".join("a" * 30), "b"], raise_errors=False)
    np.testing.assert_array_equal(vectors[[0, 2]], good)
    assert np.isnan(vectors[1]).all()


def test_texts_of_tenants_share_steps_fairly(opens: Opens) -> None:
    llm, executor = opens(EMBED, scheduling="fair", prefill_chunk=12)
    run, both_wait = executor.run, threading.Event()

    def waits(step: Any) -> Any:
        assert both_wait.wait(60)
        return run(step)

    executor.run = waits  # type: ignore[method-assign]
    first = llm.prepare(Embed(["a"] * 40), tenant="many")
    second = llm.prepare(Embed(["b"] * 4), tenant="few")
    ended: list[str] = []
    done = threading.Semaphore(0)

    def heard(name: str) -> Callable[[Any], None]:
        def hear(event: Any) -> None:
            ended.append(name)
            done.release()

        return hear

    llm.submit(first, heard("many"))
    llm.submit(second, heard("few"))
    both_wait.set()
    for _ in range(44):
        assert done.acquire(timeout=HANG)
    assert ended.index("few") < 40 and ended[-1] == "many"
    assert second.result().shape == (4, 8)


def test_a_result_that_no_message_takes_is_refused_before_a_step(opens: Opens) -> None:
    llm, executor = opens(EMBED)
    prepared = llm.prepare(Embed(["a", "b"]))
    prepared.limit(64)
    with pytest.raises(CapacityError, match="texts: the result for 2 of them has 64 bytes, and a message 63 at most"):
        prepared.limit(63)
    assert executor.steps == []


def test_a_length_is_the_same_bits_at_any_row() -> None:
    rows = np.random.default_rng(0).standard_normal((100, 387)).astype(np.float32)
    together = lengths(rows)
    np.testing.assert_array_equal(together, [lengths(row[None].copy())[0] for row in rows])
    np.testing.assert_allclose(together, np.linalg.norm(rows.astype(np.float64), axis=1), rtol=1e-6)


def test_model_info_says_what_a_chat_model_is_for(model_info: ModelInfo, make_llm: Any, toy: Any) -> None:
    info = make_llm(toy()).info()
    assert info["kind"] == "generate" and "pooling" not in info
