"""Every target side by side: the same model, the same weights, one table.

    python benchmarks/engines.py MODEL.gguf FOLDER --json FILE [--rounds 2] [--minutes 5] [--page PAGE.md]

Exports a bundle of 32-bit floats for each target into FOLDER, with this project's kernels in it where it may call
them, and one with all targets, each in a process of its own; and compiles the model's steps by torch's AOTInductor.
Then what runs on a CPU is measured, each in a process of its own, in turn: a prompt of 512 tokens, decoding of 1, 8 and
16 requests, the time from nothing to a first token, and memory; and transformers' eager. The best round of each counts:
in the first one XLA compiles. What is in FILE is kept, so that a run that --minutes ended goes on when started again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

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
ONNX = """
[onnx]
contrib = true
kernels = true
"""
IREE = """
[stablehlo]
iree = ["v4"]
"""
OURS = """
[{}]
kernels = "enginewright"
"""
EXPORTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "cpu": ("", ("cpu",)),
    "onnx": (ONNX, ("onnx",)),
    "tvm": ("", ("tvm",)),
    "tvm, our kernels": (OURS.format("tvm"), ("tvm",)),
    "stablehlo": ("", ("stablehlo",)),
    "stablehlo, our kernels": (OURS.format("stablehlo"), ("stablehlo",)),
    "stablehlo, IREE": (IREE, ("stablehlo",)),
    "cuda": ("", ("cuda",)),
    "tensorrt": ("", ("tensorrt",)),
    "tensorrt-rtx": ("", ("tensorrt-rtx",)),
    "all": (ONNX + IREE, ("cpu", "onnx", "tvm", "stablehlo", "cuda", "tensorrt", "tensorrt-rtx")),
}
"""The recipe's additional text, and the targets of a bundle."""

NOT_MEASURED = {
    "cuda": "needs a GPU: [an H100's figures](../../docs/build/cuda.md#on-an-h100)",
    "tensorrt": "built only: no GPU has run it",
    "tensorrt-rtx": "built only: no GPU has run it",
}


class Row(NamedTuple):
    """A bundle to measure, in one variant, or another script that measures."""

    name: str
    bundle: str
    variant: str | None = None
    provider: str | None = None
    start: bool = True


ROWS = (
    Row("cpu", "cpu"),
    Row("onnx, standard operators", "onnx", "standard", start=False),  # LLM takes the fastest file
    Row("onnx, contrib operators", "onnx", "contrib", start=False),
    Row("onnx, our kernels", "onnx", "kernels"),
    Row("tvm", "tvm"),
    Row("tvm, our kernels", "tvm, our kernels"),
    Row("stablehlo", "stablehlo"),
    Row("stablehlo, our kernels", "stablehlo, our kernels"),
    Row("stablehlo, IREE", "stablehlo, IREE", provider="iree"),
)
EAGER, AHEAD = "transformers, eager", "torch's AOTInductor"
PACKAGES = {
    "onnx": ("onnxruntime", "flatbuffers", "protobuf"),
    "tvm": ("apache-tvm", "apache-tvm-ffi"),
    "stablehlo": ("jaxlib", "scipy", "ml_dtypes"),
    "stablehlo, IREE": ("iree-base-runtime",),
    AHEAD: ("torch",),
    EAGER: ("torch", "transformers"),
}
"""The packages that it runs on, with their dependencies."""

FIGURES = ("prefill", "decode_1", "decode_8", "decode_16")
FOR_WHOM = {
    "cpu": "who serves on x86-64: every format, cache and feature of this project, and the same bits in any batch",
    "onnx": "who has onnxruntime, on any processor or provider: its standard file needs nothing of this project",
    "tvm": "who wants one compiled library and a runtime of 5 MB; as fast as cpu here, also without our kernels",
    "stablehlo": "who runs XLA, or another device by a PJRT plugin; on a CPU take it with our kernels",
    "stablehlo, IREE": "who may install little and compile nothing where it serves, and can do with less speed",
    "cuda": "who has an NVIDIA GPU and torch there: it was [measured on an H100](../../docs/build/cuda.md#on-an-h100)",
    "tensorrt": "who has TensorRT on a GPU, where engines are built from these networks",
    "tensorrt-rtx": "who has an RTX GPU: engines are built here, without one",
    AHEAD: "who has torch's C++ library and steps of fixed sizes, and writes the serving around them",
    EAGER: "who tries a model out, or trains it",
}
"""The users that each one is for, as the page says it."""


