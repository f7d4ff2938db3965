"""Runs the tasks of models that compute a text whole, for the methods of ``LLM``."""

from __future__ import annotations

import warnings
from typing import Generic

import msgspec

from ..requests.outputs import Classification
from ..requests.request_options import RequestArguments, RequestOptions
from ..shared.contracts import FloatArray
from ..tasks import arguments
from ..tasks.base import Result
from ..tasks.context import TaskContext
from ..tasks.pooled import PreparedTexts, TextTask
from .engine_loop import EngineLoop
from .run_requests import arun_all, run_all

_NO_OPTIONS = RequestOptions()


class TextCall(msgspec.Struct, Generic[Result], frozen=True):
    """The requests of one call of ``embed``, ``score`` or ``classify``.

    Attributes:
        prepared: the task with its requests.
        raised: True if the error of a single text is raised.
        warns: True if such an error is a warning instead, because the caller hasn't set ``raise_errors``.
    """

    prepared: PreparedTexts[Result]
    raised: bool
    warns: bool

    @classmethod
    def begin(
        cls, context: TaskContext, task: TextTask[Result], options: RequestArguments, raise_errors: bool | None
    ) -> TextCall[Result]:
        """Checks a task and makes its requests. Raises RequestError."""
        prepared = task.prepare(context, RequestOptions(**options) if options else _NO_OPTIONS)  # type: ignore[arg-type]
        return cls(prepared, arguments.raises(raise_errors, prepared.single), raise_errors is None)

    def run(self, engine: EngineLoop, progress: bool | None) -> PreparedTexts[Result]:
        """Runs the requests. Raises the engine's error, or that of a text; see ``raised``."""
        run_all(engine, self.prepared.requests, progress)
        return self._checked()

    async def arun(self, engine: EngineLoop) -> PreparedTexts[Result]:
        """Runs ``run`` as a coroutine, without a progress bar."""
        await arun_all(engine, self.prepared.requests)
        return self._checked()

    def _checked(self) -> PreparedTexts[Result]:
        error = self.prepared.error
        if error is not None and self.raised:
            raise error
        if error is not None and self.warns:
            failed = sum(request.error is not None for request in self.prepared.requests)
            text = f"{failed} of {len(self.prepared.requests)} texts failed, and their numbers are NaN: {error.message}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        return self.prepared


def classifications(prepared: PreparedTexts[list[FloatArray]]) -> list[Classification]:
    """Returns the classes of each text of a ``Classify`` that has ended."""
    pooling = prepared.context.pooling
    labels = pooling.labels or tuple(map(str, range(pooling.dimensions)))
    return [
        Classification(labels, scores, tuple(request.tokens), request.error)
        for scores, request in zip(prepared.result(), prepared.requests, strict=True)
    ]
