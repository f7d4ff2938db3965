"""The table of tasks, and how tasks and results are read from a socket. A new type of task is a new class in
``TASKS``.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import msgspec
import numpy as np

from ..shared.errors import RequestError, field_first
from .base import Task
from .classify import Classify
from .embed import Embed
from .generate import Generate
from .hidden_states import HiddenStates
from .logits import Logits
from .rank import Rank

TASKS: list[type[Task[Any]]] = [Generate, Logits, HiddenStates, Embed, Rank, Classify]
"""The types of requests; a record names its type by the tag of its class."""


def received(value: Any) -> Task[Any]:
    """Converts a value from a socket to a task. Raises RequestError naming the wrong field."""
    try:
        task: Task[Any] = msgspec.convert(value, reduce(or_, TASKS))
    except msgspec.ValidationError as e:
        raise RequestError(field_first(str(e), "the task")) from e
    return task


def received_result(task: Task[Any], value: Any) -> Any:
    """Converts a value from a socket to the result of ``task``."""
    return msgspec.convert(value, task.result_type, dec_hook=_array)


def _array(kind: type, value: Any) -> Any:
    """Converts (shape, type, bytes) to an array; see ``server.records``."""
    shape, dtype, data = value
    return np.frombuffer(data, dtype).reshape(shape)
