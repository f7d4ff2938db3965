"""The savings and costs of pruning a third of the channels of every feed-forward network, in f32 and int8.

    python benchmarks/pruning.py [--recipes f32 int8] [--share 0.333] [--rounds 5] [--threads 2] [--update-docs]

The model (SmolLM2-135M-Instruct, or --model) is exported whole and pruned with each recipe, and pruned once more in f32
with nothing compensated. Bundles are compared with the whole model's in f32 on a text, as ``optimize eval --against``
does. Then whole and pruned alternate at decoding for one request, each run in a process of its own, and every round
has a ratio of the two. The bytes of a step are those that the report predicts.

What counts is the time saved as a share of the bytes saved. Everything is written to a JSON file; --update-docs puts
the table into benchmarks/notes/quantization.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from peers.loading import BUILD, load_module
from peers.machine import commit, processor
from peers.marked_table import MarkedTable, line
from peers.processes import Command, run
from peers.workload import Report, Workload

import enginewright
from enginewright.optimizer.evaluate import BUILT_IN, evaluate
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.sections import BudgetSection
from enginewright.passes.framework.pruning import Pruning
from enginewright.plugins.cpu import _cpu
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.step_costs import StepCost, StepSizes, step_costs

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "benchmarks" / "notes" / "quantization.md"
TABLE = MarkedTable("pruning.py")
WHOLE, PRUNED, PLAIN = "whole", "pruned", "pruned, nothing compensated"
ANY_KL = BudgetSection(max_kl=1e6)
"""A budget without effect: this benchmark measures the loss."""


@dataclass
class Row:
    """One bundle. ``step_bytes`` are read and written by a decode step in the middle of the run."""

    recipe: str
    kind: str
    parameters: int = 0
    bundle_bytes: int = 0
    step_bytes: int = 0
    perplexity: float = 0.0
    kl_mean: float | None = None
    export_seconds: float = 0.0
    speeds: list[Report] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its bundle."""
        return f"{self.recipe}-{self.kind.split(',')[0]}" + ("-plain" if self.kind == PLAIN else "")


