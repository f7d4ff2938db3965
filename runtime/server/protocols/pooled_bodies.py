"""Bodies that ask for embeddings, scores or classes of texts, and the answers in the format of each protocol.

    embeddings    OpenAI's /v1/embeddings, Ollama's /api/embed and /api/embeddings, TEI's /embed
    scores        Cohere's and Jina's /v1/rerank, /v2/rerank and /rerank, TEI's /rerank, vLLM's /score
    classes       vLLM's /classify and /v1/classify, TEI's /predict; of tokens: vLLM's /pooling, /predict

TEI is Text Embeddings Inference. Its /rerank and Jina's have one path: TEI's body has ``texts``, Jina's ``documents``.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from ...requests.outputs import RequestMetrics
from ...requests.request_options import RequestOptions
from ...requests.vllm_names import Only
from ...shared.contracts import FloatArray, PoolingInfo
from ...shared.errors import RequestError, meant, shown
from ...tasks.base import Task
from ...tasks.classify import Classify
from ...tasks.context import Kind
from ...tasks.embed import Embed
from ...tasks.rank import Rank
from ..http.fields import HINTS, Fields
from ..http.limits import MANY_TEXTS, Bound

Text = str | list[int]
Texts = str | list[str | int | list[int]]
"""A text, token ids, or a list of either, as OpenAI's bodies have them."""

_LARGEST = (1 << 63) - 1
"""The largest integer that can be sent to an engine's process."""
_encode = msgspec.json.Encoder().encode
_RIGHT = Only((None, "right", "Right", "END"), "long texts are cut at their end", "Leave it out.")
_VLLM: Mapping[str, Only] = {
    "truncation_side": _RIGHT,
    "add_special_tokens": Only(
        (None, True), "the server adds the special tokens that the model expects", "Pass token ids instead of text."
    ),
    "embed_dtype": Only((None, "float32"), "vectors consist of 32-bit floats", "Leave it out."),
    "endianness": Only((None, "native", "little"), "base64 encodes little-endian floats", "Leave it out."),
}
_INPUT_TYPES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("query", "search_query"), ("query", "search_query", "s2p_query", "web_search_query")),
    **dict.fromkeys(("document", "passage", "search_document"), ("document", "passage", "search_document")),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Value of ``input_type`` -> names of prompts with that meaning. The first one that the model has is used."""


@dataclass(frozen=True)
class TextOrder:
    """The request of a body, in one form for all protocols.

    Attributes:
        texts: for each row of the result a text, its token ids, or a pair of texts.
        task: returns the task that computes the rows of some of ``texts``.
        names: for errors: a field of the task -> the field of the body with the same value. The last entry is the field
            of the texts.
    """

    texts: Sequence[Any]
    task: Callable[[Sequence[Any]], Task[Any]]
    names: Mapping[str, str]


@dataclass(frozen=True)
class Sums:
    """Totals of a whole answer.

    Attributes:
        name: the model's name in the answer.
        tokens: the number of tokens of all its texts.
        metrics: its times, from the body to the last result.
    """

    name: str
    tokens: int
    metrics: RequestMetrics

    @property
    def usage(self) -> dict[str, int]:
        """Returns the token counts in OpenAI's format."""
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}


