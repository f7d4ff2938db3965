"""An agent's turns over HTTP: servers that run at the same time answer the same prompts, in turn.

Each prompt is the one before it, cut at an odd place, with new tokens after that. So its beginning is known up to a
place that is no block's end, and no request's. Half of the prompts of new tokens alone are answered before the
conversation, and half after it: between its turns they would take llama.cpp's only slot from it.
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

PARTS = ("alone", "cold", "turn", "alone")
"""The kinds of prompts, in the order in which they are answered."""


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

    def prompts(self) -> list[tuple[str, list[int]]]:
        """Returns each prompt's kind, one of PARTS, and its token ids, in the order in which they are answered."""
        random = np.random.default_rng(self.seed)

        def drawn(count: int) -> list[int]:
            return random.integers(100, self.vocabulary, count).tolist()  # type: ignore[no-any-return]

        talk = [drawn(self.context)]
        for _ in range(self.turns):
            talk.append(talk[-1][: -int(random.choice(CUTS))] + drawn(self.new))
        alone = [drawn(self.new) for _ in range(self.turns)]
        half = len(alone) // 2
        parts = zip(PARTS, (alone[:half], talk[:1], talk[1:], alone[half:]), strict=True)
        return [(part, prompt) for part, prompts in parts for prompt in prompts]


def first_token(url: str, prompt: Sequence[int]) -> tuple[float, int]:
    """Returns the seconds until a server has answered one token, and the prompt tokens that it had in its cache.

    The tokens are 0 if the server doesn't tell. Raises RuntimeError with any other answer.
    """
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
    return seconds, json.loads(text)["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)


def measure(names: Sequence[str], serving: Serving, turns: Turns) -> dict[str, Any]:
    """Times every prompt at every server; another server begins each prompt.

    Returns for each server and kind of prompt the seconds to the first token, the tokens of turns besides the new ones
    that weren't in its cache, and its memory after the first prompt of the conversation and at the end, in bytes; and
    the bytes of a snapshot of our states. Raises RuntimeError if a server doesn't answer.
    """
    figures: dict[str, Any] = {
        name: {"alone": [], "cold": [], "turn": [], "again": [], "peak_bytes": []} for name in names
    }
    with ExitStack() as running:
        servers = [running.enter_context(serving_with(name, serving)) for name in names]
        for server in servers:  # memory and threads are there after it
            first_token(server.url, [100] * min(600, turns.context))
        for index, (part, prompt) in enumerate(turns.prompts()):
            first = index % len(servers)
            for server in servers[first:] + servers[:first]:
                seconds, cached = first_token(server.url, prompt)
                figures[server.name][part].append(seconds)
                if part == "turn":
                    figures[server.name]["again"].append(len(prompt) - turns.new - cached)
                elif part == "cold":
                    figures[server.name]["peak_bytes"].append(server.peak_bytes())
        for server in servers:
            figures[server.name]["peak_bytes"].append(server.peak_bytes())
    groups = Bundle.open(serving.bundle, "code").program("cpu").cache_groups
    return {
        "turns": asdict(turns),
        "servers": figures,
        "snapshot_bytes": sum(cache_block_bytes(group) for group in groups if group.kind == STATE),
    }


def shown(result: Mapping[str, Any], ours: str) -> list[str]:
    """Lines for the reader: medians over the turns, ours against each other server, and memory."""
    lines = []
    for name, figures in result["servers"].items():
        before, after = figures["peak_bytes"]
        alone, cold, turn = (median(figures[part]) * 1e3 for part in ("alone", "cold", "turn"))
        line = (
            f"{name}: first prompt {cold:,.0f} ms, new tokens alone {alone:,.0f} ms, a turn's first token "
            f"{turn:,.0f} ms (at most {max(figures['turn']) * 1e3:,.0f}): {(turn - alone) / cold:.1%} of the first "
            f"prompt besides the new tokens; {median(figures['again']):,.0f} tokens computed again; "
            f"{(after - before) / 1e6:,.0f} MB more memory"
        )
        if name != ours:
            times = [t / o for t, o in zip(figures["turn"], result["servers"][ours]["turn"], strict=True)]
            line += f"; ours is {median(times):.2f} times as fast in a turn"
        lines.append(line)
    return [*lines, f"a snapshot of our states has {result['snapshot_bytes'] / 1e6:,.1f} MB"]
