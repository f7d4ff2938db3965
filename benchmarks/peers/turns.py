"""An agent's turns over HTTP: servers that run at the same time answer the same prompts, in turn.

Each prompt is the one before it, cut at an odd place, with new tokens after that. So its beginning is known up to a
place that is no block's end, and no request's.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import STATE
from peers.servers import MOST_SECONDS, Serving, serving_with

CUTS = range(1, 64, 2)
"""Tokens that a turn takes off the prompt before it: one of these numbers."""


@dataclass(frozen=True)
class Turns:
    """The conversation of random tokens.

    Attributes:
        context: tokens of the first prompt.
        turns: prompts after it.
        new: new tokens of each of these.
        vocabulary: token ids are below this number.
        seed: another conversation for each.
    """

    context: int = 4000
    turns: int = 20
    new: int = 64
    vocabulary: int = 20_000
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of a prompt at most, and of an answer."""
        return self.context + self.turns * self.new + 16

    def prompts(self) -> list[list[int]]:
        """Token ids of the first prompt and of each turn's."""
        random = np.random.default_rng(self.seed)
        prompts = [random.integers(100, self.vocabulary, self.context).tolist()]
        for _ in range(self.turns):
            begin = prompts[-1][: -int(random.choice(CUTS))]
            prompts.append(begin + random.integers(100, self.vocabulary, self.new).tolist())
        return prompts


def first_token(url: str, prompt: Sequence[int]) -> float:
    """Returns the seconds until a server has answered one token. Raises RuntimeError with any other answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=MOST_SECONDS)
    try:
        body = json.dumps({"prompt": list(prompt), "max_tokens": 1, "temperature": 0})
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        seconds = time.perf_counter() - start
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"{url} answered {response.status}: {text[:300]}")
    return seconds


def measure(names: Sequence[str], serving: Serving, turns: Turns) -> dict[str, Any]:
    """Times every turn at every server; another server begins each turn.

    Returns for each server the seconds to the first token of each prompt, and its memory after the first prompt and
    after the last, in bytes; and the bytes of a snapshot of our states. Raises RuntimeError if a server doesn't answer.
    """
    prompts = turns.prompts()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, list[int]] = {name: [] for name in names}
    with ExitStack() as running:
        servers = [running.enter_context(serving_with(name, serving)) for name in names]
        for index, prompt in enumerate(prompts):
            first = index % len(servers)
            for server in servers[first:] + servers[:first]:
                seconds[server.name].append(first_token(server.url, prompt))
                if index in (0, len(prompts) - 1):
                    peaks[server.name].append(server.peak_bytes())
    groups = Bundle.open(serving.bundle, "code").program("cpu").cache_groups
    return {
        "turns": asdict(turns),
        "tokens": [len(prompt) for prompt in prompts],
        "seconds": seconds,
        "peak_bytes": peaks,
        "snapshot_bytes": sum(cache_block_bytes(group) for group in groups if group.kind == STATE),
    }


def shown(result: Mapping[str, Any], ours: str) -> list[str]:
    """Lines for the reader: medians over the turns, ours against each other server, and memory."""
    lines = []
    for name, seconds in result["seconds"].items():
        before, after = result["peak_bytes"][name]
        first, middle, most = (one * 1e3 for one in (seconds[0], median(seconds[1:]), max(seconds[1:])))
        line = (
            f"{name}: first prompt {first:,.0f} ms, a turn's first token {middle:,.0f} ms (at most {most:,.0f}); "
            f"the turns took {(after - before) / 1e6:,.0f} MB more memory"
        )
        if name != ours:
            times = [theirs / mine for theirs, mine in zip(seconds[1:], result["seconds"][ours][1:], strict=True)]
            line += f"; ours is {median(times):.2f} times as fast in a turn"
        lines.append(line)
    return [*lines, f"a snapshot of our states has {result['snapshot_bytes'] / 1e6:,.1f} MB"]
