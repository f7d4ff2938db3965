"""Size, quality and speed of every recipe on one model.

    python benchmarks/recipes.py [--recipes int8 int4] [--beside old=OLD.bundle Q8_0=q8_0.gguf] [--update-docs]

The model (SmolLM2-135M-Instruct, or --model) is exported with every built-in recipe, and every bundle is compared with
that of f32: on the first tokens of a text, and by the first 12 greedy tokens behind the 40 questions of questions.txt.
--beside adds bundles of other versions, and GGUF files that llama.cpp runs in the environment that bench_peers.py has
made. Then all alternate at prefill and decoding, each run in a process of its own; speeds are medians over the rounds,
and ratios to f32 medians of those of the rounds.

Everything is written to a JSON file, again after each step of the way; --update-docs puts the table into
docs/use/commands/recipes.md at the end. A recipe that can't be exported, compared or timed has a row that says so, and
the command ends with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from peers.engines import ENGINES
from peers.install import install, peers_python
from peers.loading import BUILD, load_module
from peers.machine import commit, processor
from peers.marked_table import MarkedTable, line
from peers.processes import Command, WorkerError, run
from peers.workload import Report, Workload

import enginewright
from enginewright import LLM
from enginewright.optimizer.recipes.recipe import list_recipes
from enginewright.optimizer.shared.storage import RECORDS
from enginewright.plugins.cpu import _cpu
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import EnginewrightError
from enginewright.runtime.shared.progress import ProgressEvent

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "use" / "commands" / "recipes.md"
TABLE = MarkedTable("recipes.py")
REFERENCE = "f32"
TEXT = HERE.parent / "optimizer" / "measure" / "evaluation_text.txt"
QUESTIONS = HERE / "questions.txt"
ANSWER_TOKENS = 12
CLEAR = "\r\033[K" if sys.stderr.isatty() else ""
"""Takes the line of progress away."""


@dataclass
class Row:
    """The result of one recipe, or of a bundle or file to compare with. ``failure``: the reason why it has no figures.
    ``path`` is None for what is exported here. ``bundle_bytes`` counts all files but the report, ``weight_bytes`` the
    weights as they are stored; ``same_answers``: the share of questions that are answered as by the reference.
    """

    recipe: str
    path: Path | None = None
    export_seconds: float = 0.0
    bundle_bytes: int = 0
    weight_bytes: int = 0
    parameters: int = 0
    perplexity: float = 0.0
    kl_mean: float | None = None
    top1_agreement: float | None = None
    same_answers: float | None = None
    speeds: list[Report] = field(default_factory=list)
    failure: str = ""


def main() -> int:
    """Exports, compares, measures, writes; 1 if a recipe failed."""
    names = [recipe.name for recipe in list_recipes() if "cpu" in recipe.targets]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder or a GGUF file; SmolLM2 if left out")
    parser.add_argument("--recipes", nargs="+", choices=names, default=names, help="these, and f32")
    parser.add_argument("--beside", nargs="+", type=_named, default=[], metavar="NAME=PATH", help="bundles, GGUF files")
    parser.add_argument("--text", type=Path, default=TEXT, help="a file of text to compare on")
    parser.add_argument("--tokens", type=int, default=1024, help="of the text")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each recipe")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt", type=int, default=Workload.prompt, help="tokens of the prompt")
    parser.add_argument("--short-prompt", type=int, default=Workload.short_prompt, help="and of those of a batch")
    parser.add_argument("--steps", type=int, default=Workload.steps, help="tokens decoded")
    parser.add_argument("--batch", type=int, default=Workload.batches[-1], help="requests of a batch")
    parser.add_argument("--folder", type=Path, default=BUILD / "recipes", help="where the bundles go")
    parser.add_argument("--json", type=Path, help="where the result goes; benchmarks/results/recipes-* if left out")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page whose table --update-docs writes")
    parser.add_argument("--update-docs", action="store_true", help="write the table into the docs")
    arguments = parser.parse_args()
    if arguments.update_docs:
        TABLE.split(arguments.page)  # fails now rather than after an hour

    model = arguments.model or load_module("fetch_model", HERE.parent / "examples" / "fetch_model.py").fetch()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    chosen = [REFERENCE, *(name for name in names if name in arguments.recipes and name != REFERENCE)]
    rows = [*map(Row, chosen), *(Row(name, path) for name, path in arguments.beside)]
    work = Workload(
        prompt=arguments.prompt,
        short_prompt=arguments.short_prompt,
        steps=arguments.steps,
        batches=(arguments.batch,),
        threads=arguments.threads,
    )
    path = arguments.json or HERE / "results" / f"recipes-{work.threads}-threads-{date.today().isoformat()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    bandwidths: list[float] = []

    def saved() -> dict[str, Any]:
        result = _result(rows, work, bandwidths, model.name)
        path.write_text(json.dumps(result, indent=1) + "\n")
        return result

    for row in rows:
        _attempt(row, lambda row: _prepare(row, model, arguments.folder, rows[0].parameters))
        saved()
    if rows[0].failure:
        print(f"{REFERENCE}, which the others are compared with: {rows[0].failure}", file=sys.stderr)
        return 1
    suite = _ask(_path(rows[0], arguments.folder), arguments.text, arguments.tokens, arguments.folder)
    for row in rows:
        _attempt(row, lambda row: _compare(row, arguments.folder, suite))
        saved()
    vocabulary = Bundle.open(_path(rows[0], arguments.folder)).model.vocab_size
    work = replace(work, vocabulary=min(work.vocabulary, vocabulary))
    for index in range(arguments.rounds):
        bandwidths.append(_cpu.measure_bandwidth(1 << 30, work.threads))
        for row in rows if index % 2 == 0 else reversed(rows):  # what warms up or slows down does so for all
            _attempt(row, lambda row, seed=index: _time(row, arguments.folder, replace(work, seed=seed)))
        saved()
    result = saved()
    print(table(result))
    print(f"\n{path}")
    if arguments.update_docs:
        TABLE.put(arguments.page, table(result))
        print(arguments.page)
    failed = [row.recipe for row in rows if row.failure]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _attempt(row: Row, stage: Callable[[Row], None]) -> None:
    """Does a stage for a recipe that has not failed before; a failure is kept, and the others go on."""
    if row.failure:
        return
    start = time.perf_counter()
    try:
        stage(row)
    except EnginewrightError as e:
        row.failure = e.message
    except WorkerError as e:
        row.failure = f"the run failed: {e}"
    outcome = row.failure or f"{time.perf_counter() - start:.1f} s"
    print(f"{CLEAR}{row.recipe}: {outcome}", file=sys.stderr)


def _named(text: str) -> tuple[str, Path]:
    """ "NAME=PATH" of something that is there."""
    name, _, path = text.partition("=")
    if not name or not Path(path).exists():
        raise argparse.ArgumentTypeError(f"{text!r} isn't NAME=PATH of a bundle or a GGUF file")
    return name, Path(path).resolve()


def _path(row: Row, folder: Path) -> Path:
    return row.path or folder.resolve() / f"{row.recipe}.bundle"


def _worker(row: Row) -> Command:
    """The worker that runs a row. Raises WorkerError if llama.cpp can't be installed."""
    if row.path is None or row.path.is_dir():
        return Command(Path(sys.executable), "ours")
    engine, python = ENGINES["llama.cpp"], peers_python(BUILD / "peers")
    if (why := install(engine, python)) is not None:
        raise WorkerError(why)
    return Command(python, engine.worker)


