"""Clients of embeddings and rerankers, as pytest's tests: each gets the vectors and the order that the others get.

``TEST_API_BASE_URL`` is a server with the models "embed" and "rerank" (``conformance.py --only pooled``).
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import cohere
import ollama
import openai
import pytest
from huggingface_hub import InferenceClient
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_ollama import OllamaEmbeddings
from langchain_openai import OpenAIEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.jinaai_rerank import JinaRerank

URL = os.environ["TEST_API_BASE_URL"]
TEXTS = ["A ship at sea.", "The harbour of a small town", "A box of salt", "Bread"]
QUERY = "Where is the ship?"


@pytest.fixture(scope="module")
def vectors() -> list[list[float]]:
    """The vectors by OpenAI's own client, as numbers."""
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
    result = client.embeddings.create(model="embed", input=TEXTS, encoding_format="float")
    return [row.embedding for row in result.data]


@pytest.fixture(scope="module")
def order() -> list[int]:
    """The order of the texts for the query, by Cohere's own client."""
    result = cohere.ClientV2(base_url=URL, api_key="none").rerank(model="rerank", query=QUERY, documents=TEXTS)
    scores = [row.relevance_score for row in result.results]
    assert scores == sorted(scores, reverse=True) and len(scores) == len(TEXTS)
    return [row.index for row in result.results]


def same(result: list[list[float]], expected: list[list[float]]) -> bool:
    """Returns True for equal vectors; a client may have rounded them to 64 bits and back."""
    return len(result) == len(expected) and all(
        len(a) == len(b) and all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-7) for x, y in zip(a, b, strict=True))
        for a, b in zip(result, expected, strict=True)
    )


def test_openai_base64(vectors: list[list[float]]) -> None:
    result = openai.OpenAI(base_url=f"{URL}/v1", api_key="none").embeddings.create(model="embed", input=TEXTS)
    assert same([row.embedding for row in result.data], vectors)


def test_ollama(vectors: list[list[float]]) -> None:
    client = ollama.Client(host=URL)
    assert same([list(row) for row in client.embed("embed", TEXTS).embeddings], vectors)
    assert same([list(client.embeddings("embed", TEXTS[0]).embedding)], vectors[:1])


def test_hugging_face_tei(vectors: list[list[float]]) -> None:
    client = InferenceClient(model=f"{URL}/embed")
    result = [client.feature_extraction(text).tolist()[0] for text in TEXTS]
    assert same(result, vectors)


def test_llama_index(vectors: list[list[float]]) -> None:
    model = OpenAILikeEmbedding(model_name="embed", api_base=f"{URL}/v1", api_key="none")
    assert same(model.get_text_embedding_batch(TEXTS), vectors)


def test_llama_index_tei(vectors: list[list[float]]) -> None:
    model = TextEmbeddingsInference(model_name="embed", base_url=URL)
    assert same(model.get_text_embedding_batch(TEXTS), vectors)


def test_cohere_v2(order: list[int]) -> None:
    result = cohere.ClientV2(base_url=URL, api_key="none").rerank(model="rerank", query=QUERY, documents=TEXTS, top_n=1)
    assert [row.index for row in result.results] == order[:1]


def test_cohere_v1(order: list[int]) -> None:
    result = cohere.Client(base_url=URL, api_key="none").rerank(
        model="rerank", query=QUERY, documents=TEXTS, top_n=2, return_documents=True
    )
    assert [row.index for row in result.results] == order[:2]
    assert [row.document.text for row in result.results] == [TEXTS[i] for i in order[:2]]


def test_langchain_cohere(order: list[int]) -> None:
    ranker = CohereRerank(base_url=URL, cohere_api_key="none", model="rerank", top_n=3)
    result = ranker.compress_documents([Document(page_content=text) for text in TEXTS], QUERY)
    assert [one.page_content for one in result] == [TEXTS[i] for i in order[:3]]


def test_llama_index_jina(order: list[int]) -> None:
    ranker = JinaRerank(top_n=3, model="rerank", base_url=f"{URL}/v1", api_key="none")
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
    result = ranker.postprocess_nodes(nodes, QueryBundle(QUERY))
    assert [one.node.get_content() for one in result] == [TEXTS[i] for i in order[:3]]


@pytest.mark.parametrize("name", ["langchain", "llamaindex"])
def test_examples(name: str, order: list[int], tmp_path: Path) -> None:
    """Each example prints the files of the three best texts, in the reranker's order.

    No answer is asked for: LlamaIndex's client of chats needs an older version of openai than the other clients here.
    """
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.md").write_text(text)
    script = Path(__file__).parents[2] / "examples" / f"search_{name}.py"
    command = [sys.executable, str(script), str(tmp_path), QUERY, "--url", URL, "--chat", ""]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line.split(".md: ")[0].rpartition("/")[2] for line in lines] == [str(i) for i in order[:3]]


class TestOpenAIEmbeddings(EmbeddingsIntegrationTests):
    """LangChain's standard tests, by its client of OpenAI's protocol."""

    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, object]:
        # Without the last one the client sends ids of OpenAI's own tokenizer.
        where = {"base_url": f"{URL}/v1", "api_key": "none"}
        return {"model": "embed", **where, "check_embedding_ctx_length": False}


class TestOllamaEmbeddings(EmbeddingsIntegrationTests):
    """LangChain's standard tests, by its client of Ollama's protocol."""

    @property
    def embeddings_class(self) -> type[OllamaEmbeddings]:
        return OllamaEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, object]:
        return {"model": "embed", "base_url": URL}
