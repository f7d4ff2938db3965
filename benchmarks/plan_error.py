"""The error of `optimize plan` against `optimize bench` on this machine: decode steps by batch and context, and
prompts.

    python benchmarks/plan_error.py BUNDLE ... [--rounds N] [--json FILE]
    python benchmarks/plan_error.py BUNDLE --links 1gbit,100mbit [--partitions tensor=2 pipeline=2] (as root)

In each round every bundle's kernels are timed as `optimize plan --gpu cpu` does it, steps are predicted, and then bench
runs: a machine that slows down slows both. Kernels are timed at sizes of their own (plugins/cpu/compile/plan.py): of
the grid's, only a batch of 1 is among their rows, and none of its contexts or prompts. A cell's error is the median of
the predictions over the median of what was measured, less 1.

With ``--links`` the bundle is cut into ranks of one thread. All but the first are in network namespaces of their own,
which a bridge joins; ``tc`` lets no more bytes a second through than the link has, each way. What `optimize plan
--partition ... --link 100mbit` predicts for one request is compared with what it takes: the first token of a prompt,
and each token after it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from enginewright.optimizer.bench.measure import bench, machine_facts
from enginewright.optimizer.bench.options import WARM_UP, BenchOptions
from enginewright.optimizer.plan.engine_seconds import engine_seconds
from enginewright.optimizer.plan.links import find_link
from enginewright.optimizer.plan.options import PlanOptions
from enginewright.optimizer.plan.planner import first_token_seconds
from enginewright.optimizer.plan.ranks import plan_ranks
from enginewright.plugins.cpu.compile.plan import decode, measure
from enginewright.plugins.cpu.serve.remote import RemoteExecutor
from enginewright.plugins.steps.planning import CountedSteps
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.open import target_groups
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.ranks.partition import Partition
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import counted

BATCHES, CONTEXTS, PROMPTS = (1, 4, 16), (64, 512, 2048), (128, 384)
STEPS, BENCH_ROUNDS = 24, 3
"""Enough steps that the first ones of a size, which run with the caches of the previous size, aren't its median."""
MEMORY = 3 << 30
PROMPT, LINK_PROMPTS = 512, 3
"""The tokens of a prompt that is measured over links, and the number of such prompts."""

Size = tuple[str, int, int]
"""decode, batch and context; or prompt, 1 and its tokens"""


@dataclass(frozen=True)
class Cell:
    """One size of one bundle: seconds in each round, and the median's error."""

    recipe: str
    what: str
    batch: int
    tokens: int
    predicted: list[float]
    measured: list[float]

    @property
    def error(self) -> float:
        """Gives the median's error."""
        return median(self.predicted) / median(self.measured) - 1


def predict(bundle: Bundle, threads: int) -> dict[Size, float]:
    """Seconds by size, from kernels that are timed now."""
    engine = partial(engine_seconds, bundle.program("cpu").cache_groups)
    model = measure(CountedSteps(bundle.program("cpu")), bundle.model.context_length, engine, threads)
    middle = 1 + WARM_UP + STEPS // 2
    decodes = {("decode", b, c): model.seconds(decode(b, c + middle)) for c in CONTEXTS for b in BATCHES}
    return decodes | {("prompt", 1, n): first_token_seconds(model, n, 0, n) for n in PROMPTS}


def run(bundle: Bundle, threads: int) -> dict[Size, float]:
    """Measures seconds by size with ``bench``. Raises what ``bench`` raises."""
    options = BenchOptions("cpu", PROMPTS, BATCHES, CONTEXTS, STEPS, BENCH_ROUNDS, threads, memory=MEMORY)
    result = bench(bundle, options)
    times: dict[Size, float] = {("prompt", 1, p.tokens): p.ttft.median for p in result.prompts if p.ttft}
    for d in result.decodes:
        assert d.step is not None, d.omitted
        times["decode", d.batch, d.context] = d.step.median
    return times