class PooledBody(Fields, kw_only=True):
    """The common part of bodies that ask for a result of each of their texts.

    ``summary`` describes the endpoint for openapi.json.
    """

    summary: ClassVar[str]
    harmless: ClassVar[frozenset[str]] = HINTS | {"user", "metadata", "request_id"}

    model: str | None = None
    truncate: bool | str | None = None
    truncate_prompt_tokens: int | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    request_class: str | None = None

    @property
    def named(self) -> str | None:
        """The model's name on this server; None for the first model of the body's kind."""
        return self.model

    def order(self, pooling: PoolingInfo, ignored: list[str]) -> TextOrder:
        """Returns the request in one form for all protocols.

        Args:
            pooling: the facts about the model.
            ignored: the list to which the names of fields are added that make no difference for this model.

        Raises RequestError naming the field.
        """
        raise NotImplementedError

    def row(self, result: Any, labels: Sequence[str]) -> Any:
        """Converts the result of one text to its row of the answer. ``labels``: the names of the model's classes."""
        raise NotImplementedError

    def response(self, rows: Sequence[Any], sums: Sums) -> Any:
        """Returns the whole answer. ``rows``: the row of each text; ``sums``: totals of the answer."""
        raise NotImplementedError

    def request_options(self, tenant: str) -> RequestOptions:
        """Returns the options of its requests."""
        return RequestOptions(tenant=tenant, priority=self.priority, request_class=self.request_class)

    def cuts(self) -> bool:
        """Returns True if texts that are too long are cut at their end.

        Raises RequestError if the body asks for another way.
        """
        if self.truncate_prompt_tokens not in (None, -1):
            hint = "Pass -1, or truncate."
            raise RequestError("truncate_prompt_tokens: texts are cut to the model's own length alone", hint=hint)
        if isinstance(self.truncate, str):
            choice = self.truncate.upper()
            if choice not in ("NONE", "END"):
                hint = 'Pass "END" or "NONE", or true or false.'
                raise RequestError(f"truncate: {shown(self.truncate)}: texts are cut at their end", hint=hint)
            return choice == "END" or self.truncate_prompt_tokens == -1
        return bool(self.truncate) or self.truncate_prompt_tokens == -1


def listed(name: str, value: Any) -> list[Text]:
    """Returns the texts, or the lists of token ids, of a field that may have a single one.

    Raises RequestError naming the field for an empty or mixed list, and for an empty text.
    """
    items = [value] if isinstance(value, str) else value
    if not items:
        raise RequestError(f"{name}: it is empty", hint="Pass a text.")
    if isinstance(items[0], int):
        items = [items]
    kind, hint = type(items[0]), "Pass texts alone, or lists of ids alone."
    for i, one in enumerate(items):
        place = name if len(items) == 1 else f"{name}[{i}]"
        if type(one) is not kind:
            raise RequestError(f"{place}: {shown(one)} beside {shown(items[0])}", hint=hint)
        if not one:
            raise RequestError(f"{place}: it is empty", hint="Pass a text, or leave it out.")
        wrong = next((part for part in one if type(part) is not int or abs(part) > _LARGEST), 0) if kind is list else 0
        if wrong:
            raise RequestError(f"{place}: {shown(wrong)} isn't a token id", hint="Pass lists of integers.")
    return items


class EmbeddingBody(PooledBody, kw_only=True):
    """The common part of bodies that ask for a vector of each text."""

    of_kinds: ClassVar[tuple[Kind, ...]] = ("embed",)

    dimensions: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None

    def texts(self) -> tuple[str, list[Text]]:
        """Returns the name of the field with the texts, and the texts. Raises RequestError naming the field."""
        raise NotImplementedError

    def order(self, pooling: PoolingInfo, ignored: list[str]) -> TextOrder:
        """Returns the request for the vectors of the texts. The arguments are those of `PooledBody.order`."""
        name, texts = self.texts()
        prompt = self._prompt(pooling.prompts)
        if prompt is None and self.input_type is not None:
            ignored.append("input_type")
        fields = {"prompt_name": prompt, "dimensions": self.dimensions, "normalize": self.normalize}
        names = {"prompt": "prompt_name", "texts": name}
        return TextOrder(texts, partial(Embed, truncate=self.cuts(), **fields), names)

    def _prompt(self, prompts: Mapping[str, str]) -> str | None:
        """Returns the name of one of the model's ``prompts``; None for its default. Raises RequestError."""
        if self.prompt_name is not None and self.input_type is not None:
            raise RequestError("input_type: prompt_name chooses the prompt already", hint="Pass one of them.")
        if self.input_type is None:
            return self.prompt_name
        if (names := _INPUT_TYPES.get(self.input_type.lower())) is None:
            hint = f"{meant(self.input_type, _INPUT_TYPES)}It is one of {', '.join(_INPUT_TYPES)}."
            raise RequestError(f"input_type: there is no {shown(self.input_type)}", hint=hint)
        by_name = {name.lower(): name for name in prompts}
        return next((by_name[name] for name in names if name in by_name), None)

    def row(self, result: FloatArray, labels: Sequence[str]) -> Any:
        """Returns a vector, [E], as JSON."""
        return msgspec.Raw(_encode(result.tolist()))


