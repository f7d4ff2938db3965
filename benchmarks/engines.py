"""Every target that runs here, side by side: the same model, the same weights, one table.

    python benchmarks/engines.py MODEL.gguf FOLDER [--rounds 3] [--json FILE] [--page docs/inside/engines.md]

Exports two bundles of 32-bit floats into FOLDER, if they aren't there: one with every target that runs on a CPU, and
one whose tvm and stablehlo call this project's kernels. Then each target, and each file of the onnx target, is measured
in a process of its own, in turn: a prompt of 512 tokens, decoding of 1, 8 and 16 requests, the time from nothing to a
first token, and memory; and transformers' eager. The best round of each counts: in the first one XLA compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from peers.machine import commit, machine
from peers.processes import Command, run
from peers.workload import Workload

CONTEXT = 639
RECIPE = f"""
name = "engines"
description = "32-bit floats, with buckets for the targets that want them."
[weights]
default = {{ storage = "f32" }}
[kv_cache]
dtype = "f32"
[buckets]
tokens = [32, 128, 512]
batch = [1, 8, 16]
[engines]
context = {CONTEXT}
"""
OURS = """
[tvm]
kernels = "enginewright"
[stablehlo]
kernels = "enginewright"
"""
TARGETS = ("cpu", "onnx", "tvm", "stablehlo")
ROWS = (
    ("cpu", "all", "cpu", None),
    ("onnx, standard operators", "all", "onnx", "standard"),
    ("onnx, contrib operators", "all", "onnx", "contrib"),
    ("onnx, our kernels", "all", "onnx", "kernels"),
    ("tvm", "all", "tvm", None),
    ("tvm, our kernels", "ours", "tvm", None),
    ("stablehlo", "all", "stablehlo", None),
    ("stablehlo, our kernels", "ours", "stablehlo", None),
)
EAGER = "transformers, eager"
PACKAGES = {"onnx": ("onnxruntime",), "tvm": ("apache-tvm", "apache-tvm-ffi"), "stablehlo": ("jaxlib",)}
FIGURES = ("prefill", "decode_1", "decode_8", "decode_16")


def main(arguments: list[str] | None = None) -> int:
    """Exports, measures, prints, and writes the figures and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path, help="where the bundles are, or go")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="where the figures go; exports measured before are kept")
    parser.add_argument("--page", type=Path, help="where the page goes")
    parser.add_argument("--eager", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.eager:
        return of_eager(options)
    figures: dict[str, Any] = {}
    if options.json and options.json.exists():
        figures = json.loads(options.json.read_text(encoding="utf-8"))
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, recipe, targets in (("all", RECIPE, TARGETS), ("ours", RECIPE + OURS, ("tvm", "stablehlo"))):
        if not (options.folder / f"{name}.bundle").exists():
            figures.setdefault("exports", {})[name] = exported(options, name, recipe, targets)
    figures["rows"] = measured(options)
    figures["packages"] = {target: sum(map(size_of_package, names)) for target, names in PACKAGES.items()}
    figures |= {"machine": machine(), "commit": commit(), "rounds": options.rounds, "threads": options.threads}
    text = page(figures)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if options.page:
        options.page.write_text(text, encoding="utf-8")
    return 0


def exported(options: argparse.Namespace, name: str, recipe: str, targets: tuple[str, ...]) -> dict[str, Any]:
    """Seconds and the most memory of an export in a process of its own, and the size of each target's files."""
    path = options.folder / f"{name}.toml"
    path.write_text(recipe, encoding="utf-8")
    bundle = options.folder / f"{name}.bundle"
    command = [str(Path(sys.executable).parent / "optimize"), "export", str(options.model), "--recipe", str(path)]
    start = time.perf_counter()
    subprocess.run(
        [*command, "--output", str(bundle), *(part for t in targets for part in ("--target", t))],
        check=True,
        stdout=sys.stderr,
    )
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    sizes = {part.name: size_of(part) for part in sorted(bundle.iterdir()) if part.is_dir()}
    sizes |= {f"targets/{part.name}": size_of(part) for part in sorted((bundle / "targets").glob("*"))}
    return {"seconds": seconds, "peak_bytes": peak, "bytes": size_of(bundle), "folders": sizes}


def measured(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Each row's best of all rounds: tokens a second, seconds to a first token, and the most memory."""
    found: dict[str, dict[str, float]] = {}
    for index in range(options.rounds):
        rows = [*ROWS, (EAGER, "", "", None)]
        for name, bundle, target, variant in rows[index % len(rows) :] + rows[: index % len(rows)]:
            figures = eager(options) if not target else of_target(options, bundle, target, variant)
            print(index, name, {key: round(value, 2) for key, value in figures.items()}, file=sys.stderr, flush=True)
            best = found.setdefault(name, figures)
            for key, value in figures.items():
                best[key] = (max if key in FIGURES else min)(best[key], value)
    return {name: found[name] for name in [*(row[0] for row in ROWS), EAGER]}


def of_target(options: argparse.Namespace, bundle: str, target: str, variant: str | None) -> dict[str, float]:
    """Through our engine, a step at a time."""
    path = options.folder / f"{bundle}.bundle"
    command = Command(Path(sys.executable), "ours")
    work = Workload(threads=options.threads, target=target, variant=variant, context=CONTEXT)
    report = run(command.line("speed", path, work))
    figures = dict(report.figures) | {"peak": float(report.bytes["peak"])}
    if variant in (None, "standard"):  # LLM takes the fastest file
        start = [sys.executable, "-m", "peers.processes", "1", *command.bare("start", path, work)]
        figures["start"] = run(start).figures["start"]
    return figures


def eager(options: argparse.Namespace) -> dict[str, float]:
    """transformers, in a process of its own."""
    command = [sys.executable, __file__, str(options.model), str(options.folder), "--eager"]
    done = subprocess.run([*command, "--threads", str(options.threads)], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def of_eager(options: argparse.Namespace) -> int:
    """What ``eager`` starts."""
    import stablehlo
    from peers.workload import memory

    found = stablehlo.of_transformers(options.model, options.threads)
    print(json.dumps(found | {"peak": memory("VmHWM")}))
    return 0


def size_of(folder: Path) -> int:
    """Bytes of all files under it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def size_of_package(name: str) -> int:
    """Bytes of an installed package's files."""
    files = metadata.files(name) or []
    return sum(path.stat().st_size for file in files if (path := Path(str(file.locate()))).is_file())


def page(figures: Mapping[str, Any]) -> str:
    """docs/inside/engines.md."""
    mebi = 2.0**20
    rows = []
    for name, of in figures["rows"].items():
        start = f"{of['start']:.2f}" if "start" in of else ""
        speeds = " | ".join(f"{of[key]:,.0f}" if of[key] >= 100 else f"{of[key]:.1f}" for key in FIGURES)
        rows.append(f"| {name} | {speeds} | {start} | {of['peak'] / mebi:,.0f} |")
    exports = [
        f"| {name} | {of['seconds']:,.0f} | {of['peak_bytes'] / mebi:,.0f} | {of['bytes'] / mebi:,.0f} |"
        for name, of in figures.get("exports", {}).items()
    ]
    packages = ", ".join(f"{target} {size / mebi:,.0f} MiB" for target, size in figures["packages"].items())
    return f"""# All engines, one table

SmolLM2-135M with the same 32-bit floats as weights and KV cache, {figures["threads"]} threads on
{figures["machine"]["processor"]}: tokens a second of a prompt of 512 tokens and of decoding 1, 8 and 16 requests,
seconds from nothing to a first token, and the process's largest memory. The best of {figures["rounds"]} rounds in
turn, by `python benchmarks/engines.py MODEL.gguf FOLDER --page docs/inside/engines.md`.

| engine | prompt 512 | decode 1 | 8 | 16 | first token, s | memory, MiB |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(rows)}

| export | seconds | most memory, MiB | bundle, MiB |
| --- | ---: | ---: | ---: |
{chr(10).join(exports)}

"all" has {", ".join(TARGETS)} from one command; "ours" is tvm and stablehlo with this project's kernels. What an
engine needs besides this project: {packages}. cuda, tensorrt and tensorrt-rtx are built here and run nowhere yet;
torch's AOTInductor isn't measured.

Which one is for whom: **cpu** is the fastest here and promises the same bits in any batch. **onnx** runs where
onnxruntime is and nothing else may be installed. **tvm** is one library of machine code for each level of x86-64,
without our kernels too. **stablehlo** is for whoever has XLA: one artifact for any PJRT plugin.
"""


if __name__ == "__main__":
    sys.exit(main())
