"""The costs and savings of patterns other than 2:4: unstructured, and in blocks of a panel. A trial, not a format.

    python benchmarks/sparsity_patterns.py --steps 20 [--model PATH] [--patterns NAME ..] [--update-docs]
    python benchmarks/sparsity_patterns.py --kernels-only [--rows 1 6 510] [--rounds 7] [--threads 2]

Quality: weights of SmolLM2-135M-Instruct, or --model, are pruned by SparseGPT in each pattern, and stay 32-bit floats.
Mean KL to the source is measured on windows of the built-in text, of which other windows are for calibration; with
--steps it is measured again after so many steps of training (as `optimize recover` does it) on text sampled from the
source, zeros staying zeros.

Speed: a product of int8 in groups of 32, by loops of sparsity_patterns.cpp in this folder, not by the package's
kernels: sparse and dense in turn. They need AVX-512 with VNNI and VBMI2.

Everything is written to a JSON file in build/; what one run doesn't measure stays there from the one before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peers.loading import BUILD, load_module
from peers.machine import commit, processor
from peers.marked_table import MarkedTable, line
from sparsity import MEASURED, WINDOW
from torch.fx.node import Node

from enginewright.optimizer.capture import CapturedModel, capture
from enginewright.optimizer.measure.windows import split_prefix
from enginewright.optimizer.pipeline.pipeline import choose_passes, split_before
from enginewright.optimizer.recover.distillation import Teacher, measure
from enginewright.optimizer.recover.options import RecoverOptions
from enginewright.optimizer.recover.sequences import Sequences, read_or_sample
from enginewright.optimizer.recover.trainable import MovingWeights, TrainableProgram
from enginewright.optimizer.recover.training import Training
from enginewright.optimizer.search.measure_choices import Check
from enginewright.optimizer.verify.text import evaluation_text
from enginewright.passes.attention.lower_attention import LowerAttention
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.program import Program
from enginewright.passes.ir.scaled import Factors, Scaled
from enginewright.passes.ops.epilogue import finish_linear
from enginewright.passes.quantization.calibrated_walk import calibration_tokens, walk
from enginewright.passes.quantization.choose_formats import LINEARS, WEIGHT_ARGUMENT, ChooseFormats, heads_of
from enginewright.passes.quantization.gptq import Factor, Hessian
from enginewright.passes.sparsity.sparsegpt import factorize_by_fours
from enginewright.runtime.shared.errors import counted
from enginewright.runtime.shared.weight_formats import Storage
from enginewright.runtime.text.tokenizer import Tokenizer

PANEL, QUAD, GROUP, ROUND = 32, 4, 32, 64
"""Outputs of a panel, inputs of a step of the int8 product, weights of a scale, columns that are chosen together."""
INT8_BITS, SCALE_BITS = 8.0, 16 / GROUP
HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "benchmarks" / "notes" / "quantization.md"
TABLE = MarkedTable("sparsity_patterns.py")

Keep = Callable[[int, torch.Tensor], torch.Tensor]
"""Says which stay of the columns from a place on, by their scores [columns, N]."""


@dataclass(frozen=True)
class Pattern:
    """Which weights of [N, K] stay or go together, and how many stay."""

    density: float
    block: tuple[int, int]

    @property
    def round(self) -> int:
        """Columns that are chosen together: four, or ROUND."""
        return QUAD if self.block == (1, QUAD) else ROUND

    @property
    def bits(self) -> float:
        """The bits of a weight in int8, with its position and the scales of its groups."""
        if self.block == (1, 1):  # a bit for each place, and scales for all groups
            return self.density * INT8_BITS + 1 + SCALE_BITS
        if self.block == (1, QUAD):  # 2:4: two bits for each that stays
            return self.density * (INT8_BITS + 2) + SCALE_BITS
        outputs, inputs = self.block
        scales = SCALE_BITS * (self.density if inputs >= GROUP else 1)
        return self.density * (INT8_BITS + 8 / (outputs * inputs)) + scales  # a byte for the place of a block


PATTERNS = {
    "2:4": Pattern(0.5, (1, QUAD)),
    **{f"none-{gone}": Pattern(1 - gone / 100, (1, 1)) for gone in (50, 70, 90)},
    **{f"32x4-{gone}": Pattern(left / 16, (PANEL, QUAD)) for gone, left in ((50, 8), (70, 5), (90, 2))},
    **{f"32x32-{gone}": Pattern(1 - gone / 100, (PANEL, GROUP)) for gone in (50, 70, 90)},
}
"""``none``: any weights. ``32x4``: what one step of the product reads of a panel. ``32x32``: a panel's group."""


