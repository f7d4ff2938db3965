"""Reads and checks the argument of ``LLM(scheduling=...)``: a policy's name, or its options (`Scheduling`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from enginewright.runtime.requests.names import plain_text
from enginewright.runtime.requests.request_class import NO_TARGETS, RequestClass
from enginewright.runtime.requests.request_options import check_priority

from ..shared.errors import RequestError, shown
from ..shared.json_schema_keywords import is_number

DEFAULT_CLASS = "default"
"""The name of the class of requests that name no class, if a class of this name is declared."""
NAMES = ("fcfs", "priority", "fair", "offline")
_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_SHORTEST, _LONGEST = 1e-9, 1e6
MOST_WAITING = 1 << 31
LEAST_SHARE = 1e-6
_KEYS = ("ttft", "tpot", "priority")
_TYPES: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("fair", "refuse", "offline"), (bool, "True or False")),
    **dict.fromkeys(("classes", "shares"), (Mapping, "a dictionary")),
}
"""An option -> the type of its values, and the type's description."""


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """The order of requests. By default requests are ordered by priority, then by arrival.

    Attributes:
        classes: name -> targets, such as ``{"chat": {"ttft": "500ms", "tpot": "30ms"}, "batch": {"priority": 1}}``.
            ttft is the time to the first token, tpot the mean time for each further token. A request names its class
            (``request_class``); otherwise it is in the class "default", if there is one.
        shares: tenant -> weight, such as ``{"gold": 3}``; other tenants have weight 1. Within a priority, each tenant
            gets a share of the work that is proportional to its weight (virtual token counters: Sheng et al., OSDI
            2024).
        fair: True if all tenants have the same weight.
        refuse: True ends a request with an OverloadError at once if its targets can't be met, or if it would make
            another request miss its targets. False serves the request late.
        max_waiting: the most waiting requests; further requests are refused with an OverloadError. None is no limit.
        patience: about the longest wait of a request without a ttft, in seconds or as text such as "30s".
        offline: True for the highest throughput, with long steps. No class may have targets then.
        plan: a file with the output of ``optimize plan BUNDLE --gpu cpu --json``. Its predicted step times are used
            until steps have been measured.
    """

    classes: Mapping[str, RequestClass | Mapping[str, Any]] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    fair: bool = False
    refuse: bool = True
    max_waiting: int | None = None
    patience: float | str = 60.0
    offline: bool = False
    plan: str | Path | None = None

    def __post_init__(self) -> None:
        for name, (kind, expected) in _TYPES.items():
            if not isinstance(getattr(self, name), kind):
                raise _error(name, f"{shown(getattr(self, name))} isn't {expected}")
        object.__setattr__(self, "classes", {name: _class(name, of) for name, of in self.classes.items()})
        object.__setattr__(self, "patience", parse_seconds(self.patience, "scheduling: patience"))
        object.__setattr__(self, "shares", _checked_shares(self.shares))
        most = self.max_waiting
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= MOST_WAITING):
            raise _error(
                "max_waiting", f"{shown(most)} isn't a number of requests", hint="0 refuses whoever must wait."
            )
        if self.plan is not None and (not isinstance(self.plan, (str, Path)) or "\0" in str(self.plan)):
            raise _error("plan", f"{shown(self.plan)} isn't the path of a file")
        if self.offline and (late := [name for name, of in self._known.items() if of.ttft or of.tpot]):
            raise _error(
                "offline",
                f"it is for throughput alone, and class {late[0]!r} has targets",
                hint="Leave one of them out; a class without ttft and tpot may have a priority.",
            )

    @property
    def _known(self) -> Mapping[str, RequestClass]:
        return self.classes  # type: ignore[return-value]  # see __post_init__

    def class_named(self, name: str | None) -> RequestClass:
        """Returns the class with this name; for None, the default class. Raises RequestError with the known names."""
        if name is None:
            return self._known.get(DEFAULT_CLASS, NO_TARGETS)
        if name not in self._known:
            names = ", ".join(self._known) or "none"
            raise RequestError(
                f"request_class: there is no class {shown(name)}", hint=f"The classes of this LLM: {names}."
            )
        return self._known[name]


def scheduling_of(given: object) -> Scheduling | None:
    """Converts the argument ``scheduling``; None stays None. Raises RequestError naming the option."""
    if isinstance(given, Scheduling):
        return given
    if given is None or (isinstance(given, str) and given == "fcfs"):
        return None
    if isinstance(given, str) and given in NAMES:
        return Scheduling(fair=given == "fair", offline=given == "offline")
    known = [f.name for f in fields(Scheduling)]
    if not isinstance(given, Mapping):
        names = ", ".join(map(repr, NAMES))
        raise RequestError(f"scheduling: {shown(given)}", hint=f"Pass one of {names}, or options: {', '.join(known)}.")
    for key in given:
        if key not in known:
            raise RequestError(f"scheduling: there is no option {shown(key)}", hint=f"There are {', '.join(known)}.")
    return Scheduling(**given)


def parse_seconds(given: object, option: str) -> float:
    """Returns seconds: 0.02 for "20ms", "20 ms", "0.02s", "20000us" or 0.02. Raises RequestError naming ``option``."""
    seconds = math.nan
    if isinstance(given, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s)", given.strip().lower())
        seconds = float(match[1]) * _UNITS[match[2]] if match else math.nan
    elif is_number(given) and 0 < given <= _LONGEST:  # type: ignore[operator]
        seconds = float(given)  # type: ignore[arg-type]
    if not _SHORTEST <= seconds <= _LONGEST:
        hint = "Pass a time above 0: seconds, or a number with its unit, such as 20ms, 0.5s or 800us."
        raise RequestError(f"{option}: {shown(given)} isn't a time", hint=hint)
    return seconds


def _class(name: object, settings: object) -> RequestClass:
    if not isinstance(name, str) or not (plain_text(name) or ""):
        raise _error("classes", f"{shown(name)} isn't a name")
    option = f"scheduling: classes: {name}"
    if isinstance(settings, RequestClass):
        settings = {key: value for key in _KEYS if (value := getattr(settings, key)) is not None}
    if not isinstance(settings, Mapping):
        raise RequestError(f"{option}: {shown(settings)} isn't a dictionary", hint=f"It may have {', '.join(_KEYS)}.")
    for key in settings:
        if key not in _KEYS:
            raise RequestError(f"{option}: there is no target {shown(key)}", hint=f"There are {', '.join(_KEYS)}.")
    times = {
        key: None if settings.get(key) is None else parse_seconds(settings[key], f"{option}: {key}")
        for key in ("ttft", "tpot")
    }
    priority = settings.get("priority", 0)
    check_priority(f"{option}: priority", priority)
    return RequestClass(name, times["ttft"], times["tpot"], priority)


def _checked_shares(shares: Mapping[Any, Any]) -> dict[str, float]:
    """Returns tenant -> share as built-in types. Raises RequestError for a share that is out of range."""
    for tenant, share in shares.items():
        if not isinstance(tenant, str) or not is_number(share) or not LEAST_SHARE <= share <= 1 / LEAST_SHARE:
            hint = f"A tenant's share is a number above 0, from {LEAST_SHARE:g} to {1 / LEAST_SHARE:g}."
            raise _error("shares", f"{shown(tenant)}: {shown(share)}", hint=hint)
    return {str.__str__(name): float(share) for name, share in shares.items()}


def _error(option: str, what: str, *, hint: str | None = None) -> RequestError:
    return RequestError(f"scheduling: {option}: {what}", hint=hint)