def _base64(values: FloatArray) -> str:
    """Returns base64 of little-endian 32-bit floats."""
    return base64.b64encode(values.astype("<f4", copy=False).tobytes()).decode()


class EmbeddingsBody(EmbeddingBody, kw_only=True):
    """The body of ``/v1/embeddings``."""

    summary: ClassVar[str] = "Returns a vector for each text, in OpenAI's format."
    bounds: ClassVar[Mapping[str, Bound]] = {"input": MANY_TEXTS}
    refused: ClassVar[Mapping[str, Only]] = _VLLM

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"

    def texts(self) -> tuple[str, list[Text]]:
        """Returns the name of the field with the texts, and the texts. Raises RequestError naming the field."""
        return "input", listed("input", self.input)

    def row(self, result: FloatArray, labels: Sequence[str]) -> Any:
        """Returns a vector as a list of numbers, or as base64 of its little-endian 32-bit floats."""
        return super().row(result, labels) if self.encoding_format == "float" else _base64(result)

    def response(self, rows: Sequence[Any], sums: Sums) -> Any:
        """Returns the list of vectors in OpenAI's format."""
        data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
        return {"object": "list", "data": data, "model": sums.name, "usage": sums.usage}


class TeiEmbedBody(EmbeddingBody, kw_only=True):
    """The body of TEI's ``/embed``."""

    summary: ClassVar[str] = "Returns a vector for each text, in the format of Text Embeddings Inference."
    bounds: ClassVar[Mapping[str, Bound]] = {"inputs": MANY_TEXTS}
    refused: ClassVar[Mapping[str, Only]] = {"truncation_direction": _RIGHT}

    inputs: Texts

    def texts(self) -> tuple[str, list[Text]]:
        """Returns the name of the field with the texts, and the texts. Raises RequestError naming the field."""
        return "inputs", listed("inputs", self.inputs)

    def response(self, rows: Sequence[Any], sums: Sums) -> Any:
        """Returns the list of the texts' vectors, which is the whole answer."""
        return rows


class _Ollama(EmbeddingBody, kw_only=True):
    """The common part of Ollama's two bodies. ``options`` are those of a chat, on which no vector depends."""

    harmless: ClassVar[frozenset[str]] = PooledBody.harmless | {"options", "keep_alive"}
    needed: ClassVar[frozenset[str]] = frozenset({"input", "prompt"})

    truncate: bool | str | None = True  # as Ollama's

    @property
    def named(self) -> str | None:
        """Returns the model's name without ":latest", which Ollama's clients append."""
        return None if self.model is None else self.model.removesuffix(":latest")


class OllamaEmbedBody(_Ollama, kw_only=True):
    """The body of ``/api/embed``."""

    summary: ClassVar[str] = "Returns a vector for each text, in Ollama's format."
    bounds: ClassVar[Mapping[str, Bound]] = {"input": MANY_TEXTS}

    input: str | list[str] = msgspec.field(default_factory=list)

    def texts(self) -> tuple[str, list[Text]]:
        """Returns the name of the field with the texts, and the texts: none if the model is to be loaded alone."""
        return "input", listed("input", self.input) if self.input else []

    def response(self, rows: Sequence[Any], sums: Sums) -> Any:
        """Returns the vectors, with times in nanoseconds."""
        waited, computed, _ = sums.metrics.times
        times = {"total_duration": waited + computed, "load_duration": waited}
        return {
            "model": self.model or sums.name,
            "embeddings": rows,
            **{name: max(0, round(seconds * 1e9)) for name, seconds in times.items()},
            "prompt_eval_count": sums.tokens,
        }


