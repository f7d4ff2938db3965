"""``Rank``: how well documents answer a query, as a reranker scores it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ..shared.contracts import DOCUMENT, QUERY, FloatArray, PoolingInfo
from ..shared.errors import ContextError, RequestError
from ..text.text_batch import TextTokens, encode_texts, first_characters, longest_text
from ..text.tokenizer import Tokenizer
from . import arguments
from .activation import activated
from .arguments import check_type
from .context import Kind, TaskContext
from .embed import prompt_of
from .pooled import TextTask, checked_text


class Rank(TextTask[FloatArray], frozen=True, tag="rank"):
    """A task for a reranker's scores: n documents -> [n] float32; one document -> [].

    Attributes:
        prompt: the query; or a list with one for each document.
        documents: a text, or a list of texts.
        truncate: True cuts a query and a document that are too long together; False refuses them.
        raw_scores: True returns the model's numbers without its function, such as sigmoid.
    """

    documents: Any = ()
    raw_scores: Any = False

    kinds: ClassVar[tuple[Kind, ...]] = ("rerank",)
    result_type: ClassVar[Any] = np.ndarray

    def tokens(self, context: TaskContext, name: str) -> tuple[list[TextTokens], list[str], bool]:
        check_type("raw_scores", self.raw_scores, (bool,), "True or False")
        documents, single = arguments.listed(self.documents, "documents")
        queries, one_query = arguments.listed(self.prompt, "query")
        if not one_query and len(queries) != len(documents):
            raise RequestError(
                f"query: {len(queries)} of them for {len(documents)} documents",
                hint="Pass one, or one for each document.",
            )
        names = ["documents" if single else f"documents[{i}]" for i in range(len(documents))]
        first = [checked_text(one, "query" if one_query else f"query[{i}]") for i, one in enumerate(queries)]
        second = [checked_text(one, name) for one, name in zip(documents, names, strict=True)]
        pairs = list(zip(first * len(second) if one_query else first, second, strict=True))
        tokenizer, most = context.tokenizer, context.model.context_length
        pooling = context.pooling
        if pooling.query_template is None or pooling.document_template is None:
            before = prompt_of(pooling, None)  # in templates, it is the system's message
            pairs = [(before + one, other) for one, other in pairs]
            encoded = encode_texts(tokenizer, pairs, names, most, truncate=self.truncate)
        else:
            each = partial(_in_templates, tokenizer, pooling, most, self.truncate)
            encoded = [TextTokens(each(*pair, name)) for pair, name in zip(pairs, names, strict=True)]
        return encoded, names, single

    def reduce(self, values: Sequence[FloatArray], context: TaskContext, *, single: bool) -> FloatArray:
        scores = np.empty(len(values), np.float32)
        for i, value in enumerate(values):
            scores[i] = activated(value, context.pooling, raw=self.raw_scores)[0]
        return scores.reshape(()) if single else scores


def _in_templates(
    tokenizer: Tokenizer, pooling: PoolingInfo, most: int, truncate: bool, query: str, document: str, name: str
) -> list[int]:
    """Returns the tokens of a query and a document in the templates of a reranker that is a decoder.

    Only the templates write control tokens. With ``truncate``, a document that is too long is cut, and the text after
    it in the template stays. Raises ContextError for other texts that are too long.
    """
    assert pooling.query_template is not None and pooling.document_template is not None
    before, between = pooling.query_template.split(QUERY, 1)
    more, after = pooling.document_template.split(DOCUMENT, 1)
    head = f"{tokenizer.guarded(before)}{query}{tokenizer.guarded(between + more)}"
    tail = tokenizer.guarded(after)
    encode, longest = tokenizer.encode_guarded, longest_text(most)
    if len(query) > longest or (not truncate and len(document) > longest):
        which, length = ("query", len(query)) if len(query) > longest else (name, len(document))
        raise ContextError(
            f"{which}: it has {length:,} characters; a query and a document may have {most:,} tokens",
            hint="Shorten it." if which == "query" else "Shorten it, or pass truncate=True.",
            context=most,
            tokens=most + 1,
            room=most,
            exact=False,
        )
    document, tokens = first_characters(document[:longest], most, lambda part: len(encode(part)))
    ids = encode(f"{head}{document}{tail}")
    if len(ids) <= most:
        return ids
    end = encode(tail)
    room = most - len(encode(head)) - len(end)
    if not truncate or room < 1:
        what = "it has" if truncate else "with the query it has"
        raise ContextError(
            f"{name}: {what} {len(ids):,} tokens; a query and a document may have {most:,}",
            hint="Shorten the query." if truncate else "Shorten it, or pass truncate=True.",
            context=most,
            tokens=len(ids),
            room=most,
            exact=not tokens,
        )
    return [*ids[: most - len(end)], *end]
