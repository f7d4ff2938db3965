"""Compares our onnx target with onnxruntime-genai on this machine: the same weights, format and context, by turns.

    python benchmarks/onnx_genai.py [--model FOLDER] [--formats f32 int4] [--batch 16] [--rounds 5] [--json FILE]

onnxruntime-genai is installed into the peers' environment (``peers.install``), if it isn't there; its model builder
makes the other side of the same folder. Both run on the same onnxruntime, which that environment borrows from ours,
greedily; each run is a process of its own, and which engine begins changes from round to round. What counts is the
ratio of a round, ours over theirs: the median of these is printed, with the least and the most. Ours is the contrib
variant, or with ``--variant standard`` the file of standard operators.
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
from peers.make_models import hf_folder, smollm2_gguf
from peers.prepare import quietly
from peers.processes import Command, run
from peers.workload import Report, Workload

import enginewright
from enginewright.optimizer.recipes.onnx_section import OnnxSection
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.sections import BudgetSection, WeightFormatSection, WeightsSection

INT4 = WeightFormatSection(storage="int4", group_size=32, activation="int8", activation_group_size=32)

FORMATS: dict[str, tuple[WeightsSection, list[str]]] = {
    "f32": (WeightsSection(), ["-p", "fp32"]),
    # All products, that of the logits too, and the table of tokens. Groups of 32 without zero points.
    "int4": (WeightsSection(default=INT4, embeddings=INT4), ["-p", "int4", "--extra_options", "block_size=32"]),
}
"""Our weights, and what the model builder is told."""

LEVELS = {"contrib": 4, "standard": 1}
"""The accuracy level of products with 4 bits that our variants have, and the builder is told: at 4 activations are
rounded to 8 bits, at 1 they are floats."""


@dataclass(frozen=True)
class Side:
    """One of the two engines, with what it loads."""

    name: str
    command: Command
    path: Path


MAX_KL = 5.0
"""Four bits without calibration cost a small model much, and it is speed that is measured here."""


def main(arguments: list[str] | None = None) -> int:
    """Prepares both sides, runs the rounds, prints the ratios and writes all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; by default SmolLM2-135M-Instruct")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--variant", choices=("contrib", "standard"), default="contrib", help="which of our files runs")
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

    work = Workload(
        prompt=options.prompt,
        short_prompt=options.short_prompt,
        steps=options.steps,
        batches=(options.batch,),
        threads=options.threads,
        vocabulary=options.vocabulary,
        target="onnx",
    )
    folder = options.model.resolve() if options.model else hf_folder(smollm2_gguf(), BUILD / "smollm2-hf")
    python = peers_python(BUILD / "peers")
    if why := install(ENGINES["onnxruntime-genai"], python):
        parser.error(why)
    results = []
    for name in options.formats:
        pair = prepare(folder, name, options.variant, python, keep=options.keep)
        rounds = []
        for index in range(options.rounds):
            order = pair if index % 2 == 0 else pair[::-1]
            speeds = {c.name: run(c.command.line("speed", c.path, replace(work, seed=index))) for c in order}
            rounds.append((speeds[pair[0].name], speeds[pair[1].name]))
            print(f"{name}, round {index + 1}: {ratios(*rounds[-1])}", file=sys.stderr)
        results.append(summary(name, pair, rounds))
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


def prepare(folder: Path, name: str, variant: str, python: Path, *, keep: bool) -> tuple[Side, Side]:
    """Our bundle, made anew unless it is to be kept, and the builder's folder, made with the peers' Python if it isn't
    there yet."""
    weights, told = FORMATS[name]
    bundle, peer = BUILD / f"{folder.name}-{name}-onnx.bundle", BUILD / f"{folder.name}-{name}-genai"
    if not weights.exact:
        told, peer = [*told, f"accuracy_level={LEVELS[variant]}"], peer.with_name(f"{peer.name}-{LEVELS[variant]}")
    recipe = Recipe(
        name=name,
        targets=("onnx",),
        weights=weights,
        budget=BudgetSection(max_kl=None if weights.exact else MAX_KL),
        onnx=OnnxSection(contrib=variant == "contrib"),
    )
    if not (keep and bundle.exists()):
        enginewright.export(folder, bundle, recipe=recipe, overwrite=True)
    if not (peer / "genai_config.json").exists():
        builder = [str(python), "-m", "onnxruntime_genai.models.builder", "-i", str(folder), "-o", str(peer)]
        quietly([*builder, "-e", "cpu", "-c", str(BUILD / "cache"), *told])
    return (
        Side(f"enginewright {name}", Command(Path(sys.executable), "ours"), bundle),
        Side(f"onnxruntime-genai {name}", Command(python, "onnxruntime_genai_cpu"), peer),
    )


def ratios(ours: Report, theirs: Report) -> dict[str, float]:
    """Ours over theirs."""
    return {figure: round(value / theirs.figures[figure], 3) for figure, value in ours.figures.items()}


def summary(name: str, pair: tuple[Side, Side], rounds: list[tuple[Report, Report]]) -> dict[str, Any]:
    """Medians of each side's tokens a second, and of the rounds' ratios."""
    found = [ratios(*speeds) for speeds in rounds]
    return {
        "format": name,
        "engines": [speeds.engine for speeds in rounds[0]],
        "tokens_per_second": {
            side.name: {figure: median(speeds[i].figures[figure] for speeds in rounds) for figure in found[0]}
            for i, side in enumerate(pair)
        },
        "ratio": {
            figure: {
                "median": median(r[figure] for r in found),
                "least": min(r[figure] for r in found),
                "most": max(r[figure] for r in found),
            }
            for figure in found[0]
        },
        "rounds": [[asdict(speeds) for speeds in pair_of_speeds] for pair_of_speeds in rounds],
    }


def line(result: dict[str, Any]) -> str:
    """The ratios of a format, for people."""
    parts = [f"{f} {r['median']:.2f} ({r['least']:.2f} to {r['most']:.2f})" for f, r in result["ratio"].items()]
    return f"{result['format']}, ours over onnxruntime-genai's: {', '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