class OllamaEmbeddingsBody(_Ollama, kw_only=True):
    """The body of ``/api/embeddings``, the older endpoint for a single text."""

    summary: ClassVar[str] = "Returns the vector of a text, in Ollama's older format."

    prompt: str = ""

    def texts(self) -> tuple[str, list[Text]]:
        """Returns the name of the field with the text, and the text: none if the model is to be loaded alone."""
        return "prompt", [self.prompt] if self.prompt else []

    def response(self, rows: Sequence[Any], sums: Sums) -> Any:
        """Returns a response with the vector of the only text, which is the only row."""
        return {"embedding": rows[0] if rows else []}


class _RankBody(PooledBody, kw_only=True):
    """The common part of bodies that ask for scores of pairs of texts."""

    of_kinds: ClassVar[tuple[Kind, ...]] = ("rerank",)

    def of_pairs(
        self, queries: Sequence[Any], documents: Sequence[Any], names: tuple[str, str], raw: bool = False
    ) -> TextOrder:
        """Returns the request for the scores of pairs of texts.

        Args:
            queries, documents: the first and the second text of each pair.
            names: the fields that they are in.
            raw: True leaves the model's activation out.
        """
        named = dict(zip(("query", "documents"), names, strict=True))
        task = partial(_rank, truncate=self.cuts(), raw_scores=raw)
        return TextOrder(list(zip(queries, documents, strict=True)), task, named)

    def row(self, result: Any, labels: Sequence[str]) -> float:
        """Returns the score of a pair of texts as a number."""
        return float(result)


def _rank(pairs: Sequence[tuple[str, str]], **fields: Any) -> Rank:
    """Returns the task for the scores of pairs (query, document). A query that all pairs share is sent once."""
    queries, documents = [query for query, _ in pairs], [document for _, document in pairs]
    return Rank(queries[0] if len(set(queries)) == 1 else queries, documents=documents, **fields)


class RerankBody(_RankBody, kw_only=True):
    """The body of ``/rerank``, ``/v1/rerank`` and ``/v2/rerank``.

    ``texts``, ``return_text`` and ``raw_scores`` are TEI's; the others are Cohere's and Jina's.
    """

    summary: ClassVar[str] = (
        "Orders documents by their scores for a query, in the format of Cohere and Jina, or of Text Embeddings"
        " Inference."
    )
    bounds: ClassVar[Mapping[str, Bound]] = dict.fromkeys(("documents", "texts"), MANY_TEXTS)
    refused: ClassVar[Mapping[str, Only]] = {
        "truncation_direction": _RIGHT,
        "rank_fields": Only((None, [], ["text"]), "only a document's text is read", "Leave it out."),
        "max_chunks_per_doc": Only((None, 1), "documents aren't divided", "Pass the parts as documents."),
        "max_tokens_per_doc": Only((None,), "texts are cut only to the model's maximum length", "Use truncate."),
        "return_embeddings": Only((None, False), "the answer contains only scores", "Ask /v1/embeddings."),
    }

    query: str
    documents: list[str | dict[str, Any]] | None = None
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool = False
    texts: list[str] | None = None
    return_text: bool = False
    raw_scores: bool = False

    def order(self, pooling: PoolingInfo, ignored: list[str]) -> TextOrder:
        """Returns the request for the scores of the documents. The arguments are those of `PooledBody.order`."""
        if (self.documents is None) == (self.texts is None):
            which = "there are none" if self.texts is None else "there are texts as well"
            raise RequestError(f"documents: {which}", hint="Pass the documents to be ordered.")
        name = "documents" if self.texts is None else "texts"
        texts = listed(name, self._texts())
        return self.of_pairs([*listed("query", self.query)] * len(texts), texts, ("query", name), self.raw_scores)

    def _texts(self) -> list[str]:
        if self.texts is not None:
            return self.texts
        return [_document(i, one) for i, one in enumerate(self.documents or ())]

    def response(self, rows: Sequence[Any], sums: Sums) -> Any:
        """Returns the documents' indices and scores, the highest first; equal ones in the body's order."""
        order = sorted(range(len(rows)), key=lambda i: (-rows[i], i))[: self.top_n]
        texts = self._texts()
        if self.texts is not None:
            return [{"index": i, "score": rows[i], **({"text": texts[i]} if self.return_text else {})} for i in order]
        results = [
            {"index": i, "relevance_score": rows[i]}
            | ({"document": {"text": texts[i]}} if self.return_documents else {})
            for i in order
        ]
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        return {
            "id": f"rerank-{secrets.token_hex(16)}",
            "model": sums.name,
            "results": results,
            "usage": sums.usage,
            "meta": {**meta, "tokens": {"input_tokens": sums.tokens, "output_tokens": 0}},
        }


