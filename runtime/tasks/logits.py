"""``Logits``: the logits of a prompt."""

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


class Logits(PromptTask[FloatArray], frozen=True, tag="logits"):
    """A task for the logits after every token of its prompt: [S] -> [S, V] float32.

    Attributes:
        prompt: token ids, as an ordered iterable.
    """

    result_type: ClassVar[Any] = np.ndarray

    def outputs(self, context: TaskContext) -> Sequence[str]:
        """Returns the logits as the only output."""
        return (LOGITS,)

    def reduce(self, *rows: FloatArray) -> FloatArray:
        """Returns the logits unchanged, [S, V]."""
        return rows[0]

    def prepare(self, context: TaskContext, options: RequestOptions, name: str = "ids") -> Prepared[FloatArray]:
        """Checks the task and makes its request. Only token ids are accepted: a text may be tokenized in
        several ways.
        """
        ids = Encoded(arguments.token_ids(self.prompt, name), name=name)
        return super(Logits, Logits(ids)).prepare(context, options, name)