def _prepare(row: Row, model: Path, folder: Path, parameters: int) -> None:
    """Exports, unless it is there, and takes sizes."""
    row.parameters = parameters
    if row.path is not None and row.path.is_file():
        _worker(row)
        row.bundle_bytes = row.weight_bytes = row.path.stat().st_size
        return
    if row.path is None:
        report = enginewright.export(
            model, _path(row, folder), recipe=row.recipe, overwrite=True, progress=_teller(f"{row.recipe}: export")
        )
        row.export_seconds, row.parameters = report.seconds, report.parameters
    bundle = Bundle.open(_path(row, folder))
    row.weight_bytes = sum(tensor.bytes for name, tensor in bundle.index.tensors.items() if not _is_record(name))
    files = [p for p in bundle.path.rglob("*") if p.is_file() and "report" not in p.parts[-2:-1]]
    row.bundle_bytes = sum(p.stat().st_size for p in files)


def _is_record(name: str) -> bool:
    """Returns True if a tensor only records how others were scaled: no step reads it."""
    return name.endswith(RECORDS)


@dataclass(frozen=True)
class Asked:
    """The files with the text and the reference's logits, and with the questions; what the reference answered."""

    text: Path
    questions: Path
    answers: list[list[int]]


def _ask(reference: Path, text: Path, tokens: int, folder: Path) -> Asked:
    """Prepares the questions for all rows, with the reference's answers. A model without a chat template gets plain
    text.
    """
    files = folder.resolve() / "reference.npz", folder.resolve() / "questions.json"
    most = Bundle.open(reference).model.context_length
    with LLM(reference, memory="512MiB") as llm:
        tokenizer = llm.tokenizer
        ids = tokenizer.encode(text.read_text(encoding="utf-8"))[: min(tokens, most)]
        np.savez(files[0], ids=np.asarray(ids, np.int32), logits=llm.logits(ids))
        prompts = [
            tokenizer.encode_chat([{"role": "user", "content": question}])
            if llm.has_chat_template
            else tokenizer.encode(f"Question: {question}\nAnswer:")
            for question in QUESTIONS.read_text(encoding="utf-8").splitlines()
        ]
    prompts = [prompt[ANSWER_TOKENS - most :] for prompt in prompts]  # of a model for tests
    files[1].write_text(json.dumps({"prompts": prompts, "tokens": ANSWER_TOKENS}))
    line = Command(Path(sys.executable), "ours").line("answers", reference, Workload(), "--reference", str(files[1]))
    return Asked(*files, [list(answer) for answer in run(line).answers])