def _document(i: int, value: str | dict[str, Any]) -> str:
    """Returns the text of a document, which may be an object with a text. Raises RequestError naming it."""
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise RequestError(f"documents[{i}]: {shown(value)} has no text", hint='Pass a text, or {"text": ...}.')
    return text


class ScoreBody(_RankBody, kw_only=True):
    """The body of ``/score``: one text and many, or as many of one as of the other."""

    summary: ClassVar[str] = "Returns the score of each pair of texts, in vLLM's format."
    bounds: ClassVar[Mapping[str, Bound]] = dict.fromkeys(("text_1", "text_2"), MANY_TEXTS)
    renamed: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("queries", "data_1"), "text_1"),
        **dict.fromkeys(("documents", "items", "data_2"), "text_2"),
    }

    text_1: str | list[str]
    text_2: str | list[str]

    def order(self, pooling: PoolingInfo, ignored: list[str]) -> TextOrder:
        """Returns the request for the scores of the pairs. The arguments are those of `PooledBody.order`."""
        one, two = listed("text_1", self.text_1), listed("text_2", self.text_2)
        if len(one) not in (1, len(two)):
            hint = "Pass one text, or as many as of text_2."
            raise RequestError(f"text_1: there are {len(one):,}, and {len(two):,} of text_2", hint=hint)
        return self.of_pairs(one * len(two) if len(one) == 1 else one, two, ("text_1", "text_2"))

    def response(self, rows: Sequence[Any], sums: Sums) -> Any:
        """Returns the scores in the order of the pairs."""
        return _vllm("score", [{"index": i, "object": "score", "score": row} for i, row in enumerate(rows)], sums)


class ClassifyBody(PooledBody, kw_only=True):
    """The body of ``/classify`` and ``/v1/classify``."""

    of_kinds: ClassVar[tuple[Kind, ...]] = ("classify",)
    summary: ClassVar[str] = "Returns the class of each text, in vLLM's format."
    bounds: ClassVar[Mapping[str, Bound]] = {"input": MANY_TEXTS}
    refused: ClassVar[Mapping[str, Only]] = _VLLM
    renamed: ClassVar[Mapping[str, str]] = dict.fromkeys(("activation", "softmax"), "use_activation")

    input: Texts
    use_activation: bool | None = None

    def order(self, pooling: PoolingInfo, ignored: list[str]) -> TextOrder:
        """Returns the request for the scores of the classes. The arguments are those of `PooledBody.order`."""
        task = partial(Classify, truncate=self.cuts(), raw_scores=self.use_activation is False)
        return TextOrder(listed("input", self.input), task, {"texts": "input"})

    def row(self, result: FloatArray, labels: Sequence[str]) -> Any:
        """Returns the label and the scores of a text, [C]."""
        return {"label": labels[int(result.argmax())], "probs": result.tolist(), "num_classes": len(result)}

    def response(self, rows: Sequence[Any], sums: Sums) -> Any:
        """Returns the label and the probabilities of each text, in their order."""
        return _vllm("classify", [{"index": i, **row} for i, row in enumerate(rows)], sums)


class PoolingBody(ClassifyBody, kw_only=True):
    """The body of ``/pooling``, which here is for the classes of tokens."""

    of_kinds: ClassVar[tuple[Kind, ...]] = ("token_classify",)
    summary: ClassVar[str] = "Returns each token's scores for all classes, in vLLM's format."
    refused: ClassVar[Mapping[str, Only]] = {
        **_VLLM,
        "task": Only(
            (None, "token_classify"), "/pooling is for classes of tokens", "Ask /v1/embeddings, /classify or /score."
        ),
    }

    encoding_format: Literal["float", "base64"] = "float"

    def row(self, result: FloatArray, labels: Sequence[str]) -> Any:
        """Returns the scores of a text's tokens, [S, C], as JSON or as base64 of its little-endian 32-bit floats."""
        return msgspec.Raw(_encode(result.tolist())) if self.encoding_format == "float" else _base64(result)

    def response(self, rows: Sequence[Any], sums: Sums) -> Any:
        """Returns the scores of the tokens of each text, in the order of the texts."""
        return _vllm("pool", [{"index": i, "object": "pooling", "data": row} for i, row in enumerate(rows)], sums)


