"""Compares our speed with llama.cpp's on this machine: same weights, same prompts, in turns.

    python benchmarks/bench.py [--formats int8 f32] [--rounds 5] [--threads 2] [--json results.json]

SmolLM2-135M-Instruct is exported with the recipes f32, bf16 and int8, and written as F32, BF16 and Q8_0 GGUF for
llama.cpp: equal bits a weight, head included. Engines take turns, each run in a process of its own; the figures are
medians over the rounds, and what counts is the ratio of the two of one format. The share is of the read bandwidth
measured in the same run: decoding one token reads every weight of every linear once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from workload import Speeds, Workload

import enginewright
from enginewright.plugins.cpu import _cpu
from enginewright.runtime.bundle.reader import Bundle

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "bench"
BANDWIDTH_BYTES = 1 << 30
FIGURES = ("prefill", "decode_1", "decode_batch")
FORMATS = {"f32": "F32", "bf16": "BF16", "int8": "Q8_0"}
"""A recipe of ours, and the type of the same bits a weight in GGUF."""


@dataclass(frozen=True)
class Contender:
    """An engine with a model. ``weight_bytes``: what one decode step reads of the weights; ``format``: our recipe."""

    name: str
    format: str
    worker: str
    model: Path
    weight_bytes: int


def main() -> None:
    """Prepares the models, runs the rounds, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=int, default=Workload.prompt, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=Workload.steps, help="tokens decoded")
    parser.add_argument("--json", type=Path, default=BUILD / "result.json", help="where the result goes")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="weights to compare with")
    arguments = parser.parse_args()

    work = Workload(prompt=arguments.prompt, steps=arguments.steps, threads=arguments.threads)
    contenders = prepare(arguments.formats)
    runs: dict[str, list[Speeds]] = {contender.name: [] for contender in contenders}
    bandwidths = []
    for index in range(arguments.rounds):
        bandwidths.append(_cpu.measure_bandwidth(BANDWIDTH_BYTES, work.threads))
        for contender in contenders:
            speeds = run(contender, replace(work, seed=index))
            runs[contender.name].append(speeds)
            print(f"round {index + 1}, {contender.name}: {speeds}", file=sys.stderr)
    result = summarize(work, contenders, runs, statistics.median(bandwidths))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print_table(result)
    print(f"\n{arguments.json}")


def prepare(formats: list[str]) -> list[Contender]:
    """Makes the bundles, and the GGUF files that are not there yet, in build/bench; ours comes first in each format."""
    BUILD.mkdir(parents=True, exist_ok=True)
    source = load_module("fetch_smollm2", HERE.parent / "examples" / "fetch_smollm2.py").fetch()
    convert_gguf = load_module("convert_gguf", HERE / "convert_gguf.py").convert_gguf
    contenders = []
    for recipe in formats:
        bundle = BUILD / f"smollm2-{recipe}.bundle"
        enginewright.export(source, bundle, recipe=recipe, overwrite=True)
        kind = FORMATS[recipe]
        peer = BUILD / f"smollm2-{kind.lower()}.gguf"
        if not peer.exists():
            convert_gguf(source, peer, kind)
        read = linear_bytes(bundle)
        contenders.append(Contender(f"enginewright {recipe}", recipe, "ours.py", bundle, read))
        contenders.append(Contender(f"llama.cpp {kind}", recipe, "peer_llama_cpp.py", peer, read))
    return contenders


def linear_bytes(bundle: Path) -> int:
    """Bytes of all weights that the linears of the program read, each once."""
    opened = Bundle.open(bundle)
    steps = [s for s in opened.program("cpu").steps if s.op in ("linear", "quantized_linear")]
    used = {o.name for s in steps for o in s.inputs if o.kind == "weight"}
    return sum(opened.tensor(name).bytes for name in used)


def run(contender: Contender, work: Workload) -> Speeds:
    """One run in a process of its own, so that no engine's threads or memory are in another's way."""
    command = [sys.executable, str(HERE / contender.worker), str(contender.model), json.dumps(asdict(work))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Speeds(**json.loads(done.stdout.splitlines()[-1]))


def summarize(
    work: Workload, contenders: list[Contender], runs: dict[str, list[Speeds]], bandwidth: float
) -> dict[str, Any]:
    """Medians; ``ratio`` is ours over theirs; ``bandwidth_share`` is of reading the weights once a step."""
    medians = {n: {f: statistics.median(getattr(s, f) for s in runs[n]) for f in FIGURES} for n in runs}
    ours = {c.format: medians[c.name] for c in reversed(contenders)}  # of a format the first stays
    rows = []
    for contender in contenders:
        figures = medians[contender.name]
        rows.append(
            {
                "name": contender.name,
                "format": contender.format,
                "engine": runs[contender.name][0].engine,
                "tokens_per_second": figures,
                "ratio": {f: ours[contender.format][f] / figures[f] for f in FIGURES},
                "bandwidth_share": contender.weight_bytes * figures["decode_1"] / (bandwidth * 1e9),
                "runs": [asdict(s) for s in runs[contender.name]],
            }
        )
    machine = {"processor": processor(), "cores": os.cpu_count(), "bandwidth_gb_per_second": bandwidth}
    measured = {"date": date.today().isoformat(), "commit": commit(), "command": " ".join(sys.argv)}
    return {"measured": measured, "machine": machine, "workload": asdict(work), "results": rows}


def print_table(result: dict[str, Any]) -> None:
    """The medians as people read them; after each figure of a peer, ours of the same format over it."""
    work = result["workload"]
    headings = (f"prefill {work['prompt']}", "decode, 1 request", f"decode, {work['batch']} requests")
    table = Table("tokens/s", box=None)
    for heading in (*headings, "share of bandwidth (1 request)"):
        table.add_column(heading, justify="right")
    for row in result["results"]:
        cells = [f"{row['tokens_per_second'][f]:,.1f}" for f in FIGURES]
        if not row["name"].startswith("enginewright"):
            cells = [f"{cell} ({row['ratio'][f]:.2f}x)" for cell, f in zip(cells, FIGURES, strict=True)]
        table.add_row(row["name"], *cells, f"{row['bandwidth_share']:.0%}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    machine = result["machine"]
    console.print(
        f"{machine['processor']}, {work['threads']} threads, reads {machine['bandwidth_gb_per_second']:.1f} GB/s; "
        "in parentheses ours over theirs",
        soft_wrap=True,
    )


def commit() -> str:
    """What was measured: the commit, with -dirty if files differ from it; empty outside of a clone."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True).stdout.strip()


def processor() -> str:
    """The processor's name, as the system has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load_module(name: str, path: Path) -> Any:
    """A Python file outside of the packages, as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