def _compare(row: Row, folder: Path, asked: Asked) -> None:
    worker, path, work = _worker(row), _path(row, folder), Workload()
    figures = run(worker.line("logits", path, work, "--reference", str(asked.text))).figures
    row.perplexity = figures["perplexity"]
    if row.recipe != REFERENCE:
        row.kl_mean, row.top1_agreement = figures["kl"], figures["top_1"]
        answers = run(worker.line("answers", path, work, "--reference", str(asked.questions))).answers
        same = [list(a) == b for a, b in zip(answers, asked.answers, strict=True)]
        row.same_answers = sum(same) / len(same)


def _time(row: Row, folder: Path, work: Workload) -> None:
    row.speeds.append(run(_worker(row).line("speed", _path(row, folder), work)))


def _teller(what: str) -> Callable[[ProgressEvent], None]:
    """Shows how far a stage is, on one line of a terminal."""

    def tell(event: ProgressEvent) -> None:
        if sys.stderr.isatty():
            print(f"{CLEAR}{what}, {event.stage} {event.done}/{event.total}", end="", file=sys.stderr, flush=True)

    return tell


def _result(rows: list[Row], work: Workload, bandwidths: list[float], model: str) -> dict[str, Any]:
    reference = rows[0].speeds
    results = []
    for row in rows:
        fields: dict[str, Any] = asdict(row) | {"path": row.path and row.path.name}
        if row.speeds and not row.failure:
            fields["tokens_per_second"] = {
                f: statistics.median(s.figures[f] for s in row.speeds) for f in row.speeds[0].figures
            }
            pairs = list(zip(row.speeds, reference, strict=True)) if len(row.speeds) == len(reference) else []
            if pairs:
                ratios = {f: [a.figures[f] / b.figures[f] for a, b in pairs] for f in reference[0].figures}
                fields["ratio"] = {f: statistics.median(values) for f, values in ratios.items()}
        results.append(fields)
    machine = {"processor": processor(), "cores": os.cpu_count()}
    machine["bandwidth_gb_per_second"] = statistics.median(bandwidths) if bandwidths else None
    engine = reference[0].engine if reference else ""
    measured = {"date": date.today().isoformat(), "commit": commit(), "command": " ".join(sys.argv), "model": model}
    return {
        "measured": measured,
        "machine": machine,
        "engine": engine,
        "workload": asdict(work),
        "results": results,
    }


def table(result: dict[str, Any]) -> str:
    """The result as a table of Markdown, and a line that says what was measured."""
    work, machine = result["workload"], result["machine"]
    headings = ("recipe", "bundle", "bytes per weight", "perplexity", "mean KL", "same token", "same answers")
    headings += (f"prefill of {work['prompt']} tokens", "decoding 1 request")
    headings += (f"decoding {work['batches'][0]} requests", "export")
    lines = [line(headings), line(["---", *["---:"] * (len(headings) - 1)])]
    for row in result["results"]:
        if row["failure"]:
            lines.append(line([f"`{row['recipe']}`", f"failed: {row['failure']}", *[""] * (len(headings) - 2)]))
            continue
        kl, same, answers = row["kl_mean"], row["top1_agreement"], row["same_answers"]
        speeds = row.get("tokens_per_second")
        lines.append(
            line(
                [
                    f"`{row['recipe']}`",
                    f"{row['bundle_bytes'] / 1e6:,.0f} MB"
                    if row["bundle_bytes"] >= 1e7
                    else f"{row['bundle_bytes']:,} B",
                    f"{row['weight_bytes'] / row['parameters']:.2f}",
                    f"{row['perplexity']:.2f}",
                    "" if kl is None else f"{kl:.2g}",
                    "" if same is None else f"{same:.1%}".replace("%", " %"),
                    "" if answers is None else f"{answers:.0%}".replace("%", " %"),
                    *(["", "", ""] if speeds is None else [f"{speed:,.0f}" for speed in speeds.values()]),
                    f"{row['export_seconds']:.0f} s" if row["export_seconds"] else "",
                ]
            )
        )
    measured = result["measured"]
    timed = f"; {result['engine']} on {machine['processor']}" if result["engine"] else ""
    if machine["bandwidth_gb_per_second"]:
        bandwidth = machine["bandwidth_gb_per_second"]
        timed += f", with a memory bandwidth of {bandwidth:.0f} GB/s; speeds in tokens per second"
    lines += ["", f"{measured['model']}{timed}; {measured['date']}, commit {measured['commit']}."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
