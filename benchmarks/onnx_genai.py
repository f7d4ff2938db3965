"""Compares our onnx target with onnxruntime-genai on this machine: the same weights, format and context, interleaved.

    python benchmarks/onnx_genai.py [--model FOLDER] [--formats f32 int4] [--batch 16] [--rounds 5] [--json FILE]

onnxruntime-genai is installed into the peers' environment (``peers.install``), if it isn't there; its model builder
makes the other side of the same folder. All run on the same onnxruntime, which that environment borrows from ours,
greedily; each run is a process of its own, and which engine begins changes from round to round. What counts is the
ratio of a round, ours over theirs: the median of these is printed, with the least and the most. Ours are the kernels
variant and the contrib variant, or with ``--variants standard`` the file of standard operators.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from peers.engines import ENGINES
from peers.install import install, peers_python
from peers.loading import BUILD
from peers.machine import commit, processor
from peers.make_models import fetched_gguf, hf_folder
from peers.prepare import quietly
from peers.processes import Command, run
from peers.workload import Report, Workload

import enginewright
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.sections import BudgetSection
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.plugins.onnx.recipe import OnnxSection
from enginewright.plugins.steps.linear_io import Variant

INT4 = WeightFormat(storage="int4", group_size=32, activation="int8", activation_group_size=32)

FORMATS: dict[str, tuple[WeightFormats, list[str]]] = {
    "f32": (WeightFormats(), ["-p", "fp32"]),
    # All products, that of the logits too, and the table of tokens. Groups of 32 without zero points.
    "int4": (WeightFormats(default=INT4, embeddings=INT4), ["-p", "int4", "--extra_options", "block_size=32"]),
}
"""Our weights, and what the model builder is told."""

LEVELS: dict[Variant, int] = {"kernels": 4, "contrib": 4, "standard": 1}
"""The accuracy level of products with 4 bits that our variants have, and the builder is told: at 4 activations are
rounded to 8 bits, at 1 they are floats."""


@dataclass(frozen=True)
class Side:
    """One of the engines, with what it loads."""

    name: str
    command: Command
    path: Path
    variant: Variant | None = None

    def speed(self, work: Workload) -> Report:
        """A run of it."""
        return run(self.command.line("speed", self.path, replace(work, variant=self.variant)))


MAX_KL = 5.0
"""Four bits without calibration cost a small model much, and it is speed that is measured here."""


def main(arguments: list[str] | None = None) -> int:
    """Prepares both sides, runs the rounds, prints the ratios and writes all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; by default SmolLM2-135M-Instruct")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--variants", nargs="+", choices=LEVELS, default=["kernels", "contrib"], help="our files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=int, default=Workload.prompt, help="tokens of the long prompt")
    parser.add_argument("--short-prompt", type=int, default=Workload.short_prompt, help="of each request of the batch")
    parser.add_argument("--steps", type=int, default=Workload.steps, help="tokens decoded")
    parser.add_argument("--batch", type=int, default=16, help="requests of the batch")
    parser.add_argument("--vocabulary", type=int, default=Workload.vocabulary, help="prompts have tokens below this")
    parser.add_argument("--keep", action="store_true", help="leave our bundles as they are, if they are there")
    parser.add_argument("--json", type=Path, default=BUILD / "onnx.json", help="where the figures go")
    options = parser.parse_args(arguments)
    if len({LEVELS[variant] for variant in options.variants}) > 1:
        parser.error("--variants: standard, whose products round nothing, is compared alone")

    work = Workload(
        prompt=options.prompt,
        short_prompt=options.short_prompt,
        steps=options.steps,
        batches=(options.batch,),
        threads=options.threads,
        vocabulary=options.vocabulary,
        target="onnx",
    )
    folder = options.model.resolve() if options.model else hf_folder(fetched_gguf("smollm2"), BUILD / "smollm2-hf")
    python = peers_python(BUILD / "peers")
    if why := install(ENGINES["onnxruntime-genai"], python):
        parser.error(why)
    results = []
    for name in options.formats:
        ours, theirs = prepare(folder, name, options.variants, python, keep=options.keep)
        rounds = []
        for index in range(options.rounds):
            first = index % (len(ours) + 1)
            order = [*ours, theirs][first:] + [*ours, theirs][:first]
            rounds.append({side.name: side.speed(replace(work, seed=index)) for side in order})
            for side in ours:
                speeds = ratios(rounds[-1][side.name], rounds[-1][theirs.name])
                print(f"{name}, round {index + 1}, {side.variant}: {speeds}", file=sys.stderr)
        for side in ours:
            results.append(summary(name, side, theirs, rounds))
            print(line(results[-1]))
    document: dict[str, Any] = {
        "measured": {"date": date.today().isoformat(), "commit": commit(), "command": " ".join(sys.argv)},
        "machine": {"processor": processor(), "cores": os.cpu_count(), "onnxruntime": version("onnxruntime")},
        "workload": asdict(work),
        "results": results,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def prepare(folder: Path, name: str, variants: list[Variant], python: Path, *, keep: bool) -> tuple[list[Side], Side]:
    """Ours of one bundle, made anew unless it is to be kept, and the builder's folder, made with the peers' Python if
    it isn't there yet."""
    weights, settings = FORMATS[name]
    bundle, peer = BUILD / f"{folder.name}-{name}-onnx.bundle", BUILD / f"{folder.name}-{name}-genai"
    if not weights.exact:
        level = LEVELS[variants[0]]
        settings, peer = [*settings, f"accuracy_level={level}"], peer.with_name(f"{peer.name}-{level}")
    recipe = Recipe(
        name=name,
        targets=("onnx",),
        weights=weights,
        budget=BudgetSection(max_kl=None if weights.exact else MAX_KL),
        onnx=OnnxSection(contrib="contrib" in variants, kernels="kernels" in variants),
    )
    if not (keep and bundle.exists()):
        enginewright.export(folder, bundle, recipe=recipe, overwrite=True)
    if not (peer / "genai_config.json").exists():
        builder = [str(python), "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(peer)]
        quietly([*builder, "-e", "cpu", "-c", str(BUILD / "cache"), *settings])
    command = Command(Path(sys.executable), "ours")
    ours = [Side(f"enginewright {name} {variant}", command, bundle, variant) for variant in variants]
    return ours, Side(f"onnxruntime-genai {name}", Command(python, "onnxruntime_genai_cpu"), peer)


def ratios(ours: Report, theirs: Report) -> dict[str, float]:
    """Ours over theirs."""
    return {figure: round(value / theirs.figures[figure], 3) for figure, value in ours.figures.items()}


def summary(name: str, ours: Side, theirs: Side, rounds: list[dict[str, Report]]) -> dict[str, Any]:
    """Medians of each side's tokens a second, and of the rounds' ratios."""
    pairs = [(speeds[ours.name], speeds[theirs.name]) for speeds in rounds]
    ratios_of_rounds = [ratios(*pair) for pair in pairs]
    return {
        "format": name,
        "variant": ours.variant,
        "engines": [speeds.engine for speeds in pairs[0]],
        "tokens_per_second": {
            side.name: {
                figure: median(speeds[side.name].figures[figure] for speeds in rounds) for figure in ratios_of_rounds[0]
            }
            for side in (ours, theirs)
        },
        "ratio": {
            figure: {
                "median": median(r[figure] for r in ratios_of_rounds),
                "least": min(r[figure] for r in ratios_of_rounds),
                "most": max(r[figure] for r in ratios_of_rounds),
            }
            for figure in ratios_of_rounds[0]
        },
        "rounds": [[asdict(speeds) for speeds in pair] for pair in pairs],
    }


def line(result: dict[str, Any]) -> str:
    """The ratios of a format, for people."""
    parts = [f"{f} {r['median']:.2f} ({r['least']:.2f} to {r['most']:.2f})" for f, r in result["ratio"].items()]
    return f"{result['format']}, {result['variant']} over onnxruntime-genai's: {', '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