def _vllm(kind: str, data: list[dict[str, Any]], sums: Sums) -> dict[str, Any]:
    """Returns an answer in vLLM's format; ``kind`` is the beginning of its id."""
    return {
        "id": f"{kind}-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": sums.name,
        "data": data,
        "usage": sums.usage,
    }


class PredictBody(PooledBody, kw_only=True):
    """The body of TEI's ``/predict``: a text, a pair of texts, or a list of lists of one or two texts."""

    of_kinds: ClassVar[tuple[Kind, ...]] = ("classify", "token_classify")
    summary: ClassVar[str] = (
        "Returns each text's or each token's scores for all classes, in the format of Text Embeddings Inference."
    )
    bounds: ClassVar[Mapping[str, Bound]] = {"inputs": MANY_TEXTS}
    refused: ClassVar[Mapping[str, Only]] = {"truncation_direction": _RIGHT}

    inputs: str | list[str | list[str]]
    raw_scores: bool = False

    @property
    def _single(self) -> bool:
        return isinstance(self.inputs, str) or all(isinstance(one, str) for one in self.inputs)

    def order(self, pooling: PoolingInfo, ignored: list[str]) -> TextOrder:
        """Returns the request. The arguments are those of `PooledBody.order`."""
        inputs: list[Any] = [self.inputs] if self._single else [*self.inputs]
        if not inputs:
            raise RequestError("inputs: it is empty", hint="Pass a text.")
        texts = [_one_or_two("inputs" if self._single else f"inputs[{i}]", one) for i, one in enumerate(inputs)]
        task = partial(Classify, truncate=self.cuts(), raw_scores=self.raw_scores)
        return TextOrder(texts, task, {"texts": "inputs"})

    def row(self, result: FloatArray, labels: Sequence[str]) -> Any:
        """Returns the classes of a text, [C], or of each of its tokens, [S, C], the highest scores first, as JSON."""
        order = np.argsort(-result, axis=-1, kind="stable")
        scores = np.take_along_axis(result, order, -1).tolist()
        rows, places = (scores, order.tolist()) if result.ndim > 1 else ([scores], [order.tolist()])
        classes = [
            [{"label": labels[i], "score": score} for i, score in zip(of_one, row, strict=True)]
            for of_one, row in zip(places, rows, strict=True)
        ]
        return msgspec.Raw(_encode(classes if result.ndim > 1 else classes[0]))

    def response(self, rows: Sequence[Any], sums: Sums) -> Any:
        """Returns the classes of the text, or of each text."""
        return rows[0] if self._single else rows


def _one_or_two(name: str, value: Any) -> str | tuple[str, str]:
    """Returns a text or a pair of texts. Raises RequestError naming the field."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not 1 <= len(texts) <= 2 or not all(isinstance(one, str) for one in texts):
        raise RequestError(f"{name}: {shown(value)} isn't a text", hint="Pass a text, or a list of lists of texts.")
    listed(name, texts)
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


POOLED: Mapping[str, type[PooledBody]] = {
    "/api/embed": OllamaEmbedBody,
    "/api/embeddings": OllamaEmbeddingsBody,
    "/v1/embeddings": EmbeddingsBody,
    "/embed": TeiEmbedBody,
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RerankBody),
    **dict.fromkeys(("/v1/score", "/score"), ScoreBody),
    **dict.fromkeys(("/v1/classify", "/classify"), ClassifyBody),
    "/pooling": PoolingBody,
    "/predict": PredictBody,
}
"""Endpoint -> the fields of its body."""
