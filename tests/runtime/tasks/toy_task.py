"""A type of request in one file: the most probable tokens after a prompt. Run as a program, it is an engine's process
whose table has the type too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from enginewright.runtime.server.engines.engine_process import main
from enginewright.runtime.shared.contracts import FloatArray
from enginewright.runtime.shared.step_schema import LOGITS
from enginewright.runtime.tasks.arguments import check_int
from enginewright.runtime.tasks.base import PromptTask
from enginewright.runtime.tasks.context import TaskContext
from enginewright.runtime.tasks.table import TASKS


class NextTokens(PromptTask[list[int]], frozen=True, tag="next_tokens"):
    """Wants the most probable tokens after its prompt, best first.

    Attributes:
        count: number of tokens.
    """

    count: int = 1

    result_type: ClassVar[Any] = list[int]

    def outputs(self, context: TaskContext) -> Sequence[str]:
        """Returns the logits. Raises RequestError for a count beyond the vocabulary."""
        check_int("count", self.count, 1, context.model.vocab_size)
        return (LOGITS,)

    def reduce(self, *rows: FloatArray) -> list[int]:
        """Returns the tokens of the greatest logits in the last row."""
        (logits,) = rows  # [S, V]
        return np.argsort(-logits[-1], kind="stable")[: self.count].tolist()  # type: ignore[no-any-return]


if __name__ == "__main__":
    TASKS.append(NextTokens)
    main(int(sys.argv[1]))