def main() -> int:
    """Exports, compares, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder or a GGUF file; SmolLM2 if left out")
    parser.add_argument("--recipes", nargs="+", choices=("f32", "bf16", "int8", "int4"), default=["f32", "int8"])
    parser.add_argument("--share", type=float, default=1 / 3, help="of the channels that go")
    parser.add_argument("--calibration", type=Path, help="a text; tokens are sampled from the model if left out")
    parser.add_argument("--text", default=BUILT_IN, help="a file of text to compare on")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each bundle")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=Workload.steps, help="tokens decoded")
    parser.add_argument("--folder", type=Path, default=BUILD / "pruning", help="where the bundles go")
    parser.add_argument("--keep", action="store_true", help="time bundles that are in the folder already")
    parser.add_argument("--json", type=Path, help="where the result goes; benchmarks/results/pruning-* if left out")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page whose table --update-docs writes")
    parser.add_argument("--update-docs", action="store_true", help="write the table into the docs")
    arguments = parser.parse_args()
    if arguments.update_docs:
        TABLE.split(arguments.page)  # fails now rather than after an hour
    model = arguments.model or load_module("fetch_model", HERE.parent / "examples" / "fetch_model.py").fetch()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(["f32", *arguments.recipes]))
    rows = [Row(name, kind) for name in names for kind in (WHOLE, PRUNED)] + [Row("f32", PLAIN)]
    work = Workload(
        prompt=arguments.prompt,
        short_prompt=16,
        steps=arguments.steps,
        batches=(1,),
        threads=arguments.threads,
    )
    for row in rows:
        path = arguments.folder / f"{row.name}.bundle"
        if not (arguments.keep and path.exists()):
            report = enginewright.export(
                model, path, recipe=_recipe(row, arguments.share), calibration=arguments.calibration, overwrite=True
            )
            row.export_seconds = report.seconds
        _describe(row, path, work)
        against = None if row is rows[0] else arguments.folder / f"{rows[0].name}.bundle"
        evaluation = evaluate(path, text=arguments.text, against=against, threads=arguments.threads)
        row.perplexity = evaluation.text.perplexity
        row.kl_mean = None if evaluation.comparison is None else evaluation.comparison.kl_mean
        print(f"{row.name}: {row.step_bytes / 1e6:,.1f} MB a step, KL {row.kl_mean}", file=sys.stderr)
    work = replace(work, vocabulary=min(work.vocabulary, Bundle.open(path).model.vocab_size))
    bandwidths = []
    timed = [row for row in rows if row.kind != PLAIN]
    for index in range(arguments.rounds):
        bandwidths.append(_cpu.measure_bandwidth(1 << 30, work.threads))
        for row in timed if index % 2 == 0 else reversed(timed):  # what warms up or slows down does so for all
            path = arguments.folder / f"{row.name}.bundle"
            speeds = run(Command(Path(sys.executable), "ours").line("speed", path, replace(work, seed=index)))
            row.speeds.append(speeds)
            print(f"round {index + 1}, {row.name}: {speeds.figures['decode_1']:,.1f} tokens/s", file=sys.stderr)
    result = summarize(rows, arguments.share, work, bandwidths, model.name)
    path = arguments.json or HERE / "results" / f"pruning-{work.threads}-threads-{date.today().isoformat()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    print(f"\n{path}")
    if arguments.update_docs:
        TABLE.put(arguments.page, table(result))
    return 0


def _recipe(row: Row, share: float) -> Recipe:
    whole = load_recipe(row.recipe)
    if row.kind == WHOLE:
        return whole
    prune = Pruning(channels=share, correct=row.kind == PRUNED)
    return whole.model_copy(update={"name": row.name, "prune": prune, "budget": ANY_KL})


def _describe(row: Row, path: Path, work: Workload) -> None:
    bundle = Bundle.open(path)
    row.parameters = bundle.model.parameters
    files = [p for p in path.rglob("*") if p.is_file() and "report" not in p.parts[-2:-1]]
    row.bundle_bytes = sum(p.stat().st_size for p in files)
    middle = StepSizes((1,), (work.prompt + work.steps // 2,))
    row.step_bytes = sum(step_costs(bundle.program("cpu"), middle), StepCost()).memory


def summarize(rows: list[Row], share: float, work: Workload, bandwidths: list[float], model: str) -> dict[str, Any]:
    """Medians, and for each recipe what pruning saves of a step: bytes, and time in every round."""
    results = []
    for row in rows:
        fields: dict[str, Any] = asdict(row)
        if row.speeds:
            fields["tokens_per_second"] = statistics.median(s.figures["decode_1"] for s in row.speeds)
        if row.kind == PRUNED:
            whole = next(r for r in rows if (r.recipe, r.kind) == (row.recipe, WHOLE))
            bytes_saved = 1 - row.step_bytes / whole.step_bytes
            pairs = zip(row.speeds, whole.speeds, strict=True)
            times = [1 - w.figures["decode_1"] / p.figures["decode_1"] for p, w in pairs]
            fields |= {"bytes_saved": bytes_saved, "time_saved_by_round": times}
            if times:
                fields["time_saved"] = statistics.median(times)
                fields["time_for_bytes"] = fields["time_saved"] / bytes_saved
        results.append(fields)
    return {
        "measured": {
            "date": date.today().isoformat(),
            "commit": commit(),
            "command": " ".join(sys.argv),
            "model": model,
        },
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "bandwidth_gb_per_second": statistics.median(bandwidths) if bandwidths else None,
        },
        "engine": rows[0].speeds[0].engine if rows[0].speeds else "",
        "share": share,
        "workload": asdict(work),
        "results": results,
    }


def table(result: dict[str, Any]) -> str:
    """The result as a table of Markdown, and a line that says what was measured."""
    headings = ("recipe", "", "parameters", "bytes of a step", "tokens a second", "bytes saved", "time saved")
    headings += ("time for bytes", "perplexity", "KL, mean")
    lines = [line(headings), line(["---", "---", *["---:"] * (len(headings) - 2)])]
    for row in result["results"]:
        speed, kl = row.get("tokens_per_second"), row["kl_mean"]
        cells = [f"`{row['recipe']}`", row["kind"], f"{row['parameters'] / 1e6:,.1f} M"]
        cells += [f"{row['step_bytes'] / 1e6:,.1f} MB", "" if speed is None else f"{speed:,.0f}"]
        cells += [_percent(row.get(key)) for key in ("bytes_saved", "time_saved", "time_for_bytes")]
        cells += [f"{row['perplexity']:.2f}", "" if kl is None else f"{kl:.3g}"]
        lines.append(line(cells))
    measured, machine, work = result["measured"], result["machine"], result["workload"]
    timed = f"; {result['engine']} on {machine['processor']}" if result["engine"] else ""
    if machine["bandwidth_gb_per_second"]:
        timed += f", which reads {machine['bandwidth_gb_per_second']:.0f} GB/s"
    what = f"{result['share']:.1%} of the channels; one request, {work['steps']} tokens behind {work['prompt']}"
    lines += ["", f"{measured['model']}: {what}{timed}; {measured['date']}, commit {measured['commit']}."]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    sys.exit(main())
