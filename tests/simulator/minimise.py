"""Makes a scenario that fails smaller, as long as it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from .scenario import Ask, Scenario, Setup
from .world import run

Record = TypeVar("Record", Ask, Setup)

MOST_RUNS = 600


def failure(scenario: Scenario) -> str:
    """The failure of a scenario, without its numbers; "" if it has none."""
    try:
        failures = run(scenario).failures
    except Exception as e:  # noqa: BLE001  a smaller scenario may be none at all
        return f"raised {type(e).__name__}"
    if not failures:
        return ""
    return re.sub(r"\[[^]]*\]|\d+", "#", failures[0].partition(": ")[2])[:60]


def minimise(scenario: Scenario, fails: Callable[[Scenario], str] = failure) -> Scenario:
    """The smallest scenario that is found in ``MOST_RUNS`` runs. Raises ValueError if the first doesn't fail."""
    kind = fails(scenario)
    if not kind:
        raise ValueError("this scenario does not fail")
    runs = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(scenario):
            runs += 1
            if runs > MOST_RUNS:
                return scenario
            if fails(candidate) == kind:
                scenario, smaller = candidate, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with less: fewer calls first, then shorter ones, then plainer ones."""
    asks = scenario.asks
    for some in (asks[: len(asks) // 2], asks[len(asks) // 2 :]):
        if some and len(asks) > 2:
            yield replace(scenario, asks=some)
    for i in range(len(asks)):
        if len(asks) > 1:
            yield replace(scenario, asks=(*asks[:i], *asks[i + 1 :]))
    for name in ("faults", "troubles"):
        listed = getattr(scenario, name)
        for i in range(len(listed)):
            yield replace(scenario, **{name: (*listed[:i], *listed[i + 1 :])})  # type: ignore[arg-type]
    for i, ask in enumerate(asks):
        for other in _shorter(ask):
            yield replace(scenario, asks=(*asks[:i], other, *asks[i + 1 :]))
    for i, ask in enumerate(asks):
        for other in _plainer(ask, ("at", "kind", "prompt", "new_tokens")):
            yield replace(scenario, asks=(*asks[:i], other, *asks[i + 1 :]))
    for setup in _plainer(scenario.setup, ("seed", "blocks", "windows")):
        if len(setup.blocks) == len(setup.windows) and setup.all_blocks:
            yield replace(scenario, setup=setup)


def _shorter(ask: Ask) -> Iterator[Ask]:
    for length in (len(ask.prompt) // 2, len(ask.prompt) - 1):
        if 0 < length < len(ask.prompt):
            yield replace(ask, prompt=ask.prompt[:length])
    for count in (ask.new_tokens // 2, ask.new_tokens - 1):
        if 0 < count < ask.new_tokens:
            yield replace(ask, new_tokens=count, min_tokens=min(ask.min_tokens, count))


def _plainer(record: Record, but: tuple[str, ...]) -> Iterator[Record]:
    for one in fields(record):
        default: Any = one.default
        if one.name not in but and getattr(record, one.name) != default:
            yield replace(record, **{one.name: default})
