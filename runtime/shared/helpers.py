"""The one wrapper around helpers: objects that the engine asks, and whose errors must not cost it more than an answer.

``guarded`` wraps a helper. Where one of its methods raises, the caller gets the fallback that was declared for it, and
``HelperErrors`` counts the error and logs the first of its kind. Which helpers there are, and what their fallbacks are,
is declared in one table: ``runtime.scheduler.helpers``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from .errors import EnginewrightError, shown

T = TypeVar("T")
_LOG = logging.getLogger("enginewright.engine")

Fallbacks = Mapping[str, Any]
"""A method's name -> a function of the same arguments, which never raises; or an attribute's name -> a value."""


class HelperErrors:
    """The errors of helpers so far. Safe from any thread.

    Attributes:
        counts: the errors of each helper; one that never failed isn't there.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._kinds: set[tuple[str, str, type[Exception]]] = set()
        self._lock = threading.Lock()

    def caught(self, helper: str, method: str, error: Exception) -> None:
        """Counts an error. Logs the first of each method and type with its traceback."""
        kind = helper, method, type(error)
        with self._lock:
            self.counts[helper] = self.counts.get(helper, 0) + 1
            first = kind not in self._kinds
            self._kinds.add(kind)
        if first:
            message = "%s: %s failed, and its result is left out: %s. Further errors of this kind are only counted."
            _LOG.error(message, helper, method, shown(error, 300), exc_info=error)

    def call(self, helper: str, method: str, call: Callable[[], T], fallback: T) -> T:
        """Returns what ``call`` returns, or ``fallback`` where it raises."""
        try:
            return call()
        except Exception as e:  # noqa: BLE001  see the module
            self.caught(helper, method, e)
            return fallback


def guarded(
    name: str, helper: T, fallbacks: Fallbacks, errors: HelperErrors, refuses: frozenset[str] = frozenset()
) -> T:
    """Wraps a helper so that what ``fallbacks`` names never raises. Anything else is the helper's own.

    Args:
        name: the helper, as errors are counted.
        refuses: methods whose EnginewrightError is an answer, and goes to the caller.
    """
    return cast(T, _Guarded(name, helper, fallbacks, errors, refuses))


class _Guarded:
    def __init__(
        self, name: str, helper: object, fallbacks: Fallbacks, errors: HelperErrors, refuses: frozenset[str]
    ) -> None:
        attributes = self.__dict__  # what is set on this is set on the helper
        attributes["_guarded"] = (
            name,
            helper,
            {key: each for key, each in fallbacks.items() if not callable(each)},
            errors,
        )
        for method, fallback in fallbacks.items():
            if callable(fallback):
                passes = (EnginewrightError,) if method in refuses else ()
                attributes[method] = _guarded_method(name, helper, method, fallback, errors, passes)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The helper's class, for isinstance."""
        return type(self.__dict__["_guarded"][1])

    def __getattr__(self, attribute: str) -> Any:
        name, helper, values, errors = self.__dict__["_guarded"]
        if attribute in values:
            return errors.call(name, attribute, lambda: getattr(helper, attribute), values[attribute])
        return getattr(helper, attribute)

    def __setattr__(self, attribute: str, value: object) -> None:
        setattr(self.__dict__["_guarded"][1], attribute, value)


def _guarded_method(
    name: str,
    helper: object,
    method: str,
    fallback: Callable[..., Any],
    errors: HelperErrors,
    passes: tuple[type[Exception], ...],
) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return getattr(helper, method)(*arguments, **named)
        except passes:
            raise
        except Exception as e:  # noqa: BLE001  see the module
            errors.caught(name, method, e)
            return fallback(*arguments, **named)

    return call
