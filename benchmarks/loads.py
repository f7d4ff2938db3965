"""Loads for schedulers: which requests come when; and the figures of a run. ``tests/simulator/loads.py`` serves them
without a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the simulator is with the tests

from tests.simulator.loads import Arrival as Arrival
from tests.simulator.loads import Served as Served
from tests.simulator.loads import simulate as simulate


def bursts(requests: int, rate: float, seed: int, batch: float = 0.15) -> list[Arrival]:
    """Requests at ``rate`` a second on average: bursts of five times the usual rate, some 4 of 20 seconds.

    ``batch``: share of long requests of class "batch"; the others are "chat".
    """
    rng = np.random.default_rng(seed)
    calm, at, arrivals, until, high = rate / 1.8, 0.0, [], 0.0, True
    while len(arrivals) < requests:
        if at >= until:
            high = not high
            until = at + rng.exponential(4.0 if high else 16.0)
        at += rng.exponential(1 / (calm * (5 if high else 1)))
        if rng.random() < batch:
            arrivals.append(Arrival(at, _length(rng, 400), _length(rng, 100), "batch"))
        else:
            arrivals.append(Arrival(at, _length(rng, 80), _length(rng, 40), "chat"))
    return arrivals


def day(rate: float, seed: int, hours: float = 24.0) -> list[Arrival]:
    """A day: at 3 o'clock a fifth of the requests of 15 o'clock; ``rate``: a second, on average over the day."""
    rng = np.random.default_rng(seed)
    arrivals, at, most = [], 0.0, rate * 5 / 3
    while (at := at + rng.exponential(1 / most)) < hours * 3600:
        share = 0.6 - 0.4 * np.cos((at / 3600 - 3) / 12 * np.pi)  # of the most
        if rng.random() > share:
            continue
        kind, prompt, answer = ("batch", 400, 100) if rng.random() < 0.15 else ("chat", 80, 40)
        tenant = f"t{rng.integers(50)}"
        arrivals.append(Arrival(at, _length(rng, prompt), _length(rng, answer), kind, tenant))
    return arrivals


def greedy(requests: int, rate: float, seed: int, tenants: int = 4) -> list[Arrival]:
    """Makes as many requests of one tenant, "greedy", as three others send together, and as many again."""
    rng = np.random.default_rng(seed)
    ats = np.cumsum(rng.exponential(1 / rate, requests))
    share = 1 / (3 * (tenants - 1))
    names = rng.choice(["greedy", *(f"t{i}" for i in range(1, tenants))], requests, p=[2 / 3, *[share] * (tenants - 1)])
    return [
        Arrival(float(at), _length(rng, 80), _length(rng, 40), "chat", str(n)) for at, n in zip(ats, names, strict=True)
    ]


def _length(rng: np.random.Generator, median: int) -> int:
    return int(np.clip(rng.lognormal(np.log(median), 0.7), 4, min(4 * median, 1200)))


def summary(served: Iterable[Served], targets: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Says of each class: share within its targets, times, and how many within them a second (goodput).

    ``targets``: class -> time to the first token, time for each further one.
    """
    served = list(served)
    span = max(s.ended for s in served) - min(s.arrival.at for s in served)
    figures: dict[str, Any] = {"requests": len(served), "seconds": span}
    for name in sorted({s.arrival.of_class for s in served}):
        of = [s for s in served if s.arrival.of_class == name]
        done = [s for s in of if s.first is not None]
        row: dict[str, Any] = {"requests": len(of), "refused": 1 - len(done) / len(of)}
        row |= {f"ttft_{key}": value for key, value in _spread([s.first for s in done if s.first is not None]).items()}
        row |= {f"tpot_{key}": value for key, value in _spread([s.token for s in done if s.token is not None]).items()}
        row["end_to_end_p50"] = float(np.median([s.ended - s.arrival.at for s in done]))
        if name in targets:
            ttft, tpot = targets[name]
            good = sum(s.first is not None and s.first <= ttft and (s.token or 0) <= tpot for s in done)
            row |= {"within": good / len(of), "within_of_served": good / len(done), "goodput": good / span}
        figures[name] = row
    figures["tokens_per_second"] = sum(s.arrival.answer for s in served if s.first is not None) / span
    return figures


def by_tenant(served: Iterable[Served]) -> dict[str, Any]:
    """Says of each tenant: requests, and times to the first token."""
    tenants: dict[str, list[float]] = {}
    for s in served:
        if s.first is not None:
            tenants.setdefault(s.arrival.tenant, []).append(s.first)
    return {name: {"requests": len(of)} | _spread(of) for name, of in sorted(tenants.items())}


def _spread(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99]) if len(values) else (float("nan"),) * 2
    return {"p50": float(p50), "p99": float(p99)}