def main(arguments: list[str] | None = None) -> int:
    """Exports, measures, prints, and writes the figures and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path, help="where the bundles are, or go")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go; what is there is kept")
    parser.add_argument("--rounds", type=int, default=2, help="0: exports alone")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--minutes", type=float, help="begin nothing new after so many")
    parser.add_argument("--page", type=Path, help="where the page goes")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes if options.minutes else None
    figures: dict[str, Any] = {"exports": {}, "measured": []}
    if options.json.exists():
        figures = json.loads(options.json.read_text(encoding="utf-8"))
    options.folder.mkdir(parents=True, exist_ok=True)
    while (step := next_step(figures, options.rounds)) is not None:
        if end is not None and time.monotonic() > end:
            print(f"next is {step}: run it again, and it goes on", file=sys.stderr)
            return 0
        take(options, figures, *step)
        figures |= {"machine": machine(), "commit": commit(), "rounds": options.rounds, "threads": options.threads}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if not figures["measured"]:
        return 0
    figures["rows"] = best(figures["measured"])
    figures["packages"] = {name: sum(map(size_of_package, names)) for name, names in PACKAGES.items()}
    options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    text = page(figures, options.json.name)
    print(text)
    if options.page:
        options.page.write_text(text, encoding="utf-8")
    return 0


def next_step(figures: Mapping[str, Any], rounds: int) -> tuple[str, int] | None:
    """The first of an export (round -1) or a row of a round that isn't measured; None: nothing is left."""
    for name in (*EXPORTS, AHEAD):
        if name not in figures["exports"]:
            return name, -1
    names = [*(row.name for row in ROWS), AHEAD, EAGER]
    for index in range(rounds):
        done = figures["measured"][index] if index < len(figures["measured"]) else {}
        for name in names[index % len(names) :] + names[: index % len(names)]:
            if name not in done:
                return name, index
    return None


def take(options: argparse.Namespace, figures: dict[str, Any], name: str, index: int) -> None:
    """Measures it, and adds what was found."""
    if index < 0:
        row_figures = compiled_ahead(options) if name == AHEAD else exported(options, name)
        figures["exports"][name] = row_figures
    else:
        row = next((row for row in ROWS if row.name == name), None)
        row_figures = of_target(options, row) if row is not None else of_torch(options, name)
        figures["measured"] += [{} for _ in range(index + 1 - len(figures["measured"]))]
        figures["measured"][index][name] = row_figures
    print(index, name, row_figures, file=sys.stderr, flush=True)


def place(folder: Path, name: str) -> Path:
    """Says where a bundle lies."""
    return folder / f"{name.replace(', ', '-').replace(' ', '-')}.bundle"


