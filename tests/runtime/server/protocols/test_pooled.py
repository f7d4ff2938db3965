"""Embeddings, scores and classes over HTTP are those of ``LLM``, in the shape of each protocol, also of bad bodies."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from enginewright import LLM
from enginewright.runtime.server.protocols import pooled as pooled_answers
from tests.runtime.server.conftest import Reply, Server
from tests.runtime.server.in_process import InProcess
from tests.simulator.seeds import first_seed
from tests.text_models import LABELS, LONGEST, PROMPTS, spoiled_copy

TEXTS = ["A ship at sea.", "The harbour", "x y " * 12, "é"]
WIDTH = 32
QUERY, DOCUMENTS = "Where is the ship?", ["At sea.", "In a box.", "At sea.", "It sank in the harbour."]


@pytest.fixture(scope="module")
def pooled(
    tiny_bundle: Path, pooled_bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of a chat model and of a model of each further kind."""
    models = {"chat": tiny_bundle, **pooled_bundles}
    named = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
    running = Server(*named, errors=tmp_path_factory.mktemp("pooled") / "stderr")
    yield running
    assert running.stop() == 0, running.errors.read_text()


@pytest.fixture(scope="module")
def embedder(pooled_bundles: dict[str, Path]) -> Iterator[LLM]:
    with LLM(pooled_bundles["embed"]) as llm:
        yield llm


@pytest.fixture(scope="module")
def ranker(pooled_bundles: dict[str, Path]) -> Iterator[LLM]:
    with LLM(pooled_bundles["rerank"]) as llm:
        yield llm


@pytest.fixture(scope="module")
def tagger(pooled_bundles: dict[str, Path]) -> Iterator[LLM]:
    with LLM(pooled_bundles["token_classify"]) as llm:
        yield llm


@pytest.fixture(scope="module")
def classifier(pooled_bundles: dict[str, Path]) -> Iterator[LLM]:
    with LLM(pooled_bundles["classify"]) as llm:
        yield llm


