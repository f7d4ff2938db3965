"""The gain of recovery for fewer heads and for weights of 4 bits, on a small model trained on the spot.

    python benchmarks/recovery.py [--model FOLDER] [--steps 1200] [--qat-steps 600] [--update-docs]

examples/train_small_mha.py trains the model, unless --model names a folder that it made. Then a quarter of its key and
value heads are kept, by the mean of each group and by the calibrated fit, and the latter is recovered; and its weights
get 4 bits, to the nearest, by GPTQ and by training. All are measured as bundles, on text that none was trained on,
against the model as transformers runs it. Nothing is timed but the training.

Everything is written to a JSON file; --update-docs puts the table into benchmarks/notes/quantization.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from peers.machine import commit, processor
from peers.marked_table import MarkedTable

import enginewright as ew
from enginewright.optimizer.evaluate import evaluate
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.progress import ProgressEvent

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "benchmarks" / "notes" / "quantization.md"
TABLE = MarkedTable("recovery.py")
HELD_OUT_BYTES = 100_000
WIDE = {"max_kl": 20.0}
"""A budget for what is measured before it is recovered."""


@dataclass
class Row:
    """One bundle: what it is, how it was made, and what was found of it on the held-out text."""

    what: str
    steps: int
    seconds: float
    weight_bytes: int
    cache_bytes_per_token: int
    perplexity: float
    source_perplexity: float
    kl: float
    top1: float


def main() -> None:
    """Measures, writes the file and, if told, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder of examples/train_small_mha.py")
    parser.add_argument("--work", type=Path, default=HERE.parent / "build" / "recovery")
    parser.add_argument("--steps", type=int, default=1200, help="of recovering heads")
    parser.add_argument("--qat-steps", type=int, default=600, help="of training in 4 bits")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--qat-rate", type=float, default=1e-4)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--output", type=Path, default=HERE / "results" / f"recovery-{date.today().isoformat()}.json")
    parser.add_argument("--update-docs", action="store_true", help="write the table into the docs")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    model = arguments.model or _trained(arguments.work / "small-mha")
    text = arguments.work / "held_out.txt"
    text.write_text((model / "held_out.txt").read_text(encoding="utf-8")[:HELD_OUT_BYTES], encoding="utf-8")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config["num_key_value_heads"]

    rows: list[Row] = []

    def add(what: str, recipe: Recipe, recovered: Path | None = None, steps: int = 0, seconds: float = 0.0) -> None:
        bundle = arguments.work / f"{len(rows)}.bundle"
        looked_at = None if recovered is not None else model / "training.txt"  # a recovery has its own
        ew.export(model, bundle, recipe=recipe, recovered=recovered, calibration=looked_at, overwrite=True)
        rows.append(_row(what, bundle, text, model, steps, seconds))
        print(rows[-1], flush=True)
        document = {"model": config, "rows": [asdict(r) for r in rows], "processor": processor(), "commit": commit()}
        arguments.output.write_text(json.dumps({**document, "options": _plain(vars(arguments))}, indent=1) + "\n")

    def train(recipe: Recipe, name: str, steps: int, rate: float) -> tuple[Path, float]:
        start = time.perf_counter()
        options = ew.RecoverOptions(steps=steps, batch_tokens=arguments.batch_tokens, learning_rate=rate)
        ew.recover(
            model,
            arguments.work / name,
            recipe=recipe,
            text=model / "training.txt",
            calibration=model / "training.txt",
            options=options,
            overwrite=True,
            progress=_tell,
        )
        return arguments.work / name, time.perf_counter() - start

    def grouped(method: str, grouping: str) -> Recipe:
        section = {"kv_heads": heads // 4, "method": method, "grouping": grouping}
        return Recipe.model_validate({"name": f"gqa-{method}", "attention": section, "budget": WIDE})

    add("the source in f32", load_recipe("f32"))
    add(f"{heads // 4} of {heads} key and value heads, by the mean", grouped("mean", "neighbours"))
    add("the same, fitted", grouped("calibrated", "similar"))
    folder, seconds = train(grouped("calibrated", "similar"), "gqa", arguments.steps, arguments.rate)
    add("fitted and recovered", grouped("calibrated", "similar"), folder, arguments.steps, seconds)
    for name in ("int4", "int4-gptq"):
        recipe = load_recipe(name)
        add(f"`{name}`", recipe.model_copy(update={"budget": recipe.budget.model_copy(update=WIDE)}))
    folder, seconds = train(load_recipe("int4"), "int4", arguments.qat_steps, arguments.qat_rate)
    add("`int4`, trained", load_recipe("int4"), folder, arguments.qat_steps, seconds)
    if arguments.update_docs:
        note = f"{processor()}; {date.today().isoformat()}, commit {commit()[:12]}"
        TABLE.put(PAGE, f"{_table(rows)}\n\n{note}")


def _trained(folder: Path) -> Path:
    example = HERE.parent / "examples" / "train_small_mha.py"
    subprocess.run([sys.executable, str(example), str(folder)], check=True)
    return folder


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if not isinstance(v, Path)}


def _tell(event: ProgressEvent) -> None:
    if event.stage == "measure":
        print(f"  step {event.done}: {event.detail}", file=sys.stderr, flush=True)


def _row(what: str, folder: Path, text: Path, model: Path, steps: int, seconds: float) -> Row:
    report = evaluate(folder, text=text, against=model)
    assert report.comparison is not None
    bundle = Bundle.open(folder)
    groups = bundle.program("cpu").cache_groups
    return Row(
        what,
        steps,
        round(seconds, 1),
        sum(f.stat().st_size for f in (folder / "weights").iterdir()),
        sum(cache_block_bytes(g) // g.block_size for g in groups),
        report.text.perplexity,
        report.comparison.perplexity,
        report.comparison.kl_mean,
        report.comparison.top1_agreement,
    )


def _table(rows: list[Row]) -> str:
    lines = [
        "| | steps | weights | KV cache, bytes a token | perplexity | KL, nats a token | same first choice |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        change = 100 * (r.perplexity / r.source_perplexity - 1)
        lines.append(
            f"| {r.what} | {r.steps or ''} | {r.weight_bytes / 1e6:.2f} MB | {r.cache_bytes_per_token:,} | "
            f"{r.perplexity:.3f} ({change:+.1f} %) | {r.kl:.4f} | {100 * r.top1:.1f} % |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
