"""The options of a request, as one record that is passed from the caller's arguments through sockets to the request.

The code in between passes the record on unchanged. To add an option, add a field here, with its check and its line in
``RequestArguments``, and the code that reads it, such as a provider of a step's array that reads ``request.options``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, cast

import msgspec

from ..shared.errors import RequestError, shown
from .names import checked_name


class RequestArguments(TypedDict, total=False):
    """The options as keyword arguments of ``LLM``'s methods; see ``LLM.generate``.

    For a method with several prompts, ``priority`` may be a sequence with one value per prompt.
    """

    tenant: str
    priority: int | Sequence[int] | None
    request_class: str | None


class RequestOptions(msgspec.Struct, frozen=True):
    """The options of a request.

    Attributes:
        tenant: name of the tenant. A request finds only prefixes of its own tenant.
        priority: requests with a lower number run first; None takes the number of the request's class.
        request_class: name of one of the scheduling's classes; None takes the default class.

    Raises:
        RequestError: a value is of a wrong type; names the argument.
    """

    tenant: str = ""
    priority: int | None = None
    request_class: str | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "tenant", checked_name("tenant", self.tenant))
        if self.request_class is not None:
            msgspec.structs.force_setattr(self, "request_class", checked_name("request_class", self.request_class))
        if self.priority is not None:
            check_priority("priority", self.priority)
            msgspec.structs.force_setattr(self, "priority", int.__int__(self.priority))

    @classmethod
    def for_prompts(cls, arguments: RequestArguments, count: int) -> list[RequestOptions]:
        """Returns the options of each of ``count`` prompts.

        Raises RequestError for wrong values, and for a sequence of more or fewer priorities than there are prompts.
        """
        priority: Any = arguments.get("priority")
        if not isinstance(priority, (list, tuple)):
            return [cls(**arguments)] * count  # type: ignore[arg-type]
        if len(priority) != count:
            raise RequestError(
                f"priority: {len(priority)} of them for {count} prompts", hint="Pass one, or one for each prompt."
            )
        return [cls(**{**arguments, "priority": one}) for one in priority]

    @classmethod
    def taken_from(cls, variables: dict[str, Any]) -> RequestArguments:
        """Removes the options of a request from ``variables``, the keyword arguments of a chat, and returns them."""
        names = [name for name in cls.__struct_fields__ if name in variables]
        return cast(RequestArguments, {name: variables.pop(name) for name in names})


def check_priority(option: str, value: object) -> None:
    """Raises RequestError, naming ``option``, if a priority isn't an integer of 32 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 1 << 31:
        raise RequestError(
            f"{option}: {shown(value)} isn't an integer", hint="Lower numbers go first; 0 is the default."
        )
