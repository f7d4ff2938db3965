"""``Classify``: the classes of texts, or of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..shared.contracts import FloatArray
from ..text.text_batch import TextTokens
from .activation import activated
from .arguments import check_type
from .context import Kind, TaskContext
from .pooled import TextTask, texts_of


class Classify(TextTask[list[FloatArray]], frozen=True, tag="classify"):
    """A task for the scores of classes: for each text [C] float32, or [S, C] of a model that classifies tokens.

    ``PoolingInfo.labels`` of the model has the names of the classes.

    Attributes:
        prompt: a text, a list of token ids, or a list of texts, pairs of texts, and lists of ids.
        truncate: True cuts texts that are too long; False refuses them.
        raw_scores: True returns the model's numbers without its function, such as softmax.
    """

    raw_scores: Any = False

    kinds: ClassVar[tuple[Kind, ...]] = ("classify", "token_classify")
    result_type: ClassVar[Any] = list[np.ndarray]

    def tokens(self, context: TaskContext, name: str) -> tuple[list[TextTokens], list[str], bool]:
        check_type("raw_scores", self.raw_scores, (bool,), "True or False")
        return texts_of(context, self.prompt, name, truncate=self.truncate, pairs=True)

    def reduce(self, values: Sequence[FloatArray], context: TaskContext, *, single: bool) -> list[FloatArray]:
        return [activated(one, context.pooling, raw=self.raw_scores) for one in values]
