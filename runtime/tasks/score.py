"""``Score``: the logits of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ..requests.request_options import RequestOptions
from ..shared.contracts import FloatArray
from ..shared.step_schema import LOGITS
from . import arguments
from .arguments import Encoded
from .base import Prepared, PromptTask
from .context import TaskContext


class Score(PromptTask[FloatArray], frozen=True, tag="score"):
    """Wants the logits after every token of its prompt: [S] -> [S, V] float32.

    Attributes:
        prompt: token ids, or what has an order of them.
    """

    result_type: ClassVar[Any] = np.ndarray

    def outputs(self, context: TaskContext) -> Sequence[str]:
        """Returns the logits alone, which every target gives."""
        return (LOGITS,)

    def reduce(self, *rows: FloatArray) -> FloatArray:
        """Returns the logits as they are, [S, V]."""
        return rows[0]

    def prepare(self, context: TaskContext, options: RequestOptions, name: str = "ids") -> Prepared[FloatArray]:
        """Takes token ids alone: logits belong to tokens, and a text may be split in more than one way."""
        ids = Encoded(arguments.token_ids(self.prompt, name), name=name)
        return super(Score, Score(ids)).prepare(context, options, name)
