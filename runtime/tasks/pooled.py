"""Tasks of models that compute a text whole, and give numbers for it: vectors, scores, classes.

A task has one text or a list. Each text is a request, so that texts of one task and of others share steps; the result
is of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..requests.request import PromptRequest, Request
from ..requests.request_class import NO_TARGETS
from ..requests.request_options import RequestOptions
from ..shared.contracts import FloatArray
from ..shared.errors import CapacityError, EnginewrightError, RequestError
from ..shared.step_schema import CLASSES, POOLED
from ..text.text_batch import Text, TextTokens, encode_texts
from . import arguments
from .arguments import check_type
from .base import Prepared, Task
from .context import TaskContext

Result = TypeVar("Result")


class TextTask(Task[Result], frozen=True):
    """A task for the numbers of texts.

    Attributes:
        prompt: a text, or a list of them.
        truncate: True cuts texts that are too long; False refuses them.
    """

    truncate: Any = False

    def tokens(self, context: TaskContext, name: str) -> tuple[list[TextTokens], list[str], bool]:
        """Checks the fields. Returns the tokens of each text, the texts' names in errors, and True if the task has a
        single one.

        ``name``: the name of the texts in errors. Raises RequestError naming the field, or the text.
        """
        raise NotImplementedError

    def reduce(self, values: Sequence[FloatArray], context: TaskContext, *, single: bool) -> Result:
        """Combines the results of the task's texts to the result of the task.

        Args:
            values: the numbers of each text: [E] or [C]; [S, C] of a token classifier. NaN if its request failed.
            context: the engine.
            single: True if the task has a single text.
        """
        raise NotImplementedError

    def prepare(self, context: TaskContext, options: RequestOptions, name: str = "texts") -> PreparedTexts[Result]:
        self.check_model(context)
        check_type("truncate", self.truncate, (bool,), "True or False")
        encoded, names, single = self.tokens(context, name)
        output = CLASSES if context.pooling.task == "token_classify" else POOLED
        common = context.common(options)
        if options.request_class is None:  # the targets of a default class are those of answers
            common["request_class"] = NO_TARGETS
        values: list[FloatArray | None] = [None] * len(encoded)
        requests = [
            PromptRequest(
                tokens.ids,
                (output,),
                partial(_take, values, i, names[i]),
                whole=True,
                token_types=tokens.types,
                **common,
            )
            for i, tokens in enumerate(encoded)
        ]
        return PreparedTexts(requests, self, context, single, values)


def _take(values: list[FloatArray | None], at: int, name: str, start: int, rows: Mapping[str, FloatArray]) -> None:
    """Stores the numbers that were computed for a text. Raises EnginewrightError if they are NaN or infinite.

    Args:
        values: the numbers of each text.
        at: the index of the text.
        name: its name in errors.
        start: the position of the first row's token.
        rows: output -> its rows.
    """
    ((output, array),) = rows.items()
    if not np.isfinite(array).all():
        raise EnginewrightError(
            f"{name}: the model's numbers for it are NaN or infinite",
            hint="Check the bundle with `optimize verify`: its weights are damaged, or numbers overflow in its format. "
            "Other texts went on.",
        )
    values[at] = np.array(array if output == CLASSES else array[0], np.float32)


@dataclass(frozen=True)
class PreparedTexts(Prepared[Result]):
    """A ``TextTask`` with its requests, and the result for each text as soon as it is computed."""

    task: TextTask[Result]
    context: TaskContext
    single: bool
    values: list[FloatArray | None] = field(repr=False)

    def limit(self, most_bytes: int) -> None:
        """Raises CapacityError if the result of all texts would have more than ``most_bytes`` bytes."""
        if (total := 4 * sum(math.prod(self._shape(request)) for request in self.requests)) > most_bytes:
            raise CapacityError(
                f"texts: the result for {len(self.requests):,} of them has {total:,} bytes, and a message "
                f"{most_bytes:,} at most",
                hint="Send fewer texts at a time.",
            )

    def result(self) -> Result:
        """Returns the result; a text whose request failed has NaN."""
        values = [
            np.full(self._shape(request), np.nan, np.float32) if value is None else value
            for value, request in zip(self.values, self.requests, strict=True)
        ]
        return self.task.reduce(values, self.context, single=self.single)

    def _shape(self, request: Request) -> tuple[int, ...]:
        """Returns the shape of the result for a request's text: [D], or [T, D] if each token has scores; D is
        ``pooling.dimensions``.
        """
        pooling = self.context.pooling
        of_tokens = pooling.task == "token_classify"
        return (request.prompt_length, pooling.dimensions) if of_tokens else (pooling.dimensions,)


def texts_of(
    context: TaskContext, value: Any, field_name: str, *, truncate: bool, before: str = "", pairs: bool = False
) -> tuple[list[TextTokens], list[str], bool]:
    """Returns the tokens of texts or of lists of token ids, the texts' names, and True for a single one.

    Args:
        context: the engine.
        value: a text, a list of token ids, or a list of texts and of lists of ids.
        field_name: the caller's name of ``value``.
        truncate: True cuts texts that are too long.
        before: a text to put before each text; token ids are used as they are.
        pairs: True if an item of a list may be a pair of texts.

    Raises RequestError naming the text, and ContextError.
    """
    items, single = arguments.listed(value, field_name)
    names = [field_name if single else f"{field_name}[{i}]" for i in range(len(items))]
    results: list[TextTokens | None] = [None] * len(items)
    texts: dict[int, Text] = {}
    for i, (item, name) in enumerate(zip(items, names, strict=True)):
        if isinstance(item, str):
            texts[i] = before + checked_text(item, name)
        elif pairs and _is_pair(item):
            texts[i] = (checked_text(item[0], name), checked_text(item[1], name))
        else:
            results[i] = TextTokens(_checked_ids(context, item, name, truncate=truncate))
    most = context.model.context_length
    if texts:
        named = [names[i] for i in texts]
        encoded = encode_texts(context.tokenizer, list(texts.values()), named, most, truncate=truncate)
        for i, tokens in zip(texts, encoded, strict=True):
            results[i] = TextTokens(context.checked_ids(arguments.Encoded(tokens.ids, name=names[i])), tokens.types)
    return [result for result in results if result is not None], names, single


def checked_text(value: Any, name: str) -> str:
    """Returns a text. Raises RequestError if it isn't one, or is empty."""
    check_type(name, value, (str,), "a text")
    if not value:
        raise RequestError(f"{name}: it is empty", hint="Pass a text.")
    return str.__str__(value)  # no class of the caller's own


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _checked_ids(context: TaskContext, item: Any, name: str, *, truncate: bool) -> list[int]:
    ids = arguments.token_ids(item, name)
    if truncate:
        ids = ids[: context.model.context_length]
    return context.checked_ids(arguments.Encoded(ids, name=name))
