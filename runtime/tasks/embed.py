"""``Embed``: the vectors of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..shared.contracts import FloatArray, PoolingInfo
from ..shared.errors import RequestError, shown
from ..text.text_batch import TextTokens
from .arguments import check_type
from .context import Kind, TaskContext
from .pooled import TextTask, texts_of

_LEAST_LENGTH = np.float32(1e-12)
"""The least length by which a vector is divided, as in PyTorch."""


class Embed(TextTask[FloatArray], frozen=True, tag="embed"):
    """A task for the vectors of texts: n texts -> [n, E] float32; one text -> [E].

    Attributes:
        prompt: a text, a list of token ids, or a list of texts and of lists of ids. Ids have all special tokens.
        prompt_name: the name of the prompt that is put before each text; None for the model's default, "" for none.
        dimensions: how many of the vector's first numbers to return; None for all.
        normalize: True divides each vector by its length; None does so if the model's makers do.
        truncate: True cuts texts that are too long; False refuses them.
    """

    prompt_name: Any = None
    dimensions: Any = None
    normalize: Any = None

    kinds: ClassVar[tuple[Kind, ...]] = ("embed",)
    result_type: ClassVar[Any] = np.ndarray

    def tokens(self, context: TaskContext, name: str) -> tuple[list[TextTokens], list[str], bool]:
        pooling = context.pooling
        check_type("normalize", self.normalize, (bool, type(None)), "True, False or None")
        _check_dimensions(pooling, self.dimensions)
        before = prompt_of(pooling, self.prompt_name)
        return texts_of(context, self.prompt, name, truncate=self.truncate, before=before)

    def reduce(self, values: Sequence[FloatArray], context: TaskContext, *, single: bool) -> FloatArray:
        pooling = context.pooling
        count = pooling.dimensions if self.dimensions is None else self.dimensions
        vectors = np.stack([value[:count] for value in values]) if values else np.empty((0, count), np.float32)
        if pooling.normalize if self.normalize is None else self.normalize:
            vectors /= np.maximum(lengths(vectors), _LEAST_LENGTH)[:, None]
        return vectors[0] if single else vectors


def _check_dimensions(pooling: PoolingInfo, dimensions: Any) -> None:
    """Raises RequestError for a number of dimensions that the model's vectors can't be cut to."""
    check_type("dimensions", dimensions, (int, type(None)), "an integer, or None")
    choices = sorted({*pooling.dimension_choices, pooling.dimensions})
    if dimensions is not None and dimensions not in choices:
        raise RequestError(
            f"dimensions: {shown(dimensions)} isn't a number to which this model's vectors may be cut",
            hint=f"It has {', '.join(map(str, choices))}.",
        )


def prompt_of(pooling: PoolingInfo, name: Any) -> str:
    """Returns the text to put before each text. Raises RequestError if the model has no prompt of this name."""
    check_type("prompt", name, (str, type(None)), "the name of a prompt, or None")
    if name is None:
        name = pooling.default_prompt
    if not name:
        return ""
    if name not in pooling.prompts:
        raise RequestError(
            f"prompt: the model has no prompt {shown(name)}",
            hint=f"It has {', '.join(sorted(pooling.prompts)) or 'none'}. Put another text before yours.",
        )
    return pooling.prompts[name]


def lengths(vectors: FloatArray) -> FloatArray:
    """Returns the lengths of vectors, [n, E] -> [n] float32.

    Each length is summed separately, so that it has the same bits in any batch: numpy adds the numbers of one array in
    an order that depends on their count alone.
    """
    return np.sqrt(np.array([np.add.reduce(vector * vector) for vector in vectors], np.float32))
