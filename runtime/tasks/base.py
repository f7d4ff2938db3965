"""Base classes of tasks. A task is what a caller requests, as a record that can cross the socket to an engine's
process.

A type of task is a class in a file of this folder and a row of ``table.TASKS``. Its fields are the caller's arguments.
It checks them, makes requests for the scheduler, and makes its result from their outputs. Most types need outputs of a
step for every token of a prompt: they derive from ``PromptTask``, which needs only the names of the outputs and the
function that reduces the rows to the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import numpy as np

from ..requests.request import PromptRequest, Request
from ..requests.request_class import NO_TARGETS
from ..requests.request_options import RequestOptions
from ..shared.contracts import FloatArray
from ..shared.errors import CapacityError, EnginewrightError, RequestError
from ..shared.step_schema import LOGITS
from .context import GENERATE, METHODS, Kind, TaskContext, kind_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class Prepared(Generic[Result]):
    """A checked task with its requests.

    Attributes:
        requests: the requests, for the scheduler.
    """

    requests: Sequence[Request]

    @property
    def error(self) -> EnginewrightError | None:
        """The error of the first request that ended with one; None if none did."""
        return next((request.error for request in self.requests if request.error is not None), None)

    @property
    def streams(self) -> bool:
        """True if the pieces of its requests are part of the result."""
        return False

    def result(self) -> Result:
        """Returns the result, once all requests have ended."""
        raise NotImplementedError

    def limit(self, most_bytes: int) -> None:
        """Sets the most bytes of the result, if its size is known before all steps have run.

        A request whose result would have more ends with a CapacityError.
        """

    def sent(self, whole: bool) -> Any:
        """Returns the result in the form that crosses the socket.

        ``whole``: True includes everything; False leaves out the parts that pieces have sent before.
        """
        return self.result()


class Task(msgspec.Struct, Generic[Result], frozen=True):
    """A request of one caller, of any type.

    Attributes:
        prompt: text, token ids, or a mapping with either.
        kinds: the kinds of bundles that it is for.
        result_type: the type of ``Prepared.sent``, for msgspec.
    """

    prompt: Any

    kinds: ClassVar[tuple[Kind, ...]] = (GENERATE,)
    result_type: ClassVar[Any] = Any

    @classmethod
    def check_model(cls, context: TaskContext) -> None:
        """Raises RequestError if the bundle is of another kind than the task."""
        if (kind := kind_of(context.model)) not in cls.kinds:
            raise RequestError(
                f"{cls.__struct_config__.tag}: the bundle of {context.model.name!r} is of kind {kind!r}, and this is "
                f"for {' or '.join(map(repr, cls.kinds))}",
                hint=f"Use {METHODS[kind]}.",
            )

    @property
    def slow(self) -> bool:
        """True if ``prepare`` may take long, so that it should run in another thread."""
        return False

    def prepare(self, context: TaskContext, options: RequestOptions, name: str = "prompt") -> Prepared[Result]:
        """Checks the task and makes its requests. ``name`` is the prompt's name in errors.

        Raises RequestError naming the field, CapacityError if the KV cache can't hold a request.
        """
        raise NotImplementedError


class Rows:
    """Collects the rows of a prompt's outputs from several steps.

    Args:
        length: the number of tokens of the prompt (S).

    Attributes:
        values: output -> [S, ...].
        most_bytes: the most bytes of all values; None for no limit.
    """

    most_bytes: int | None = None

    def __init__(self, length: int) -> None:
        self._length = length
        self.values: dict[str, FloatArray] = {}

    def take(self, start: int, rows: Mapping[str, FloatArray]) -> None:
        """Stores the rows [n, ...] of each output for the tokens from ``start`` on.

        Raises CapacityError at the first rows if all rows would have more than ``most_bytes``.
        """
        if not self.values and self.most_bytes is not None:
            total = sum(self._length * array[0].nbytes for array in rows.values())
            if total > self.most_bytes:
                raise CapacityError(
                    f"prompt: the result for {self._length:,} tokens has {total:,} bytes, and a message "
                    f"{self.most_bytes:,} at most",
                    hint="Shorten the prompt, or ask for fewer layers.",
                )
        for name, array in rows.items():
            if name not in self.values:
                self.values[name] = np.empty((self._length, *array.shape[1:]), np.float32)
            self.values[name][start : start + len(array)] = array


class PromptTask(Task[Result], Generic[Result], frozen=True):
    """A task that needs outputs of a step for every token of its prompt, and no new tokens."""

    def outputs(self, context: TaskContext) -> Sequence[str]:
        """Checks the fields, and returns the names of the outputs that the task needs; see ``step_schema.OUTPUTS``.

        Raises RequestError naming the field.
        """
        raise NotImplementedError

    def reduce(self, *rows: FloatArray) -> Result:
        """Returns the result, for the rows [S, ...] of each output, with one row for each token of the prompt."""
        raise NotImplementedError

    def prepare(self, context: TaskContext, options: RequestOptions, name: str = "prompt") -> Prepared[Result]:
        self.check_model(context)
        outputs = tuple(self.outputs(context))
        for output in outputs:
            if output != LOGITS and output not in context.outputs:
                raise RequestError(
                    f"{type(self).__name__}: target {context.target!r} gives no output {output!r}",
                    hint=f"It gives {', '.join((LOGITS, *context.outputs))}.",
                )
        prompt = context.checked_ids(context.encoded(self.prompt, name))
        rows, common = Rows(len(prompt)), context.common(options)
        if options.request_class is None:  # the targets of a default class are those of answers
            common["request_class"] = NO_TARGETS
        request = PromptRequest(prompt, outputs, rows.take, whole=context.model.pooling is not None, **common)
        return PreparedRows((request,), self, rows)


@dataclass(frozen=True)
class PreparedRows(Prepared[Result]):
    """A ``PromptTask`` with its request, and the rows of its prompt."""

    task: PromptTask[Result]
    rows: Rows

    def limit(self, most_bytes: int) -> None:
        """Sets the most bytes of the prompt's rows; a request with more ends with a CapacityError."""
        self.rows.most_bytes = most_bytes

    def result(self) -> Result:
        """Returns the result of the task's ``reduce``. Raises the error of its request."""
        if self.error is not None:
            raise self.error
        return self.task.reduce(*(self.rows.values[name] for name in self.requests[0].outputs))
