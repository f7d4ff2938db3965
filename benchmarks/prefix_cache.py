"""What the prefix cache gives: time to the first token of a prompt whose beginning is known, in memory or on disk.

    python benchmarks/prefix_cache.py BUNDLE [--prompt 4096] [--shared 4000] [--rounds 5] [--json FILE]

Each round takes a new beginning of random tokens, and times to the first token:

- cold: a prompt of which nothing is known;
- hit: another prompt with the same beginning, which the memory has;
- disk: a third one, in a new process that begins with the folder that this one wrote (the model is open already);
- rest: a prompt of as many tokens as the hit had to compute, alone: what no cache could avoid.

All first tokens are compared with those of a model that keeps nothing. Then an agent: a long system prompt, a
conversation that grows, results of tools that come back; the whole of it with the cache and without.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from enginewright import LLM, SamplingParams

FIRST = SamplingParams(max_tokens=1, ignore_eos=True)
TURNS = 12
SYSTEM, TOOL, ANSWER = 1500, 220, 48
"""Tokens of the agent's system prompt, of what a tool gives back, and of each of its answers."""


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints a table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--shared", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--memory", default="2GiB")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--disk", nargs=2, metavar=("FOLDER", "PROMPT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.disk is not None:
        print(json.dumps(from_disk(options)))
        return 0
    rounds = [one_round(options, seed) for seed in range(options.rounds)]
    figures = {name: [r[name] for r in rounds] for name in ("cold", "hit", "disk", "rest")}
    print(f"{options.prompt} tokens, {options.shared} of them shared; milliseconds to the first token")
    for name, seconds in figures.items():
        share = median(s / c for s, c in zip(seconds, figures["cold"], strict=True))
        print(f"{name:<6}{median(seconds) * 1e3:>10.1f}   {share:>7.1%} of cold")
    assert all(r["same"] for r in rounds), "a first token differs"
    trace = {name: agent(options, prefix_cache=on) for name, on in (("without", False), ("with", True))}
    assert trace["with"]["tokens"] == trace["without"]["tokens"], "the cache changed a token"
    for name, found in trace.items():
        print(f"agent, {name:<8}{found['seconds']:>8.2f} s, to first tokens {found['first']:>7.2f} s")
    if options.json:
        for found in trace.values():
            del found["tokens"]
        result = {"workload": sys.argv[1:], "seconds_to_first_token": figures, "agent": trace}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def opened(options: argparse.Namespace, **more: Any) -> LLM:
    """The model, with a cache for the longest prompts."""
    return LLM(options.bundle, threads=options.threads, memory=options.memory, **more)


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, tuple[int, ...]]:
    """Seconds, and the token."""
    start = time.perf_counter()
    (result,) = llm.generate([prompt], FIRST)
    return time.perf_counter() - start, result.token_ids


def one_round(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """See the module."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        with opened(options, prefix_folder=Path(folder) / "kept") as llm:
            most = llm.model.vocab_size
            shared = rng.integers(10, most, options.shared).tolist()
            ends = [rng.integers(10, most, options.prompt - options.shared).tolist() for _ in range(4)]
            first_token(llm, rng.integers(10, most, 600).tolist())  # memory and threads are there
            cold, one = first_token(llm, shared + ends[0])
            hit, two = first_token(llm, shared + ends[1])
            rest, _ = first_token(llm, ends[3])
        command = [sys.executable, __file__, str(options.bundle), "--threads", str(options.threads)]
        command += ["--memory", options.memory, "--disk", str(Path(folder) / "kept"), json.dumps(shared + ends[2])]
        disk, three = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    with opened(options, prefix_cache=False) as llm:
        plain = [list(first_token(llm, shared + end)[1]) for end in ends[:3]]
    return {"cold": cold, "hit": hit, "disk": disk, "rest": rest, "same": plain == [list(one), list(two), three]}


def from_disk(options: argparse.Namespace) -> tuple[float, list[int]]:
    """In the new process: seconds to the first token, and that."""
    folder, prompt = options.disk
    ids = json.loads(prompt)
    with opened(options, prefix_folder=folder) as llm:
        first_token(llm, np.random.default_rng(99).integers(10, llm.model.vocab_size, 600).tolist())
        seconds, token = first_token(llm, ids)
        assert llm.info()["prefix_cache"]["from_disk"] > 0, "nothing was read"
    return seconds, list(token)


def agent(options: argparse.Namespace, *, prefix_cache: bool) -> dict[str, Any]:
    """A conversation of TURNS turns: seconds in all, and to the first tokens; and the tokens."""
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    with opened(options, prefix_cache=prefix_cache) as llm:
        text = rng.integers(10, llm.model.vocab_size, SYSTEM).tolist()
        seconds, first, tokens = 0.0, 0.0, []
        for _ in range(TURNS):
            text = text + rng.integers(10, llm.model.vocab_size, TOOL).tolist()
            start = time.perf_counter()
            (result,) = llm.generate([text], params)
            seconds += time.perf_counter() - start
            first += (result.metrics.first_token or 0.0) - result.metrics.queued
            tokens.append(result.token_ids)
            text = text + list(result.token_ids)
    return {"seconds": seconds, "first": first, "tokens": tokens}


if __name__ == "__main__":
    sys.exit(main())