def word(i: int) -> str:
    """Returns the word of a number, of three letters."""
    return "".join(chr(ord("a") + i // 26**k % 26) for k in range(3))


def ask(server: Server, path: str, **body: Any) -> Any:
    """Returns the answer, which must be one."""
    reply = server.ask("POST", path, body)
    assert reply.status == 200, reply.body
    return reply.json


def refused(reply: Reply) -> str:
    """Returns the message of a request that was refused."""
    assert reply.status == 400, (reply.status, reply.body)
    error = reply.json["error"]
    return str(error if isinstance(error, str) else error["message"])


def vectors_of(answer: Any) -> np.ndarray[Any, Any]:
    """Returns the vectors of an answer in OpenAI's format, of either encoding."""
    assert [row["index"] for row in answer["data"]] == list(range(len(answer["data"])))
    rows = [row["embedding"] for row in answer["data"]]
    return np.array(
        [np.frombuffer(base64.b64decode(row), "<f4") if isinstance(row, str) else row for row in rows], np.float32
    )


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_vectors_are_the_library_s_bit_for_bit(pooled: Server, embedder: LLM, encoding: str) -> None:
    expected = embedder.embed(TEXTS)
    answer = ask(pooled, "/v1/embeddings", model="embed", input=TEXTS, encoding_format=encoding)
    assert np.array_equal(vectors_of(answer), expected)
    ids = [embedder.tokenizer.encode(text) for text in TEXTS]
    tokens = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (answer["object"], answer["model"]) == ("list", "embed")
    for value, rows in ((TEXTS[0], expected[:1]), (ids, expected), (ids[1], expected[1:2])):
        answers = ask(pooled, "/v1/embeddings", model="embed", input=value, encoding_format=encoding)
        assert np.array_equal(vectors_of(answers), rows)


def test_prompts_and_lengths_of_vectors(pooled: Server, embedder: LLM) -> None:
    def vectors(**body: Any) -> np.ndarray[Any, Any]:
        return vectors_of(ask(pooled, "/v1/embeddings", model="embed", input=TEXTS, **body))

    for name in PROMPTS:
        expected = embedder.embed(TEXTS, prompt=name)
        assert np.array_equal(vectors(prompt_name=name), expected)
        assert np.array_equal(vectors(input_type=f"search_{name}"), expected)
    assert not np.array_equal(vectors(input_type="query"), vectors())
    assert np.array_equal(vectors(normalize=False), embedder.embed(TEXTS, normalize=False))
    reply = pooled.ask("POST", "/v1/embeddings", {"model": "embed", "input": "a", "input_type": "clustering"})
    assert reply.headers["x-enginewright-ignored"] == "input_type"
    for body, name in (
        ({"prompt_name": "poem"}, "prompt_name"),
        ({"input_type": "poem"}, "input_type"),
        ({"input_type": "query", "prompt_name": "query"}, "input_type"),
        ({"dimensions": WIDTH - 1}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
    ):
        message = refused(pooled.ask("POST", "/v1/embeddings", {"model": "embed", "input": "a", **body}))
        assert message.startswith(f"{name}: "), message


def test_openai_s_client(pooled: Server, embedder: LLM) -> None:
    with openai.OpenAI(base_url=f"{pooled.url}/v1", api_key="none", max_retries=0) as client:
        for encoding in ({}, {"encoding_format": "float"}):  # the client asks for base64 by itself
            answers = client.embeddings.create(model="embed", input=TEXTS, user="u", **encoding)  # type: ignore[call-overload]
            rows = np.array([row.embedding for row in answers.data], np.float32)
            assert np.array_equal(rows, embedder.embed(TEXTS))
        with pytest.raises(openai.BadRequestError, match="of the kind 'generate'"):
            client.embeddings.create(model="chat", input="a")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.embeddings.create(model="nobody", input="a")


def test_ollama_and_tei(pooled: Server, embedder: LLM) -> None:
    expected = embedder.embed(TEXTS)
    answer = ask(pooled, "/api/embed", model="embed:latest", input=TEXTS, keep_alive="5m", options={"num_ctx": 8})
    assert np.array_equal(np.array(answer["embeddings"], np.float32), expected)
    assert answer["model"] == "embed:latest" and answer["total_duration"] > 0
    assert answer["prompt_eval_count"] == sum(len(embedder.tokenizer.encode(text)) for text in TEXTS)
    assert ask(pooled, "/api/embed", model="embed", input=[])["embeddings"] == []
    old = ask(pooled, "/api/embeddings", model="embed", prompt=TEXTS[0])
    assert np.array_equal(np.array(old["embedding"], np.float32), expected[0])
    assert ask(pooled, "/api/show", model="embed")["capabilities"] == ["embedding"]
    for inputs, rows in ((TEXTS, expected), (TEXTS[0], expected[:1])):  # the first model that embeds
        assert np.array_equal(np.array(ask(pooled, "/embed", inputs=inputs), np.float32), rows)


def test_rerankers(pooled: Server, ranker: LLM) -> None:
    scores = ranker.score(QUERY, DOCUMENTS).tolist()
    order = sorted(range(len(DOCUMENTS)), key=lambda i: (-scores[i], i))
    assert order.index(0) < order.index(2) and scores[0] == scores[2]
    body = {"model": "rerank", "query": QUERY, "documents": DOCUMENTS}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = ask(pooled, path, **body)
        assert answer["results"] == [{"index": i, "relevance_score": scores[i]} for i in order]
        assert answer["usage"]["prompt_tokens"] > len(QUERY) * len(DOCUMENTS)
    objects = [{"text": text} for text in DOCUMENTS]
    answer = ask(pooled, "/v1/rerank", **body | {"documents": objects}, top_n=2, return_documents=True)
    assert answer["results"] == [
        {"index": i, "relevance_score": scores[i], "document": {"text": DOCUMENTS[i]}} for i in order[:2]
    ]
    # TEI's body at the same path
    rows = ask(pooled, "/rerank", query=QUERY, texts=DOCUMENTS, return_text=True)
    assert rows == [{"index": i, "score": scores[i], "text": DOCUMENTS[i]} for i in order]
    raw = ask(pooled, "/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True)
    assert [row["index"] for row in raw] == order and raw != rows


def test_scores_of_pairs(pooled: Server, ranker: LLM) -> None:
    expected = ranker.score(QUERY, DOCUMENTS).tolist()
    for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
        for one in (QUERY, [QUERY], [QUERY] * len(DOCUMENTS)):
            answer = ask(pooled, "/score", model="rerank", **dict(zip(names, (one, DOCUMENTS), strict=True)))
            assert [row["score"] for row in answer["data"]] == expected
    message = refused(pooled.ask("POST", "/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}))
    assert message.startswith("text_1: there are 2")


def test_classes(pooled: Server, classifier: LLM) -> None:
    for texts in (TEXTS, TEXTS[:2], TEXTS[:1]):  # two texts aren't taken for a pair
        answers = [ask(pooled, path, model="classify", input=texts) for path in ("/classify", "/v1/classify")]
        for answer in answers:
            for row, one in zip(answer["data"], classifier.classify(texts), strict=True):
                assert row["probs"] == one.scores.tolist() and row["label"] == one.label
                assert row["num_classes"] == len(LABELS)
    (expected,) = classifier.classify([TEXTS[0]])
    (row,) = ask(pooled, "/predict", inputs=[[TEXTS[0]]])
    assert row == ask(pooled, "/predict", inputs=TEXTS[0])
    assert {one["label"]: one["score"] for one in row} == dict(zip(LABELS, expected.scores.tolist(), strict=True))
    assert [one["score"] for one in row] == sorted(expected.scores.tolist(), reverse=True)
    pair = ask(pooled, "/predict", inputs=[TEXTS[0], TEXTS[1]])
    assert pair == ask(pooled, "/predict", inputs=[[TEXTS[0], TEXTS[1]]])[0] != row
    raw = ask(pooled, "/predict", inputs=TEXTS[0], raw_scores=True)
    assert [one["label"] for one in raw] == [one["label"] for one in row] and raw != row
    for name in ("use_activation", "activation", "softmax"):
        (row,) = ask(pooled, "/classify", input=TEXTS[0], **{name: False})["data"]
        assert sorted(row["probs"], reverse=True) == [one["score"] for one in raw]


def test_classes_of_tokens(pooled: Server, tagger: LLM) -> None:
    expected = tagger.classify(TEXTS)
    tokens = [len(one.token_ids) for one in expected]
    answer = ask(pooled, "/pooling", input=TEXTS, task="token_classify")
    assert [row["data"] for row in answer["data"]] == [one.scores.tolist() for one in expected]
    assert [(row["index"], row["object"]) for row in answer["data"]] == [(i, "pooling") for i in range(len(TEXTS))]
    assert (answer["object"], answer["model"], answer["id"][:5]) == ("list", "token_classify", "pool-")
    assert answer["usage"] == {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}
    ids = ask(pooled, "/tokenize", model="token_classify", prompt=TEXTS[0])["tokens"]
    assert ids == list(expected[0].token_ids)
    packed = ask(pooled, "/pooling", model="token_classify", input=TEXTS, encoding_format="base64")
    for row, one in zip(packed["data"], expected, strict=True):
        scores = np.frombuffer(base64.b64decode(row["data"]), "<f4").reshape(-1, len(LABELS))
        np.testing.assert_array_equal(scores, one.scores)
    (row,) = ask(pooled, "/pooling", input=[list(expected[0].token_ids)], use_activation=False)["data"]
    assert row["data"] == tagger.classify(TEXTS[0], raw_scores=True)[0].scores.tolist()
    # TEI's shape: for a text a list of its tokens, each with all classes, the best first
    rows = ask(pooled, "/predict", model="token_classify", inputs=[[text] for text in TEXTS])
    assert rows[0] == ask(pooled, "/predict", model="token_classify", inputs=TEXTS[0])
    for of_text, one in zip(rows, expected, strict=True):
        assert tuple(classes[0]["label"] for classes in of_text) == one.label
        for classes, scores in zip(of_text, one.scores.tolist(), strict=True):
            assert {one["label"]: one["score"] for one in classes} == dict(zip(LABELS, scores, strict=True))
            assert [one["score"] for one in classes] == sorted(scores, reverse=True)
    message = refused(pooled.ask("POST", "/pooling", {"input": "a", "task": "embed"}))
    assert message.startswith("task: /pooling is for classes of tokens")


def test_an_answer_for_tokens_is_bounded(
    tiny_bundle: Path, pooled_bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A portion is the most that is computed for nothing. The bound is made small: texts of this model are short."""
    monkeypatch.setattr(pooled_answers, "_NUMBERS", 64 * 3 * 3)
    tokens = {"token_classify": pooled_bundles["token_classify"]}

    async def statuses() -> list[tuple[int, str]]:
        app = InProcess(tiny_bundle, tokens)
        try:
            await app.front.loaded(app.front.model("token_classify"))
            replies = [
                await app.ask(path, json.dumps({"model": "token_classify", name: value}).encode())
                for path, name, one in (("/pooling", "input", "a"), ("/predict", "inputs", ["a"]))
                for value in ([one] * 64, [one] * 65)
            ]
            return [(reply.status, reply.body.decode()) for reply in replies]
        finally:
            await app.front.close()

    replies = asyncio.run(statuses())
    assert [status for status, _ in replies] == [200, 400, 200, 400]
    assert "input: the scores of its tokens are more than 576 numbers" in replies[1][1]
    assert "inputs: the scores of its tokens are more than 576 numbers" in replies[3][1]


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/embeddings", {"model": "chat", "input": "a"}, "generate"),
        ("/api/embed", {"model": "rerank", "input": "a"}, "rerank"),
        ("/v1/rerank", {"model": "embed", "query": "a", "documents": ["b"]}, "embed"),
        ("/classify", {"model": "embed", "input": "a"}, "embed"),
        ("/v1/embeddings", {"model": "token_classify", "input": "a"}, "token_classify"),
        ("/classify", {"model": "token_classify", "input": "a"}, "token_classify"),
        ("/pooling", {"model": "classify", "input": "a"}, "classify"),
        ("/pooling", {"model": "chat", "input": "a"}, "generate"),
        ("/predict", {"model": "rerank", "inputs": "a"}, "rerank"),
        ("/v1/chat/completions", {"model": "embed", "messages": [{"role": "user", "content": "a"}]}, "embed"),
        ("/v1/chat/completions", {"model": "rerank", "messages": [{"role": "user", "content": "a"}]}, "rerank"),
        ("/v1/completions", {"model": "classify", "prompt": "a"}, "classify"),
        (
            "/v1/messages",
            {"model": "rerank", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]},
            "rerank",
        ),
        ("/v1/responses", {"model": "embed", "input": "a"}, "embed"),
        ("/api/chat", {"model": "embed", "messages": [{"role": "user", "content": "a"}]}, "embed"),
    ],
)
def test_a_model_of_another_kind_is_named(pooled: Server, path: str, body: dict[str, Any], kind: str) -> None:
    reply = pooled.ask("POST", path, body)
    assert reply.status == 400
    assert f"is of the kind '{kind}'" in reply.body.decode().replace('\\"', '"')


def test_without_a_name_the_first_model_of_the_kind_answers(pooled: Server) -> None:
    assert pooled.chat("a", max_tokens=1).json["model"] == "chat"
    assert ask(pooled, "/v1/embeddings", input="a")["model"] == "embed"
    assert ask(pooled, "/v1/rerank", query="a", documents=["b"])["model"] == "rerank"
    assert ask(pooled, "/classify", input="a")["model"] == "classify"
    assert ask(pooled, "/pooling", input="a")["model"] == "token_classify"
    assert {name: row["kind"] for name, row in pooled.ask("GET", "/props").json["models"].items()} == {
        "chat": "generate",
        "embed": "embed",
        "rerank": "rerank",
        "classify": "classify",
        "token_classify": "token_classify",
    }


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "100,000 texts": ("/v1/embeddings", {"input": ["a"] * 100_000}, "input: there are 100,000 texts"),
    "2,049 lists": ("/v1/embeddings", {"input": [[5]] * 2049}, "input: there are 2,049 texts"),
    "a million characters": ("/v1/embeddings", {"input": "a " * 500_000}, "maximum context length is"),
    "a word of a million": ("/v1/embeddings", {"input": "a" * 1_000_000}, "maximum context length is"),
    "a million blanks": ("/v1/embeddings", {"input": " " * 999_999 + "a"}, "maximum context length is"),
    "one of them too long": ("/v1/embeddings", {"input": [*["a"] * 70, "a " * 100]}, "your input[70] resulted in"),
    "too many ids": ("/v1/embeddings", {"input": [5] * 200}, "maximum context length is"),
    "ten million characters": ("/v1/embeddings", {"input": "a" * 10_000_000}, "input: it has more than"),
    "an id outside": ("/v1/embeddings", {"input": [[5], [10_000]]}, "input[1]: token 10000 is outside"),
    "a negative id": ("/v1/embeddings", {"input": [-1]}, "input: token -1 is outside"),
    "an enormous id": ("/v1/embeddings", {"input": [5, 1 << 70]}, "isn't a token id"),
    "a large id": ("/v1/embeddings", {"input": [[5], [1 << 40]]}, "input[1]: token 1099511627776 is outside"),
    "another pooling": ("/v1/embeddings", {"input": "a", "pooling": "cls"}, "there is no such field"),
    "fewer dimensions": ("/v1/embeddings", {"input": "a", "dimensions": 7}, "dimensions: 7 isn't a number to which"),
    "an id outside for classes": ("/classify", {"input": [[10_000]]}, "input: token 10000 is outside"),
    "floats": ("/v1/embeddings", {"input": [5, 0.5]}, "input"),
    "floats in lists": ("/v1/embeddings", {"input": [[5, 0.5]]}, "input"),
    "texts and ids": ("/v1/embeddings", {"input": ["a", [5]]}, "input[1]: "),
    "ids and lists": ("/v1/embeddings", {"input": [5, [5]]}, "input"),
    "nothing": ("/v1/embeddings", {"input": []}, "input: it is empty"),
    "an empty text": ("/v1/embeddings", {"input": ["a", ""]}, "input[1]: it is empty"),
    "an empty list": ("/v1/embeddings", {"input": ["a", []]}, "input[1]: "),
    "no input": ("/v1/embeddings", {}, "input"),
    "null": ("/v1/embeddings", {"input": ["a", None]}, "input"),
    "a lone surrogate": ("/v1/embeddings", {"input": ["a", "\ud800"]}, "UTF-8"),
    "another encoding": ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    "too many dimensions": ("/v1/embeddings", {"input": "a", "dimensions": 1 << 40}, "dimensions"),
    "cut at the beginning": ("/v1/embeddings", {"input": "a", "truncate": "START"}, "truncate: "),
    "both kinds of documents": ("/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, "documents: "),
    "no documents": ("/rerank", {"query": "a"}, "documents: "),
    "a document without text": ("/rerank", {"query": "a", "documents": [{"body": "b"}]}, "documents[0]: "),
    "an empty document": ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]: it is empty"),
    "an empty query": ("/rerank", {"query": "", "documents": ["b"]}, "query: it is empty"),
    "no best": ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    "a long query": ("/rerank", {"query": "a " * 100, "documents": ["b"]}, "maximum context length is"),
    "three texts": ("/predict", {"inputs": ["a", "b", "c"]}, "inputs: "),
    "no texts": ("/predict", {"inputs": [[]]}, "inputs[0]: "),
    "numbers": ("/predict", {"inputs": [["a", 5]]}, "inputs"),
    "100,000 texts for tokens": ("/pooling", {"input": ["a"] * 100_000}, "input: there are 100,000 texts"),
    "a million characters for tokens": ("/pooling", {"input": "a " * 500_000}, "maximum context length is"),
    "an empty text for tokens": ("/pooling", {"input": ["a", ""]}, "input[1]: it is empty"),
    "an id outside for tokens": ("/pooling", {"input": [[5], [10_000]]}, "input[1]: token 10000 is outside"),
    "100,000 documents": ("/rerank", {"query": "a", "documents": ["b"] * 100_000}, "documents: there are 100,000"),
    "100,000 pairs": ("/score", {"text_1": "a", "text_2": ["b"] * 100_000}, "text_2: there are 100,000 texts"),
    "100,000 texts for classes": ("/classify", {"input": ["a"] * 100_000}, "input: there are 100,000 texts"),
    "a long document": ("/rerank", {"query": "a", "documents": ["b", "b " * 500_000]}, "maximum context length is"),
    "null for Ollama": ("/api/embed", {"input": None}, "input: "),
    "texts of Ollama": ("/api/embed", {"input": ["a", 5]}, "input"),
}


@pytest.mark.parametrize("name", BAD)
def test_bodies_that_hurt(pooled: Server, name: str) -> None:
    path, body, message = BAD[name]
    assert message in refused(pooled.ask("POST", path, body))
    assert ask(pooled, "/v1/embeddings", input="a")["data"]
    assert not any(row["deaths"] for row in pooled.ask("GET", "/props").json["models"].values())


def test_texts_that_are_too_long_are_cut_where_the_client_asks_for_it(pooled: Server, embedder: LLM) -> None:
    texts = ["ab " * 300_000, "a"]
    expected = embedder.embed(texts, truncate=True)
    for body in ({"truncate": True}, {"truncate": "END"}, {"truncate_prompt_tokens": -1}):
        answer = ask(pooled, "/v1/embeddings", model="embed", input=texts, **body)
        assert np.array_equal(vectors_of(answer), expected)
        assert answer["usage"]["prompt_tokens"] == LONGEST + 3
    assert np.array_equal(np.array(ask(pooled, "/api/embed", input=texts)["embeddings"], np.float32), expected)
    assert len(ask(pooled, "/rerank", query="a " * 999, texts=["b " * 999], truncate=True)) == 1


def test_a_small_body_overtakes_a_large_one(pooled: Server, embedder: LLM) -> None:
    """However many texts the large body has left, the small one has its answer first."""
    texts = [f"{word(i)} {'x y ' * 12}" for i in range(2048)]
    large: list[Any] = []
    sender = threading.Thread(target=lambda: large.append(ask(pooled, "/v1/embeddings", input=texts)))
    sender.start()
    pooled.wait(lambda: pooled.props("embed")["requests"] > 0)
    overtook = 0
    while not large:
        small = vectors_of(ask(pooled, "/v1/embeddings", input=TEXTS))
        overtook += not large
    sender.join()
    assert overtook > 0 and np.array_equal(small, embedder.embed(TEXTS))
    assert np.array_equal(vectors_of(large[0]), embedder.embed(texts))


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_numbers_are_the_same_beside_others(
    pooled: Server, embedder: LLM, ranker: LLM, classifier: LLM, tagger: LLM, count: int
) -> None:
    """Texts that follow from the commit's hash, for models of all kinds beside chats."""
    draw = random.Random(first_seed())
    texts = [" ".join(draw.choices(("ab", "c", "def", "g."), k=draw.randint(1, 15))) for _ in range(count)]
    vectors, scores = embedder.embed(texts), ranker.score(QUERY, texts)
    classes, tokens = classifier.classify(texts), tagger.classify(texts)

    def one(i: int) -> bool:
        part = slice(i, i + draw.randint(1, 7))
        some = texts[part]
        if i % 5 == 0:
            return pooled.chat(texts[i], max_tokens=4).status == 200
        if i % 5 == 1:
            return np.array_equal(vectors_of(ask(pooled, "/v1/embeddings", input=some)), vectors[part])
        if i % 5 == 2:
            rows = ask(pooled, "/score", text_1=QUERY, text_2=some)["data"]
            return [row["score"] for row in rows] == scores[part].tolist()
        path, expected, name = ("/classify", classes, "probs") if i % 5 == 3 else ("/pooling", tokens, "data")
        rows = ask(pooled, path, input=some)["data"]
        return [row[name] for row in rows] == [one.scores.tolist() for one in expected[part]]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(len(texts))))


def test_weights_that_are_not_numbers_fail_their_bodies_alone(
    make_server: Any, pooled_bundles: dict[str, Path], embedder: LLM, tmp_path: Path
) -> None:
    """A spoiled token's bodies share steps with others, whose bits are those of the model that isn't spoiled."""
    spoiled = spoiled_copy(pooled_bundles["embed"], tmp_path / "spoiled.bundle", "z")
    (config := tmp_path / "server.toml").write_text("[llm]\nverify = false\n")
    server = make_server(spoiled, "--config", config)
    texts = [f"{'ab ' * (i % 9)}c{i % 7}" for i in range(60)]
    expected = embedder.embed(texts)

    def one(i: int) -> bool:
        some = texts[i : i + 3]
        if i % 4 == 0:
            reply = server.ask("POST", "/v1/embeddings", {"input": [*some, "a z"]})
            return reply.status == 503 and "the server's log says why" in reply.json["error"]["message"]
        return np.array_equal(vectors_of(ask(server, "/v1/embeddings", input=some)), expected[i : i + 3])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(57)))
    assert server.props()["deaths"] == 0
    assert "input[3]: the model's numbers for it are NaN or infinite" in server.errors.read_text()


def test_a_client_that_leaves_ends_its_requests(pooled: Server) -> None:
    body = json.dumps({"input": ["x y " * 12] * 2048, "model": "embed"}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with pooled.connect() as link:
        link.sendall(head + body)
        pooled.wait(lambda: pooled.props("embed")["requests"] > 0)
        link.shutdown(socket.SHUT_RDWR)
    pooled.wait(lambda: pooled.props("embed")["requests"] == 0)
    assert ask(pooled, "/v1/embeddings", input="a")["data"]


@pytest.mark.parametrize(("model", "path"), [("embed", "/v1/embeddings"), ("token_classify", "/pooling")])
def test_metrics_and_the_log(pooled: Server, model: str, path: str) -> None:
    def value(name: str) -> float:
        page = pooled.ask("GET", "/metrics").body.decode()
        lines = [line for line in page.splitlines() if line.startswith(name) and f'model_name="{model}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    before = [value("enginewright_prompt_tokens_total"), value("vllm:request_success_total")]
    tokens = ask(pooled, path, input=TEXTS)["usage"]["total_tokens"]
    assert [value("enginewright_prompt_tokens_total"), value("vllm:request_success_total")] == [
        before[0] + tokens,
        before[1] + 1,
    ]


def test_keys_and_quotas(make_server: Any, pooled_bundles: dict[str, Path], tmp_path: Path) -> None:
    import hashlib

    keys = tmp_path / "keys.toml"
    rows = {"a": "tokens_per_minute = 40", "b": ""}
    keys.write_text(
        "".join(
            f'[[keys]]\nhash = "sha256:{hashlib.sha256(key.encode()).hexdigest()}"\ntenant = "{key}"\n{more}\n'
            for key, more in rows.items()
        )
    )
    server = make_server(pooled_bundles["embed"], "--api-keys", keys, "--max-texts", 3, "--log-json")

    def status(key: str, count: int) -> int:
        body = {"input": ["x" * 20] * count}
        return int(server.ask("POST", "/v1/embeddings", body, authorization=f"Bearer {key}").status)

    assert status("nobody", 1) == 401
    assert status("b", 3) == 200 and status("b", 4) == 400
    assert status("a", 3) == 200 and status("a", 1) == 429  # 66 tokens of 40
    server.stop()
    lines = [json.loads(line) for line in server.errors.read_text().splitlines()]
    (served,) = [one for one in lines if one.get("tenant") == "a" and one.get("status") == 200]
    assert (served["texts"], served["prompt_tokens"], served["model"]) == (3, 66, "tiny-embed")
