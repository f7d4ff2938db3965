"""The counters of an engine. A counter is declared here, counted where its event occurs, and shown by `/metrics`.

The scheduler has one ``Counters`` object, and passes it to its helpers and to objects of tasks, such as compiled
grammars. The engine's process sends the values with its ``Pulse``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from .errors import shown

T = TypeVar("T")
_LOG = logging.getLogger("enginewright.engine")

COUNTERS: Mapping[str, str] = {
    "num_preemptions": "Preemptions: running requests that lost their KV cache blocks to other requests.",
}
"""Name of a counter, which is its metric's too -> the help text of that metric."""


class Counters:
    """The values of an engine's counters, and the errors of its helpers. It is thread-safe.

    Attributes:
        values: counter of ``COUNTERS`` -> its value, without counters at 0.
        helper_errors: helper -> the number of its errors, without helpers at 0.
    """

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.helper_errors: dict[str, int] = {}
        self._kinds: set[tuple[str, str, type[Exception]]] = set()
        self._lock = threading.Lock()

    def count(self, counter: str, number: int = 1) -> None:
        """Adds ``number`` to a counter of ``COUNTERS``."""
        assert counter in COUNTERS, counter
        with self._lock:
            self.values[counter] = self.values.get(counter, 0) + number

    def caught(self, helper: str, method: str, error: Exception) -> None:
        """Counts an error that ``method`` of ``helper`` raised.

        Logs the first error of each method and type with its traceback.
        """
        kind = helper, method, type(error)
        with self._lock:
            self.helper_errors[helper] = self.helper_errors.get(helper, 0) + 1
            first = kind not in self._kinds
            self._kinds.add(kind)
        if first:
            message = "%s: %s failed, and its result is left out: %s. Further errors of this kind are only counted."
            _LOG.error(message, helper, method, shown(error, 300), exc_info=error)

    def call(self, helper: str, method: str, call: Callable[[], T], fallback: T) -> T:
        """Returns the result of ``call``.

        If it raises, counts the error for ``method`` of ``helper`` and returns ``fallback``.
        """
        try:
            return call()
        except Exception as e:  # noqa: BLE001  see the module
            self.caught(helper, method, e)
            return fallback
