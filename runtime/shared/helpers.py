"""A wrapper for helpers: objects that the engine calls, and whose errors must not stop it.

``guarded`` wraps a helper. If one of its methods raises, the caller gets the declared fallback, and ``Counters`` counts
the error and logs the first of its kind. ``runtime.scheduler.helpers`` has the table of helpers and fallbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from .counters import Counters
from .errors import EnginewrightError

T = TypeVar("T")

Fallbacks = Mapping[str, Any]
"""A method's name -> a function of the same arguments, which never raises; or an attribute's name -> a value."""


def guarded(name: str, helper: T, fallbacks: Fallbacks, counters: Counters, refuses: frozenset[str] = frozenset()) -> T:
    """Wraps a helper so that the methods in ``fallbacks`` never raise; other methods are unchanged.

    Args:
        name: the helper's name, under which errors are counted.
        helper: the helper.
        fallbacks: method -> the result if it raises.
        counters: counts the errors.
        refuses: methods whose EnginewrightError is a regular answer, and is raised.
    """
    return cast(T, _Guarded(name, helper, fallbacks, counters, refuses))


class _Guarded:
    def __init__(
        self, name: str, helper: object, fallbacks: Fallbacks, counters: Counters, refuses: frozenset[str]
    ) -> None:
        attributes = self.__dict__  # what is set on this is set on the helper
        attributes["_guarded"] = (
            name,
            helper,
            {key: each for key, each in fallbacks.items() if not callable(each)},
            counters,
        )
        for method, fallback in fallbacks.items():
            if callable(fallback):
                passes = (EnginewrightError,) if method in refuses else ()
                attributes[method] = _guarded_method(name, helper, method, fallback, counters, passes)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The helper's class, for isinstance."""
        return type(self.__dict__["_guarded"][1])

    def __getattr__(self, attribute: str) -> Any:
        name, helper, values, counters = self.__dict__["_guarded"]
        try:
            return getattr(helper, attribute)
        except Exception as e:
            if attribute not in values:
                raise
            counters.caught(name, attribute, e)
            return values[attribute]

    def __setattr__(self, attribute: str, value: object) -> None:
        setattr(self.__dict__["_guarded"][1], attribute, value)


def _guarded_method(
    name: str,
    helper: object,
    method: str,
    fallback: Callable[..., Any],
    counters: Counters,
    passes: tuple[type[Exception], ...],
) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return getattr(helper, method)(*arguments, **named)
        except passes:
            raise
        except Exception as e:  # noqa: BLE001  see the module
            counters.caught(name, method, e)
            return fallback(*arguments, **named)

    return call
