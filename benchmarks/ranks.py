"""One process of two threads beside ranks of one thread: prompts, decode steps, memory, and how long ranks wait.

    python benchmarks/ranks.py BUNDLE ... [--rounds 3] [--prompt 512] [--context 512] [--json FILE]

A round measures each way in a process of its own, one after the other; a ratio is the median of the rounds' ratios,
the ways of one round being compared. Memory is what all processes have together (PSS: a page that several share counts
once), with eight requests of the longest size in the KV cache.

The share of time for which rank 0 waits for the others is from `optimize bench --profile`, with 2 and 4 ranks. Where
there are fewer cores than ranks, they also wait for cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from peers.machine import commit, machine

from enginewright.optimizer.bench.measure import bench
from enginewright.optimizer.bench.options import BenchOptions
from enginewright.plugins.cpu.compile.meeting import meeting_seconds
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.threads import available_threads

WAYS = {"one process": ("tensor=1", 2), "tensor=2": ("tensor=2", 1), "pipeline=2": ("pipeline=2", 1)}
SHARES = ("tensor=2", "tensor=4")
BATCHES = (1, 16)


def measured(path: Path, way: str, prompt: int, context: int) -> dict[str, float]:
    """Tokens a second of one way, and its memory in bytes. Run in a process of its own."""
    text, threads = WAYS[way]
    how, bundle = Partition.parse(text), Bundle.open(path)
    options = BenchOptions("cpu", (prompt,), BATCHES, (context,), rounds=2, threads=threads, partition=how)
    result = bench(bundle, options)
    rates = {"prefill": result.prompts[0].tokens_per_second}
    for one in result.decodes:
        assert one.tokens_per_second is not None, one.omitted
        rates[f"decode_{one.batch}"] = one.tokens_per_second
    return rates | {"pss": float(pss_after_requests(path, text, threads, context))}


def pss_after_requests(path: Path, how: str, threads: int, context: int) -> int:
    """Bytes of this process and its children, once eight requests have run."""
    cut: dict[str, Any] = {} if how == "tensor=1" else {"partition": how}
    with LLM(path, threads=threads, memory=256 << 20, **cut) as llm:
        prompts = [[(7 * i + j) % llm.model.vocab_size for j in range(context)] for i in range(8)]
        llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
        return sum(map(pss, ["self", *children()]))


def pss(process: str) -> int:
    """Bytes of one process, of shared pages its part."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10


def children() -> list[str]:
    """The processes that this one has started, and theirs."""
    pids, next_ones = [], ["self"]
    while next_ones:
        tasks = Path(f"/proc/{next_ones.pop()}/task").glob("*/children")
        below = [pid for task in tasks for pid in task.read_text().split()]
        pids += below
        next_ones += below
    return pids


def waited(path: Path, how: str, prompt: int, context: int) -> dict[str, float]:
    """Gives the share of rank 0's steps that it waits for the others, by size."""
    partition = Partition.parse(how)
    options = BenchOptions(
        "cpu", (prompt,), BATCHES, (context,), rounds=1, threads=1, partition=partition, profile=True
    )
    profiles = bench(Bundle.open(path), options).profiles
    return {p.name: sum(line.part for line in p.by_op if line.name == "all_gather") for p in profiles}


def compare(path: Path, rounds: int, prompt: int, context: int) -> dict[str, Any]:
    """All figures of one bundle."""
    runs_of: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            call = [
                sys.executable,
                __file__,
                str(path),
                "--way",
                way,
                "--prompt",
                str(prompt),
                "--context",
                str(context),
            ]
            printed = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True).stdout
            runs_of[way].append(json.loads(printed.splitlines()[-1]))
            print(path.name, way, runs_of[way][-1], flush=True)
    ratios = {
        way: {
            what: median(b[what] / a[what] for a, b in zip(runs_of["one process"], runs, strict=True))
            for what in runs[0]
        }
        for way, runs in runs_of.items()
        if way != "one process"
    }
    shares = {how: waited(path, how, prompt, context) for how in SHARES}
    return {"bundle": path.name, "ways": runs_of, "ratios": ratios, "waited": shares}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints ratios and shares, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=WAYS, help="measure this one here")
    options = parser.parse_args(arguments)
    if options.way:
        print(json.dumps(measured(options.bundles[0], options.way, options.prompt, options.context)))
        return 0
    results = [compare(path, options.rounds, options.prompt, options.context) for path in options.bundles]
    meeting = meeting_seconds(2)
    for one in results:
        for way, ratios in one["ratios"].items():
            print(one["bundle"], way, *(f"{what} {ratio:.3f}" for what, ratio in ratios.items()))
        for how, shares in one["waited"].items():
            print(one["bundle"], how, "waits", *(f"{size}: {share:.1%}" for size, share in shares.items()))
    print(f"two ranks meet in {meeting * 1e6:.2f} us")
    if options.json:
        facts = {"commit": commit(), "machine": machine(), "cores": available_threads(), "meeting_seconds": meeting}
        sizes = {"prompt": options.prompt, "context": options.context, "rounds": options.rounds}
        options.json.write_text(json.dumps(facts | sizes | {"bundles": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
