"""The first tokens of an agent's turns with a hybrid model: each turn diverges from the last one at an odd place.

    python benchmarks/agent_turns.py BUNDLE [--context 4000] [--turns 20] [--new 64] [--answer 32] [--compare 3]

A turn's prompt is the text of the last turn up to an odd token near its end, then new tokens. Times are those to the
first token, in milliseconds:

- cold: the first prompt, of which nothing is known;
- turn: the prompts of the turns;
- rest: after each turn, a prompt of the new tokens alone, which no cache could avoid.

Also printed: the tokens that turns computed besides the new ones, and the bytes of a snapshot and of all that are kept.
The first tokens of the last turns are compared with those of a model that keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from peers.machine import machine

from enginewright import LLM, SamplingParams
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes, kind_of


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the figures, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--requests", type=int, default=16, help="max_requests; there is a snapshot for each")
    parser.add_argument("--compare", type=int, default=3, help="turns whose first tokens are compared")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args(arguments)
    figures, prompts, tokens = conversation(options)
    with LLM(options.bundle, prefix_cache=False, speculate=None, memory=options.memory) as llm:
        plain = [first_token(llm, prompt)[1] for prompt in prompts[-options.compare :]]
    assert plain == tokens[-options.compare :], "the cache changed a token"
    cold, turn, rest = (median(figures[name]) * 1e3 for name in ("cold", "turn", "rest"))
    share = (turn - rest) / cold
    print(f"cold {cold:.1f}, turn {turn:.1f}, rest {rest:.1f}: {share:.1%} of cold besides the new tokens")
    print(f"tokens computed besides the new ones: {figures['again']}")
    print(f"a snapshot has {figures['snapshot_bytes']:,} bytes; {figures['kept']} are kept at the end")
    if options.json is not None:
        result = {"workload": vars(options) | {"bundle": options.bundle.name, "json": None}, "machine": machine()}
        options.json.write_text(json.dumps(result | figures, indent=1) + "\n", encoding="utf-8")
    return 0


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Returns the seconds to the first token, and that token."""
    began = time.perf_counter()
    (result,) = llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    return time.perf_counter() - began, result.outputs[0].token_ids[0]


def text_after(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """Returns a prompt with its answer of ``count`` tokens, which nobody times."""
    (result,) = llm.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))
    return [*prompt, *result.outputs[0].token_ids]


def conversation(options: argparse.Namespace) -> tuple[dict[str, Any], list[list[int]], list[int]]:
    """Returns the figures, and each turn's prompt and first token."""
    rng = np.random.default_rng(0)
    limits = {"memory": options.memory, "max_requests": options.requests}
    with LLM(options.bundle, speculate=None, **limits) as llm:
        vocabulary = llm.model.vocab_size
        states = [group for group in llm.engine.executor.cache_groups if kind_of(group).fixed]

        def new_tokens(count: int) -> list[int]:
            return rng.integers(10, vocabulary, count).tolist()

        first_token(llm, new_tokens(600))  # memory and threads are there after it
        prompt = new_tokens(options.context)
        cold, token = first_token(llm, prompt)
        prompts, tokens = [prompt], [token]
        figures: dict[str, Any] = {"cold": [cold], "turn": [], "rest": [], "again": []}
        for _ in range(options.turns):
            text = text_after(llm, prompt, options.answer)
            end = len(text) - int(rng.integers(1, options.answer + options.new // 2))
            prompt = [*text[: end - 1 + end % 2], *new_tokens(options.new)]
            before = llm.info()["prefix_cache"]
            seconds, token = first_token(llm, prompt)
            counts = llm.info()["prefix_cache"]
            computed = counts["tokens"] - before["tokens"] - (counts["reused"] - before["reused"])
            figures["again"].append(computed - options.new)
            figures["turn"].append(seconds)
            figures["rest"].append(first_token(llm, new_tokens(options.new))[0])
            prompts.append(prompt)
            tokens.append(token)
        figures["snapshot_bytes"] = sum(map(cache_block_bytes, states))
        blocks = llm.info()["prefix_cache"]["blocks"]
        figures["kept"] = max((blocks[group.name]["kept"] for group in states), default=0)
    return figures, prompts, tokens


if __name__ == "__main__":
    sys.exit(main())