@dataclass
class Quality:
    """The cost of a pattern: KL in nats per token and perplexity, as pruned and after ``steps`` of training."""

    pattern: str
    density: float
    bits: float
    kl: float
    perplexity: float | None = None
    steps: int = 0
    recovered_kl: float | None = None
    recovered_perplexity: float | None = None


def keeps(pattern: Pattern, weight: torch.Tensor, factor: Factor) -> Keep:
    """Which weights SparseGPT keeps, by the loss that the others can't compensate for: w^2 / R_kk^2, in sums of blocks.

    Those of groups are chosen ahead, all others in each round of columns, as they are after the updates so far.
    """
    outputs, inputs = pattern.block
    rows = weight.shape[0]
    panels = -(-rows // PANEL)

    def two_of_four(_: int, scores: torch.Tensor) -> torch.Tensor:
        quads = scores.t().unflatten(-1, (-1, QUAD))  # [N, quads, 4]
        order = torch.argsort(quads, dim=-1, descending=True, stable=True)[..., :2]
        return torch.zeros(quads.shape, dtype=torch.bool).scatter_(-1, order, True).flatten(1).t()

    def any_of_all(_: int, scores: torch.Tensor) -> torch.Tensor:
        least = scores.flatten().kthvalue(max(1, round(scores.numel() * (1 - pattern.density)))).values
        return scores > least

    def steps_of_a_panel(_: int, scores: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(scores, (0, panels * PANEL - rows))
        sums = padded.view(-1, QUAD, panels, PANEL).sum((1, 3))  # [steps, panels]
        best = sums.argsort(0, descending=True)[: max(1, round(len(sums) * pattern.density))]
        stays = torch.zeros(sums.shape, dtype=torch.bool).scatter_(0, best, True)
        return stays.repeat_interleave(QUAD, 0).repeat_interleave(PANEL, 1)[:, :rows]

    if inputs < GROUP:
        return {(1, QUAD): two_of_four, (1, 1): any_of_all, (PANEL, QUAD): steps_of_a_panel}[pattern.block]
    scale = torch.empty(len(factor.order)).index_copy_(0, factor.order, factor.upper.diagonal().float())
    ahead = torch.nn.functional.pad((weight / scale).square(), (0, 0, 0, panels * outputs - rows))
    sums = ahead.view(panels, outputs, -1, inputs).sum((1, 3))  # [panels, groups]
    best = sums.argsort(1, descending=True)[:, : max(1, round(sums.shape[1] * pattern.density))]
    chosen = torch.zeros(sums.shape, dtype=torch.bool).scatter_(1, best, True)
    mask = chosen.repeat_interleave(outputs, 0).repeat_interleave(inputs, 1)[:rows].t()[factor.order]  # [K, N]
    return lambda start, scores: mask[start : start + len(scores)]


def pruned(weight: torch.Tensor, factor: Factor, pattern: Pattern) -> torch.Tensor:
    """SparseGPT's sweep over the columns of [N, K] float32, in floats; the package's is in passes/sparsity."""
    upper, order, keep = factor.upper, factor.order, keeps(pattern, weight, factor)
    columns = weight.t()[order].contiguous()
    result = torch.empty_like(columns)
    for start in range(0, len(columns), ROUND):
        stop = min(start + ROUND, len(columns))
        block = columns[start:stop]
        errors = torch.empty_like(block)
        mask = torch.empty(0)
        for i, column in enumerate(block):
            at = start + i
            if i % pattern.round == 0:
                some = block[i : i + pattern.round] / upper.diagonal()[at : min(at + pattern.round, stop), None]
                mask = keep(at, some.square())
            stays = mask[i % pattern.round]
            result[order[at]] = torch.where(stays, column, 0.0)
            torch.div(torch.where(stays, 0.0, column), upper[at, at], out=errors[i])
            if at + 1 < stop:
                block[i + 1 :].addr_(upper[at, at + 1 : stop], errors[i], alpha=-1)
        if stop < len(columns):
            columns[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
    return result.t().contiguous()


def prune(program: Program, calibration: Sequence[torch.Tensor], pattern: Pattern) -> dict[str, torch.Tensor]:
    """Prunes every linear but the one that gives the logits: what is kept, by the name of the weight."""
    nodes = {}
    for node in program.nodes_of(*LINEARS):
        weight = node.args[WEIGHT_ARGUMENT[node.target]]
        if node not in heads_of(program):
            nodes[node] = str(weight.target)
    weights: dict[str, torch.Tensor] = {}

    def look(node: Node, args: Sequence[Any]) -> torch.Tensor:
        x, value, name = args[0], args[1].float(), nodes[node]
        if name not in weights:
            hessian = Hessian(x.shape[-1])
            hessian.add(x.reshape(-1, x.shape[-1]))
            factor = factorize_by_fours(hessian.sum)
            weights[name] = pruned(value, factor, pattern)
        return finish_linear(torch.nn.functional.linear(x, weights[name], args[2]), *args[3:])

    working = dict.fromkeys(nodes, 1 << 28)
    context = PassContext(calibration=tuple(calibration))
    walk(program, dict.fromkeys(nodes, look), calibration_tokens(program, context, "prune", working, 8192))
    return weights


def trainable(program: Program, kept: Mapping[str, torch.Tensor]) -> TrainableProgram:
    """The program with weights that are parameters, and zeros that stay zeros."""
    program, moving = program.copy(), MovingWeights()
    floats = {n: program.weights[n] for n in program.weights if program.weights[n].dtype.is_floating_point}
    recovered = moving.replacing(floats)
    for name, one in recovered.items():
        program.weights.change(name, one)
        if name in kept:
            moving.parameters[name].data.copy_(kept[name])
            program.weights.change(name, Scaled(one, Factors("mask", (kept[name] != 0).float())))
    return TrainableProgram(program, moving)


FORMATS_BESIDE: tuple[Storage, ...] = ("int8", "int4", "int3")
"""Dense formats for the linears, in groups of 32, that are measured beside; 4 and 3 bits by GPTQ."""


class Trial:
    """A model, and what it is pruned and measured by."""

    def __init__(self, model: Path, tokens: int, options: RecoverOptions, *, trains: bool) -> None:
        self.captured: CapturedModel = capture(model)
        assert self.captured.tokenizer_files is not None, "the model comes without a tokenizer"
        prefix, ids = split_prefix(Tokenizer(self.captured.tokenizer_files), evaluation_text())
        room = WINDOW - len(prefix)
        windows = [torch.tensor([*prefix, *ids[s : s + room]]) for s in range(0, len(ids) - room, room)]
        self.calibration, self.measured = windows[::2][: max(1, tokens // WINDOW)], windows[1::2][:MEASURED]
        passes = split_before(choose_passes({})[0], ChooseFormats.name)[0]
        PassManager([p for p in passes if not isinstance(p, LowerAttention)], PassContext()).run(self.captured.program)
        self.later = split_before(choose_passes({})[0], ChooseFormats.name)[1]
        self.teacher = Teacher(model, self.captured.model_info.context_length, 1 << 32)
        self.options, self.sequences = options, Sequences((), tuple(self.measured), "")
        if trains:
            sampled = read_or_sample(model, self.captured, None, options, lambda _: None, 1 << 32)
            self.sequences = Sequences(sampled.training, tuple(self.measured), sampled.origin)

    def of_format(self, storage: Storage) -> Quality:
        """Measures a dense format for the linears; tables and logits stay floats, as with patterns."""
        context = PassContext(calibration=tuple(self.calibration))
        check = Check(self.captured.program, self.later, context, {"text": self.measured})
        dense = WeightFormat(storage=storage, group_size=GROUP, activation="int8", activation_group_size=GROUP)
        formats = WeightFormats(
            default=dense, embeddings=WeightFormat(storage="f32"), method="nearest" if storage == "int8" else "gptq"
        )
        kl = check.measure(replace(context, recipe=PassOptions(weights=formats)))["text"]
        return Quality(f"dense {storage}", 1.0, int(storage[3:]) + SCALE_BITS, kl)

    def quality(self, name: str, pattern: Pattern) -> Quality:
        """Prunes, measures and, where there are sequences to train on, trains and measures again."""
        module = trainable(self.captured.program, prune(self.captured.program, self.calibration, pattern))
        first = measure(module, self.teacher, self.measured, 0)
        row = Quality(name, pattern.density, pattern.bits, first.kl, first.perplexity)
        if self.sequences.training:
            training = Training(module, self.teacher, self.sequences, self.options)
            training.run(lambda _: None, lambda _: None)
            last = training.measured[-1]
            row.steps, row.recovered_kl, row.recovered_perplexity = last.step, last.kl, last.perplexity
        return row


def speeds(rows: Sequence[int], rounds: int, threads: int, size: int, size_bytes: int) -> list[dict[str, Any]]:
    """Compiles the loops and runs them: a record for each pattern and number of rows.

    Raises CalledProcessError if a pattern's product isn't that of the same weights stored dense, bit for bit.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "sparsity_patterns"
        command = ["g++", "-std=c++20", "-O3", "-march=native", "-fopenmp", str(HERE / "sparsity_patterns.cpp")]
        subprocess.run([*command, "-o", str(program)], check=True)
        arguments = [str(program), str(size), str(size_bytes), str(rounds), *map(str, rows)]
        threads_of = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True, env=threads_of)
    return [json.loads(line) for line in done.stdout.splitlines()]


def table(found: Mapping[str, Any]) -> str:
    """Formats a result as a table for the page."""
    speed: dict[str, dict[int, float]] = {}
    for row in found.get("speed", []):
        speed.setdefault(row["pattern"], {})[row["rows"]] = row["speed"]
    rows = sorted({r for of_pattern in speed.values() for r in of_pattern})
    trained = max((row["steps"] for row in found["quality"]), default=0)
    heads = [
        "pattern",
        "stays",
        "bits a weight",
        "KL",
        f"KL after {trained} steps",
        *(counted(r, "row") for r in rows),
    ]
    lines = [line(heads), line(["---"] * 2 + ["---:"] * (len(heads) - 2))]
    for row in found["quality"]:
        after = row["recovered_kl"]
        cells = [row["pattern"], f"{row['density']:.0%}", f"{row['bits']:.1f}", f"{row['kl']:.3g}"]
        cells.append("" if after is None else f"{after:.3g}")
        of_pattern = speed.get(row["pattern"], {})
        lines.append(line([*cells, *(f"{of_pattern[r]:.2f}x" if r in of_pattern else "" for r in rows)]))
    return "\n".join(lines)


def main() -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder or a GGUF file; SmolLM2 if left out")
    parser.add_argument("--patterns", nargs="+", choices=list(PATTERNS), default=list(PATTERNS))
    parser.add_argument("--formats", nargs="*", choices=FORMATS_BESIDE, default=FORMATS_BESIDE)
    parser.add_argument("--tokens", type=int, default=2048, help="of the calibration, from the built-in text")
    parser.add_argument("--steps", type=int, default=0, help="of training behind the pruning; none if left out")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of the training, at its highest")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="of a step of training")
    parser.add_argument("--sampled-tokens", type=int, default=32768, help="to train on")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 6, 510], help="of the product")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=2048, help="inputs and outputs of a product; a multiple of 64")
    parser.add_argument("--weight-bytes", type=int, default=1 << 28, help="that are gone through: more than caches")
    parser.add_argument("--kernels-only", action="store_true")
    parser.add_argument("--model-only", action="store_true")
    parser.add_argument("--output", type=Path, default=BUILD / "sparsity-patterns.json", help="what is in it stays")
    parser.add_argument("--update-docs", action="store_true", help="put the table into the page of notes")
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(args.output.read_text(encoding="utf-8")) if args.output.is_file() else {}
    about = {"date": str(date.today()), "commit": commit(), "processor": processor()}
    if not args.model_only:
        measured = speeds(args.rows, args.rounds, args.threads, args.size, args.weight_bytes)
        results |= {"speed": measured, "speed_measured": about | {"threads": args.threads, "rounds": args.rounds}}
    if not args.kernels_only:
        model = args.model or load_module("fetch_model", HERE.parent / "examples" / "fetch_model.py").fetch()
        options = RecoverOptions(
            steps=max(args.steps, 1),
            batch_tokens=args.batch_tokens,
            learning_rate=args.learning_rate,
            sampled_tokens=args.sampled_tokens,
            checkpoint_every=1 << 30,
        )
        trial = Trial(model, args.tokens, options, trains=args.steps > 0)
        qualities = [trial.of_format(storage) for storage in args.formats]
        for name in args.patterns:
            qualities.append(trial.quality(name, PATTERNS[name]))
            print(f"{name}: {qualities[-1]}", file=sys.stderr, flush=True)
        results |= {"quality": [asdict(row) for row in qualities], "quality_measured": about | asdict(options)}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table({"quality": [asdict(Quality(n, p.density, p.bits, 0.0)) for n, p in PATTERNS.items()], **results}))
    if args.update_docs:
        TABLE.put(PAGE, table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