def exported(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Seconds and the most memory of an export in a process of its own, and the bundle's bytes."""
    more, targets = EXPORTS[name]
    bundle = place(options.folder, name)
    shutil.rmtree(bundle, ignore_errors=True)
    recipe = bundle.with_suffix(".toml")
    recipe.write_text(RECIPE + more, encoding="utf-8")
    command = [str(Path(sys.executable).parent / "optimize"), "export", str(options.model), "--recipe", str(recipe)]
    seconds, peak, _ = timed([*command, "-o", str(bundle), *(part for t in targets for part in ("--target", t))])
    figures = {"seconds": seconds, "peak": peak, "bytes": size_of(bundle), "weights": size_of(bundle / "weights")}
    if name == "all":
        shutil.rmtree(bundle)
    return figures


def compiled_ahead(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the compilation of AOTInductor's packages: seconds, bytes and peak memory, without reading the model."""
    script = [sys.executable, str(Path(__file__).with_name("torch_steps.py")), "compile"]
    _, _, printed = timed([*script, str(options.model), str(options.folder / "packages")])
    figures = json.loads(printed.splitlines()[-1])
    return {key: sum(figures[key].values()) for key in ("seconds", "bytes")} | {"peak": figures["peak"]}


def timed(command: Sequence[str]) -> tuple[float, int, str]:
    """Seconds, bytes of its largest process, and what it prints. Raises CalledProcessError."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - start, usage.ru_maxrss * 1024, printed


def best(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Each row's best of all rounds: tokens a second, seconds to a first token, and the most memory."""
    bests: dict[str, dict[str, float]] = {}
    for of_round in rounds:
        for name, figures in of_round.items():
            bests_of_row = bests.setdefault(name, dict(figures))
            for key, value in figures.items():
                bests_of_row[key] = (max if key in FIGURES else min)(bests_of_row[key], value)
    return {name: bests[name] for name in [*(row.name for row in ROWS), AHEAD, EAGER]}


def of_target(options: argparse.Namespace, row: Row) -> dict[str, float]:
    """Runs our engine, a step at a time."""
    path = place(options.folder, row.bundle)
    command = Command(Path(sys.executable), "ours")
    work = Workload(
        short_prompt=128,
        threads=options.threads,
        target=EXPORTS[row.bundle][1][0],
        variant=row.variant,
        provider=row.provider,
        context=CONTEXT,
    )
    report = run(command.line("speed", path, work))
    figures = {key: report.figures[key] for key in FIGURES} | {"peak": float(report.bytes["peak"])}
    if row.start:
        start = [sys.executable, "-m", "peers.processes", "1", *command.bare("start", path, work)]
        figures["start"] = run(start).figures["start"]
    return figures


def of_torch(options: argparse.Namespace, name: str) -> dict[str, float]:
    """AOTInductor's packages, or transformers."""
    script = [sys.executable, str(Path(__file__).with_name("torch_steps.py"))]
    task = ["measure", str(options.folder / "packages")] if name == AHEAD else ["eager", str(options.model)]
    _, _, printed = timed([*script, *task, "--threads", str(options.threads)])
    figures: dict[str, float] = json.loads(printed.splitlines()[-1])
    return figures


def size_of(folder: Path) -> int:
    """Bytes of all files under it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def size_of_package(name: str) -> int:
    """Bytes of an installed package's files."""
    files = metadata.files(name) or []
    return sum(path.stat().st_size for file in files if (path := Path(str(file.locate()))).is_file())


def page(figures: Mapping[str, Any], result: str) -> str:
    """benchmarks/notes/engines.md, of a file in benchmarks/results."""
    mebi = 2.0**20
    rows = []
    for name, of in figures["rows"].items():
        start = f"{of['start']:.2f}" if "start" in of else ""
        speeds = " | ".join(f"{of[key]:,.0f}" if of[key] >= 100 else f"{of[key]:.1f}" for key in FIGURES)
        rows.append(f"| {name} | {speeds} | {start} | {of['peak'] / mebi:,.0f} |")
    rows += [f"| {name} | {why} | | | | | |" for name, why in NOT_MEASURED.items()]
    lines = []
    for name in (*EXPORTS, AHEAD):
        of = figures["exports"][name]
        weights = f"{of['weights'] / mebi:,.0f}" if "weights" in of else ""
        packages = figures["packages"].get(name) or figures["packages"].get(name.partition(",")[0])
        needs = f"{packages / mebi:,.0f}" if packages else ""
        sizes = f"{of['peak'] / mebi:,.0f} | {of['bytes'] / mebi:,.0f} | {weights} | {needs}"
        lines.append(f"| {name} | {of['seconds']:,.0f} | {sizes} |")
    whom = [f"- **{name}**: {text}." for name, text in FOR_WHOM.items()]
    return f"""# All engines, one table

SmolLM2-135M with the same 32-bit floats as weights and KV cache, {figures["threads"]} threads on
{figures["machine"]["processor"]}: tokens a second of a prompt of 512 tokens and of decoding 1, 8 and 16 requests,
seconds from nothing to a first token of a short prompt, and the process's largest memory, mapped weights included. The
best of {figures["rounds"]} rounds in turn, by `python benchmarks/engines.py MODEL.gguf FOLDER --json FILE --page
benchmarks/notes/engines.md` ([{result}](../../benchmarks/results/{result})).
A decode of one follows the prompt of 512; those of 8 and 16 have 128 tokens before them.

| engine | prompt 512 | decode 1 | 8 | 16 | first token, s | memory, MiB |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(rows)}

All but torch's two rows go through this project's scheduler and sampler. Such a machine's runs differ by a tenth, and
where memory is the limit, as at a decode of one, by up to half from one round to the next. stablehlo's
modules were compiled by an earlier start and kept; the first start compiles them. AOTInductor's packages are steps of
fixed sizes whose caches are apart: they don't generate, so a first token isn't measured, and its memory is that of four
packages, each with weights. torch-tensorrt isn't here: it needs another torch.

## What it takes to make them

Seconds, the memory of the largest process, the bundle and the weights in it, and the packages that run it, in MiB. Each
was exported on one of two cores, with other work on the other one. A bundle is for the target that its row names;
"all" has cpu, onnx, tvm, stablehlo, cuda, tensorrt and tensorrt-rtx in one command. cpu needs this project alone; cuda
and TensorRT need NVIDIA's libraries, which aren't installed here. The weights of tensorrt-rtx are in its engine. Torch
is its build for CPUs; transformers' eager needs {figures["packages"][EAGER] / mebi:,.0f} MiB.

| bundle | seconds | memory | bundle | weights | packages |
| --- | ---: | ---: | ---: | ---: | ---: |
{chr(10).join(lines)}

## Which one is for whom

{chr(10).join(whom)}
"""


if __name__ == "__main__":
    sys.exit(main())
