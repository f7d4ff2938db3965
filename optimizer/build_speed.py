"""Measures the speeds of a new build and an older one in pairs, and decides if the new one is slower.

Other work on the machine makes times vary. An interval of the median ratio says how far they can be trusted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median

from enginewright.optimizer.bench.options import BenchOptions, new_tokens, plan
from enginewright.optimizer.bench.server import Server
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import context_of
from enginewright.runtime.shared.progress import Progress, ProgressEvent

from .build_budget import Budget, Check, Outcome

PROMPT_TOKENS, DECODE_STEPS = 128, 16
"""The tokens of the timed prompt, and the decode steps after it that a pair of timings has."""

ROUNDS = (10, 20, 40)
"""The numbers of timed pairs after which the interval is computed, and measuring may stop.

With fewer than 10 pairs the interval has no bounds: see ``SpeedPairs.interval``. There are few such checks, so that the
chance of a false failure stays low.
"""

MOST_SECONDS = 120.0
"""The seconds after which no further round of pairs begins."""

TAIL = 1e-3
"""The chance that the true median ratio is below the interval. The chance that it is above is the same."""


@dataclass(frozen=True)
class SpeedPairs:
    """Measured seconds in pairs (the new bundle, the older one), each pair measured one directly after the other.

    Attributes:
        prefill: time to the first token of a prompt.
        decode: median time of some decode steps of one request.
    """

    prefill: tuple[tuple[float, float], ...]
    decode: tuple[tuple[float, float], ...]

    @staticmethod
    def interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Returns an interval for the median ratio of pairs, with a chance of ``TAIL`` on each side that it is outside.

        The bounds are order statistics of the ratios, as in the sign test (Conover, Practical Nonparametric Statistics,
        3.2). No distribution of the times is assumed, and a few disturbed pairs don't move them. With fewer than 10
        pairs the bounds are 0 and infinity.
        """
        ratios = sorted(new / older for new, older in pairs)
        count, chance, outside = len(ratios), 0.0, 0
        while (chance := chance + math.comb(count, outside) / 2**count) <= TAIL:
            outside += 1
        return (ratios[outside - 1], ratios[-outside]) if outside else (0.0, math.inf)


Settled = Callable[[SpeedPairs], bool]
"""A function that returns True if more pairs would change no outcome."""


def measure_speed(
    new: Bundle, older: Bundle, target: str, threads: int, settled: Settled, progress: Progress
) -> SpeedPairs | None:
    """Times prompts and decode steps of two bundles in pairs, one after the other; which one is first alternates.

    Other work on the machine and its temperature then affect both alike. ``ROUNDS`` has the
    numbers of pairs after which it may stop: if ``settled`` returns True, or after ``MOST_SECONDS``. Returns None if
    the contexts have no room for a prompt. Raises CapacityError as `optimize bench` does.
    """
    room = min(context_of(bundle, None, target) for bundle in (new, older)) - new_tokens(DECODE_STEPS)
    if room < 1:
        return None
    tokens = min(PROMPT_TOKENS, room)
    options = BenchOptions(prompts=(tokens,), batches=(1,), contexts=(tokens,), steps=DECODE_STEPS)
    times: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
    with ExitStack() as stack:
        servers = []
        for bundle in (new, older):
            sizes = plan(options, context_of(bundle, None, target))
            servers.append(stack.enter_context(closing(Server(bundle, target, sizes, threads=threads))))
        for server in servers:
            server.prompt(tokens, 1)
        start = time.perf_counter()
        for done in range(ROUNDS[-1]):
            for which in (0, 1) if done % 2 == 0 else (1, 0):
                first, _ = servers[which].prompt(tokens, 1)
                times[which][0].append(first)
                times[which][1].append(median(servers[which].decode(1, tokens, DECODE_STEPS)))
            goal = next(rounds for rounds in ROUNDS if done < rounds)
            progress(ProgressEvent("speed", done + 1, goal, ""))
            if done + 1 == goal and (settled(_pairs(times)) or time.perf_counter() - start > MOST_SECONDS):
                break
    return _pairs(times)


def _pairs(times: Sequence[tuple[list[float], list[float]]]) -> SpeedPairs:
    """Pairs the times of two bundles.

    ``times``: for each bundle, its times of prompts and its times of decode steps.
    """
    (prefill, decode), (prefill_older, decode_older) = times
    return SpeedPairs(tuple(zip(prefill, prefill_older, strict=True)), tuple(zip(decode, decode_older, strict=True)))


def speed_checks(speed: SpeedPairs | None, budget: Budget, provider: str | None) -> list[Check]:
    """Returns the checks of ``prefill_ratio`` and ``decode_ratio``, which use an interval of the median ratio.

    A check passes if the whole interval is at most the limit with its margin, and fails if the whole interval is above.
    Otherwise it is inconclusive.
    """
    limits = {"prefill_ratio": budget.prefill_ratio, "decode_ratio": budget.decode_ratio}
    if speed is None:
        why = "the context is too short"
        if not budget.speed:
            why = "the budget has speed = false"
        elif provider is not None:
            why = f"the speed of provider {provider} isn't measured"
        return [Check(key, "not compared", detail=why) for key in limits]
    checks = []
    for (key, limit), pairs in zip(limits.items(), (speed.prefill, speed.decode), strict=True):
        ratio = median(new / older for new, older in pairs)
        interval = low, high = SpeedPairs.interval(pairs)
        most = limit * (1 + budget.speed_margin)
        outcome: Outcome = "failed" if low > most else "passed" if high <= most else "inconclusive"
        milliseconds = median(older for _, older in pairs) * 1e3
        detail = f"median ratio of {len(pairs)} pairs, {low:.3g} to {high:.3g}; with a margin of "
        detail += f"{budget.speed_margin:.0%}; the older one takes {milliseconds:.3g} ms"
        checks.append(Check(key, outcome, ratio, limit, detail, interval))
    return checks
