"""The gain of the prefix cache: time to the first token of a prompt whose beginning is known, in memory or on disk.

    python benchmarks/prefix_cache.py BUNDLE [--prompt 4096] [--shared 4000] [--rounds 5] [--peers int8] [--json FILE]

Each round takes a new beginning of random tokens, and times to the first token:

- cold: a prompt of which nothing is known;
- hit: another prompt with the same beginning, which the memory has;
- disk: a third one, in a new process that begins with the folder that this one wrote (the model is open already);
- rest: a prompt of as many tokens as the hit had to compute, alone: what no cache could avoid.

All first tokens are compared with those of a model that keeps nothing. Then an agent's conversation (``peers.agent``)
with the cache and without. ``--peers`` has llama.cpp and OpenVINO GenAI hold the same conversation, in turn with ours,
with SmolLM2 in a format of as many bits; BUNDLE must be that model. Whose answers the cache changed is counted.

    python benchmarks/prefix_cache.py BUNDLE --turns FILE.gguf [--context 4000] [--json FILE]

times nothing but an agent's turns (``peers.turns``), at `optimize serve` with BUNDLE and at llama.cpp's server with the
GGUF file that BUNDLE is exported from. Both run at the same time, and answer the same prompts one after the other: the
first one, of which nothing is known, 20 turns of 64 new tokens, and as many prompts of 64 tokens alone.
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
from peers.agent import Conversation, english
from peers.engines import FORMATS, OURS
from peers.machine import machine
from peers.prepare import Asked, prepare
from peers.processes import Command, WorkerError, run
from peers.servers import LLAMA_SERVER, Serving, ready
from peers.turns import Turns, measure, shown
from peers.workload import Workload

from enginewright import LLM, SamplingParams

FIRST = SamplingParams(max_tokens=1, ignore_eos=True)
WARM = 600
"""Tokens of a first prompt, which nobody times: memory and threads are there after it."""
TEXT = 30_000
"""Characters that the agent's conversation is cut from."""

TOTALS = ("with", "without")


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
    parser.add_argument("--peers", choices=FORMATS, help="other engines too, with weights of this format")
    parser.add_argument(
        "--turns", type=Path, metavar="FILE.gguf", help="time an agent's turns beside llama.cpp's server"
    )
    parser.add_argument("--context", type=int, default=Turns.context, help="tokens of the first prompt of --turns")
    parser.add_argument("--disk", nargs=2, metavar=("FOLDER", "PROMPT"), help=argparse.SUPPRESS)
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    if options.disk is not None:
        print(json.dumps(from_disk(options)))
        return 0
    if options.turns is not None:
        return agents_turns(options)
    rounds = [one_round(options, seed) for seed in range(options.rounds)]
    figures = {name: [r[name] for r in rounds] for name in ("cold", "hit", "disk", "rest")}
    print(f"{options.prompt} tokens, {options.shared} of them shared; milliseconds to the first token")
    for name, seconds in figures.items():
        share = median(s / c for s, c in zip(seconds, figures["cold"], strict=True))
        print(f"{name:<6}{median(seconds) * 1e3:>10.1f}   {share:>7.1%} of cold")
    assert all(r["same"] for r in rounds), "a first token differs"
    agents = conversations(options)
    for name, talks in agents.items():
        first, seconds = (median(r[a] / r[b] for r in talks) for a, b in (("first_with", "first_without"), TOTALS))
        print(
            f"agent, {name:<14}{median(r['with'] for r in talks):>8.2f} s, first tokens "
            f"{median(r['first_with'] for r in talks):>6.2f} s: {seconds:.1%} and {first:.1%} of what it takes without "
            f"the cache, which changed {max(r['changed'] for r in talks):.0f} of {talks[0]['turns']:.0f} answers"
        )
    assert not any(r["changed"] for r in agents[OURS]), "the cache changed a token"
    if options.json:
        result = {
            "workload": [options.bundle.name, *words[1:]],
            "machine": machine(),
            "seconds_to_first_token": figures,
            "agent": agents,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def agents_turns(options: argparse.Namespace) -> int:
    """Measures an agent's turns next to llama.cpp's server, prints the figures and writes them."""
    if (why := ready(LLAMA_SERVER, lambda text: print(text, file=sys.stderr))) is not None:
        print(f"{LLAMA_SERVER}: {why}", file=sys.stderr)
        return 1
    turns = Turns(context=options.context)
    serving = Serving(options.bundle, options.turns, options.threads, 1, turns.longest)
    result = measure([OURS, LLAMA_SERVER], serving, turns)
    print(f"{turns.turns} turns of {turns.new} new tokens after {turns.context}, cut at odd places")
    print("\n".join(shown(result, OURS)))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    return 0


def opened(options: argparse.Namespace, **more: Any) -> LLM:
    """The model, with a cache for the longest prompts."""
    return LLM(options.bundle, threads=options.threads, memory=options.memory, speculate=None, **more)


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, tuple[int, ...]]:
    """Seconds, and the token."""
    start = time.perf_counter()
    (result,) = llm.generate([prompt], FIRST)
    return time.perf_counter() - start, result.token_ids


def one_round(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Measures one round: cold, hit, disk and rest, as the module describes them."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        with opened(options, prefix_folder=Path(folder) / "kept") as llm:
            most = llm.model.vocab_size
            shared = rng.integers(10, most, options.shared).tolist()
            ends = [rng.integers(10, most, options.prompt - options.shared).tolist() for _ in range(4)]
            first_token(llm, rng.integers(10, most, min(WARM, options.prompt)).tolist())
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
    """Measures, in the new process, seconds to the first token, and that."""
    folder, prompt = options.disk
    ids = json.loads(prompt)
    with opened(options, prefix_folder=folder) as llm:
        first_token(llm, np.random.default_rng(99).integers(10, llm.model.vocab_size, min(WARM, len(ids))).tolist())
        seconds, token = first_token(llm, ids)
        assert llm.info()["prefix_cache"]["from_disk"] > 0, "nothing was read"
    return seconds, list(token)


def conversations(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Gives of each engine the figures of each round; another engine begins each round."""
    commands = {OURS: (Command(Path(sys.executable), "ours"), options.bundle.resolve())}
    if options.peers:
        selection = Asked(["smollm2"], [options.peers], ["llama.cpp", "openvino"])
        for peer in prepare(selection, lambda text: print(text, file=sys.stderr))[0]:
            commands[peer.engine] = (peer.command, peer.path)
    with opened(options) as llm:
        talk = Conversation.of_text(llm.tokenizer.encode(english()[:TEXT]))
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        talk.write(Path(folder) / "conversation.json")
        work = Workload(threads=options.threads, conversation=str(Path(folder) / "conversation.json"))
        for index in range(options.rounds):
            names = list(commands)
            for name in names[index % len(names) :] + names[: index % len(names)]:
                command, model = commands[name]
                try:
                    figures[name].append(dict(run(command.line("agent", model, work)).figures))
                except WorkerError as e:  # a peer may crash; ours may not
                    if name == OURS:
                        raise
                    print(f"{name}, round {index}: {e}", file=sys.stderr)
    return {name: rounds for name, rounds in figures.items() if rounds}


if __name__ == "__main__":
    sys.exit(main())
