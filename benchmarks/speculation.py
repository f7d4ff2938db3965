"""What computing likely tokens ahead gives: decoding speed with ``LLM(speculate="lookup")`` over plain decoding.

    python benchmarks/speculation.py BUNDLE [--rounds 5] [--tokens 128] [--json FILE]

Tasks: "copy" has the model repeat a text, "edit" repeat it with a word changed, "code" continue code that repeats
itself, "chat" write freely; "useless" is random text, in which nothing repeats itself but by chance. One request each,
then eight of "chat" together. Each round has both in turn; the ratio is of one round's decoding times (from the first
new token to the last), the median counts. Tokens and log-probabilities are compared: they must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from peers.machine import machine

from enginewright import LLM, SamplingParams

TEXT = (
    "The harbour of Saint-Malo lies behind granite walls. In 1534 Jacques Cartier left it with two ships and sixty-one "
    "men, and reached the coast of Newfoundland after twenty days. We shall find a passage, he wrote, or we shall find "
    "that there is none. What he found was a river, wide as a sea, and people who called their village kanata."
)
CODE = """class Vector:
    def __init__(self, x, y, z):
        self.x = x
        self.y = y
        self.z = z

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y, self.z + other.z)

    def __sub__(self, other):
        return Vector(self.x - other.x, self.y - other.y, self.z - other.z)

    def __mul__(self, other):
"""
TASKS: Mapping[str, str] = {
    "copy": f"Repeat this text exactly.\n\n{TEXT}\n\nThe text again:\n\n{TEXT[:60]}",
    "edit": f"Replace every 'the' by 'a' in this text.\n\n{TEXT}\n\nThe new text:\n\n{TEXT[:60].replace('The', 'A')}",
    "code": CODE,
    "chat": "Write a short story about a lighthouse keeper and a storm.\n\n",
}
TOGETHER = 8


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints a table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args(arguments)
    common: dict[str, Any] = {"threads": options.threads, "prefix_cache": False, "memory": "512MiB"}
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, logprobs=0)
    found: dict[str, Any] = {}
    with LLM(options.bundle, **common) as plain, LLM(options.bundle, speculate="lookup", **common) as ahead:
        prompts: dict[str, list[Any]] = {name: [text] for name, text in TASKS.items()}
        prompts["useless"] = [np.random.default_rng(0).integers(10, plain.model.vocab_size, 256).tolist()]
        prompts[f"chat, {TOGETHER} together"] = [f"{TASKS['chat']}{i}. " for i in range(TOGETHER)]
        for name, several in prompts.items():
            for temperature in (0.0, 0.8):
                one = replace(params, temperature=temperature, seed=1)
                rounds = [measured(plain, ahead, several, one) for _ in range(options.rounds)]
                figures = {key: median(r[key] for r in rounds) for key in rounds[0]}
                found[f"{name}, temperature {temperature}"] = figures
                share = f"{figures['accepted']:.0f} of {figures['drafted']:.0f} accepted"
                speed = f"{figures['ratio']:>5.2f} times, {figures['tokens_per_second']:,.0f} tokens/s"
                print(f"{name:<18} {temperature}: {speed}; {share}", flush=True)
    if options.json:
        results = json.loads(options.json.read_text()) if options.json.exists() else {}
        results[options.bundle.name] = {
            "rounds": options.rounds,
            "tokens": options.tokens,
            "machine": machine(),
            "tasks": found,
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def measured(plain: LLM, ahead: LLM, prompts: list[Any], params: SamplingParams) -> dict[str, float]:
    """One round: the ratio, and of the speculating one tokens a second, drafted and accepted."""
    seconds, results = [], []
    for llm in (plain, ahead):
        time.sleep(0.2)  # threads of the other sleep by then
        outputs = llm.generate(prompts, params)
        last = max(output.metrics.last_token or 0.0 for output in outputs)
        seconds.append(last - max(output.metrics.first_token or 0.0 for output in outputs))
        results.append(outputs)
    assert results[0] == results[1], "speculation changed a token or a log-probability"
    tokens = sum(len(output.token_ids) - 1 for output in results[1])
    found = {"ratio": seconds[0] / seconds[1], "tokens_per_second": tokens / seconds[1]}
    found["drafted"] = float(sum(output.metrics.drafted for output in results[1]))
    return found | {"accepted": float(sum(output.metrics.accepted for output in results[1]))}


if __name__ == "__main__":
    sys.exit(main())