def compare(bundles: Sequence[Bundle], rounds: int, threads: int = 0) -> tuple[list[Cell], float]:
    """All cells, and the median of the seconds that a prediction takes."""
    cells: dict[tuple[str, Size], Cell] = {}
    seconds = []
    for _ in range(rounds):
        for bundle in bundles:
            recipe, start = str(bundle.manifest.recipe.get("name")), time.perf_counter()
            predicted = predict(bundle, threads)
            seconds.append(time.perf_counter() - start)
            measured = run(bundle, threads)
            for size in predicted:
                cell = cells.setdefault((recipe, size), Cell(recipe, *size, [], []))
                cell.predicted.append(predicted[size])
                cell.measured.append(measured[size])
    return list(cells.values()), median(seconds)


def median_error(cells: Sequence[Cell], what: str) -> float:
    """Gives the median of the sizes of errors."""
    return median(abs(cell.error) for cell in cells if cell.what == what)


class Namespaces:
    """Ranks as processes of this machine, behind links of a rate. See ``remote.Places``.

    Args:
        ranks: how many there are; the first is the calling process.
        bytes_per_second: what ``tc`` lets through to each other rank, and from it.

    Raises CalledProcessError where ``ip`` or ``tc`` refuse: root is needed.
    """

    def __init__(self, ranks: int, bytes_per_second: float) -> None:
        self.machines = tuple(f"10.211.0.{1 + rank}" for rank in range(ranks))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._names = [f"ewrank{rank}" for rank in range(1, ranks)]
        self._remove()
        # So much at once that the kernel's timer can keep the rate, and never less than two packets.
        burst = max(3200, int(bytes_per_second * 20e-6))
        limited = f"root tbf rate {int(bytes_per_second * 8)}bit burst {burst} latency 2s"
        _run("ip link add ewbridge type bridge")
        _run(f"ip addr add {self.machines[0]}/24 dev ewbridge")
        _run("ip link set ewbridge up")
        for name, address in zip(self._names, self.machines[1:], strict=True):
            inside = f"ip netns exec {name}"
            _run(f"ip netns add {name}")
            _run(f"ip link add {name} type veth peer name eth0 netns {name}")
            _run(f"ip link set {name} master ewbridge up")
            _run(f"{inside} ip addr add {address}/24 dev eth0")
            _run(f"{inside} ip link set eth0 up")
            _run(f"{inside} ip link set lo up")
            _run(f"tc qdisc add dev {name} {limited}")
            _run(f"{inside} tc qdisc add dev eth0 {limited}")

    def start(self, address: str) -> None:
        program = [sys.executable, "-m", "enginewright.plugins.cpu.serve.remote_rank", address]
        self._processes = [
            subprocess.Popen(["ip", "netns", "exec", name, *program, str(rank)])
            for rank, name in enumerate(self._names, 1)
        ]

    def ended(self, rank: int) -> str:
        code = self._processes[rank - 1].poll()
        return "" if code is None else f"has ended: {code}"

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._remove()

    def _remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", "ewbridge"], check=False, capture_output=True)


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def on_links(bundle: Bundle, how: Partition, link: str) -> Iterator[LLM]:
    """Opens a bundle on ranks of one thread, which such a link joins."""
    rated = find_link(link, None)
    assert rated is not None, "not this machine's memory"
    places = Namespaces(how.ranks, rated.bandwidth)
    try:
        needed = PROMPT + WARM_UP + STEPS + 1
        blocks = {g.name: 2 + -(-needed // g.block_size) for g in target_groups(bundle, "cpu", needed)}
        executor = RemoteExecutor(bundle, blocks, Placement(partition=how), places)
        with LLM.from_executor(executor, bundle.model, prefix_cache=False) as llm:
            yield llm
    finally:
        places.close()


def over_link(bundle: Bundle, how: Partition, link: str, seed: int) -> tuple[float, float]:
    """Seconds to the first token of a prompt, and between two tokens after it: medians of ``LINK_PROMPTS`` requests."""
    numbers = np.random.default_rng(seed)
    params = SamplingParams(max_tokens=1 + WARM_UP + STEPS, ignore_eos=True, temperature=1.0, seed=seed)
    first, after = [], []
    with on_links(bundle, how, link) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        for _ in range(LINK_PROMPTS):
            prompt = numbers.integers(0, bundle.model.vocab_size, PROMPT).tolist()
            times = [time.perf_counter()]
            times += [time.perf_counter() for _ in llm.stream(prompt, params)]
            first.append(times[1] - times[0])
            after += np.diff(times[2 + WARM_UP :]).tolist()
    return median(first), median(after)


def planned_over_link(path: Path, how: str, link: str) -> tuple[float, float]:
    """Predicts the two times of ``over_link`` as `optimize plan` does, from kernels that are timed now."""
    context = PROMPT + WARM_UP + STEPS // 2
    options = PlanOptions(partition=how, links=(link,), batches=(1,), context=context, prompt=PROMPT, threads=1)
    (plan,) = plan_ranks(path, options).plans
    (speed,) = plan.speeds
    assert speed.ttft is not None and speed.tpot is not None, "it fits"
    return speed.ttft, speed.tpot


def compare_links(path: Path, links: Sequence[str], partitions: Sequence[str], rounds: int) -> list[Cell]:
    """All cells; a cell's recipe is the partition and the link."""
    cells: dict[tuple[str, str], Cell] = {}
    bundle = Bundle.open(path)
    for seed in range(rounds):
        for link in links:
            for how in partitions:
                name = f"{how} over {link}"
                predicted = planned_over_link(path, how, link)
                measured = over_link(bundle, Partition.parse(how), link, seed)
                for what, ours, real in zip(("prompt", "decode"), predicted, measured, strict=True):
                    tokens = PROMPT if what == "prompt" else PROMPT + WARM_UP + STEPS // 2
                    cell = cells.setdefault((name, what), Cell(name, what, 1, tokens, [], []))
                    cell.predicted.append(ours)
                    cell.measured.append(real)
                print(name, *(f"{p * 1e3:.1f} {m * 1e3:.1f} ms" for p, m in zip(predicted, measured, strict=True)))
    return list(cells.values())


def table(cells: Sequence[Cell]) -> list[str]:
    """Formats the table of benchmarks/notes/cpu.md."""
    lines = ["| recipe | step | predicted | measured | error |", "| --- | --- | ---: | ---: | ---: |"]
    for c in cells:
        many = f"{counted(c.batch, 'request')} at {c.tokens:,} tokens"
        what = many if c.what == "decode" else f"prompt of {c.tokens}"
        error = f"{c.error:+.1%}".replace("%", " %").replace("-", "−")
        times = f"{median(c.predicted) * 1e3:.2f} ms | {median(c.measured) * 1e3:.2f} ms"
        lines.append(f"| `{c.recipe}` | {what} | {times} | {error} |")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the table, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", help="with the target cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--links", default="", help="rates with commas between them; makes network namespaces (root)")
    parser.add_argument("--partitions", nargs="+", default=["tensor=2", "pipeline=2", "tensor=2,pipeline=2"])
    options = parser.parse_args(arguments)
    bundles = [Bundle.open(path) for path in options.bundles]
    if options.links:
        began = time.perf_counter()
        cells = compare_links(options.bundles[0], options.links.split(","), options.partitions, options.rounds)
        seconds = time.perf_counter() - began
    else:
        cells, seconds = compare(bundles, options.rounds, options.threads)
    print("\n".join(table(cells)))
    medians = {what: median_error(cells, what) for what in ("decode", "prompt")}
    for what, error in medians.items():
        print(f"{what}: {error:.1%} median error")
    if options.json:
        facts = {
            "model": bundles[0].model.name,
            "machine": machine_facts(),
            "threads": options.threads,
            "steps": STEPS,
            "bench_rounds": BENCH_ROUNDS,
            "rounds": options.rounds,
            "seconds" if options.links else "seconds_of_a_prediction": round(seconds, 1),
            "median_error": {what: round(error, 4) for what, error in medians.items()},
            "cells": [asdict(c) | {"error": round(c.error, 4)} for c in cells],
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
