"""KL against bits a weight and against speed: our recipes and llama.cpp's types, of the same weights and texts.

    python benchmarks/frontier.py MODEL.gguf [MODEL.gguf ...] [--calibration FILE] [--recovered DIR | --moved]
        [--types Q4_K_M Q6_K] [--recipes int4-gptq] [--sizes Q4_K_M Q6_K] [--rounds 3] [--peers PYTHON]
        [--page benchmarks/notes/frontier.md]

Each MODEL is dequantized to a GGUF file of 32-bit floats, or takes the weights that `optimize recover` made of it
(--recovered), which a short training leaves near the grid of their file. With --moved each block of 32 weights is moved
off the grid of 4 bits by noise of up to half a step, as much as rounding to it takes away. From that file come all:
theirs by llama.cpp's own quantizer (peers/quantize.py) with an importance matrix, ours by exports. Both look at the
same calibration tokens; without --calibration they are those of this project's pages for users.
--sizes: types whose size, in bytes of weights, ``auto`` gets as its budget; it is searched once, over all formats.

KL(f32 || quantized) is of the next token, on average over the first tokens of two texts that nothing was calibrated on:
the package's, and the language reference that every Python brings. A type on the file's own grid is nearly free: points
of a model that is as its file has it are not compared. Speeds are of one request, in rounds in turn.

Everything is written to a JSON file, again after each point; points that are there are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from peers.convert_gguf import FILE_TYPES, copy_metadata
from peers.engines import ENGINES
from peers.install import install, peers_python
from peers.loading import BUILD
from peers.machine import commit, machine
from peers.marked_table import line
from peers.processes import Command, environment, run
from peers.workload import Report, Workload

import enginewright
from enginewright import LLM
from enginewright.optimizer.calibration.text_file import read_sequences
from enginewright.optimizer.capture import CapturedModel, capture
from enginewright.optimizer.pipeline.pass_context import pass_context
from enginewright.optimizer.pipeline.pipeline import default_pipeline, split_before
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.sections import AutoSection, BudgetSection, CalibrationSection
from enginewright.optimizer.search.assign import least_cost
from enginewright.optimizer.search.formats import FormatSearch
from enginewright.optimizer.search.search import Task
from enginewright.optimizer.shared.storage import RECORDS
from enginewright.optimizer.verify.held_out import held_out
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.passes.ir.provenance import WHERE
from enginewright.passes.quantization.choose_formats import LINEARS
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.progress import silent
from enginewright.runtime.text.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
PACKAGED = HERE.parent / "optimizer" / "measure" / "evaluation_text.txt"
TYPES = ("Q2_K", "Q3_K_M", "IQ4_XS", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
RECIPES = ("int3", "int4-gptq", "q4_k", "mxfp4", "nvfp4", "int8")
WIDE = BudgetSection(max_kl=20.0)
"""The budget of exports whose KL is measured here."""

NEAR = 0.02
"""The share by which sizes differ that are compared as one."""


@dataclass
class Point:
    """One file or bundle. ``kl``: by text; ``speeds``: tokens a second of one request, round by round."""

    name: str
    ours: bool
    bits: float
    kl: dict[str, float]
    seconds: float
    speeds: list[float] = field(default_factory=list)


def main() -> int:
    """Makes, compares, times, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="a GGUF file")
    parser.add_argument("--calibration", type=Path, help="a text that passes and importance look at")
    parser.add_argument("--recovered", type=Path, help="a folder of `optimize recover`, of the only MODEL")
    parser.add_argument("--moved", action="store_true", help="move the weights off the grid of 4 bits by noise")
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    parser.add_argument("--types", nargs="*", default=TYPES, help="of llama.cpp")
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    parser.add_argument("--sizes", nargs="*", default=(), help="types whose size auto gets")
    parser.add_argument("--tokens", type=int, default=1024, help="of each text")
    parser.add_argument("--rounds", type=int, default=3, help="of speeds; 0: none")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prefix", nargs="*", default=(), help="a command before each timing, such as taskset -c 0")
    parser.add_argument("--peers", type=Path, help="the Python that has llama-cpp-python; made if it isn't given")
    parser.add_argument("--folder", type=Path, default=BUILD / "frontier", help="where files and bundles go")
    parser.add_argument("--json", type=Path, help="the result; benchmarks/results/frontier-* if left out")
    parser.add_argument("--page", type=Path, help="the page to write, with its chart beside it")
    options = parser.parse_args()
    if options.recovered is not None and len(options.models) > 1:
        parser.error("--recovered is of one model")
    options.folder.mkdir(parents=True, exist_ok=True)
    names = "-".join(model.stem.lower() for model in options.models)
    path = options.json or HERE / "results" / f"frontier-{names}-{date.today().isoformat()}.json"
    python = options.peers.absolute() if options.peers is not None else peers_python(BUILD / "peers")
    if (why := install(ENGINES["llama.cpp"], python)) is not None:
        print(why, file=sys.stderr)
        return 1
    calibrated_on = "this project's pages" if options.calibration is None else options.calibration.name
    if options.calibration is None:
        options.calibration = options.folder / "pages.txt"
        options.calibration.write_text(pages(), encoding="utf-8")

    here = {"date": date.today().isoformat(), "commit": commit(), "machine": {"threads": options.threads, **machine()}}
    abouts = {model.name: here for model in options.models}
    points = {model.name: dict[str, Point]() for model in options.models}
    for saved in json.loads(path.read_text())["models"] if path.exists() else []:
        name, its = saved["model"], {key: saved[key] for key in here}
        if name in abouts and its["machine"]["instruction_sets"] != here["machine"]["instruction_sets"]:
            print(f"{path}: {name} was measured on another machine; give another --json", file=sys.stderr)
            return 1
        points[name] = {p["name"]: Point(**p) for p in saved["points"]}
        abouts[name] = here if name in abouts else its

    def save() -> dict[str, Any]:
        results = {
            "command": " ".join(["benchmarks/frontier.py", *(m.name for m in options.models), *given(sys.argv[1:])]),
            "weights": "trained" if options.recovered is not None else "moved" if options.moved else "as in the file",
            "calibrated_on": calibrated_on,
            "calibration_tokens": options.calibration_tokens,
            "tokens": options.tokens,
            "models": [
                {"model": name, **abouts[name], "points": [asdict(p) for p in its.values()]}
                for name, its in points.items()
            ],
        }
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(unfinished, path)
        return results

    commands: list[tuple[Point, Command, Path]] = []
    for model in options.models:
        maker = Maker(model, options, python)
        work: dict[str, Callable[[], tuple[Path, float]]] = {
            name: partial(maker.theirs, name) for name in options.types
        }
        work |= {name: partial(maker.ours, name, load_recipe(name)) for name in options.recipes}
        work |= {f"auto at {name}": partial(maker.at_size_of, name) for name in options.sizes}
        its = points[model.name]
        for name, make in work.items():
            file, seconds = make()
            if name not in its:
                its[name] = Point(name, name not in options.types, maker.bits(file), maker.kl(file), seconds)
                print(model.name, its[name], file=sys.stderr)
                save()
            commands.append((its[name], maker.command(file, options.prefix), file))
    speed = Workload(threads=options.threads, batches=(1,))
    for _ in range(options.rounds):
        for point, command, file in commands:
            point.speeds.append(run(command.line("speed", file, speed)).figures["decode_1"])
        save()
    result = save()
    for model in result["models"]:
        print(model["model"], table(model), sep="\n\n")
    if options.page is not None:
        options.page.write_text(page(result), encoding="utf-8")
        options.page.with_suffix(".svg").write_text(drawing(result), encoding="utf-8")
    return 0


def given(arguments: Sequence[str]) -> list[str]:
    """Arguments without files' names and what says where files are."""
    words: list[str] = []
    left_out = True  # models come first
    for argument in arguments:
        if argument.startswith("--"):
            left_out = argument in ("--calibration", "--recovered", "--peers", "--folder", "--json", "--page")
        if not left_out:
            words.append(argument)
    return words


def pages() -> str:
    """This project's pages for users, one behind the other: a text to calibrate on."""
    return "\n\n".join(
        path.read_text(encoding="utf-8") for path in sorted((HERE.parent / "docs" / "use").rglob("*.md"))
    )


def write_floats(model: Path, target: Path, other: Callable[[str, np.ndarray, Any], np.ndarray] | None) -> None:
    """Writes a GGUF file as one of 32-bit floats; ``other`` gives a tensor in the place of one, by its name."""
    reader = gguf.GGUFReader(model)
    unfinished = target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, str(reader.fields["general.architecture"].contents()))
    copy_metadata(reader, writer)
    writer.add_file_type(FILE_TYPES["F32"])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values if other is None else other(tensor.name, values, reader))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(unfinished, target)


def moved(name: str, values: np.ndarray, reader: gguf.GGUFReader) -> np.ndarray:
    """A matrix with noise of up to half a step of 4 bits in each block of 32."""
    if values.ndim < 2:
        return values
    blocks = values.reshape(-1, 32)
    steps = (blocks.max(1, keepdims=True) - blocks.min(1, keepdims=True)) / 15
    noise = np.random.default_rng(list(name.encode())).uniform(-0.5, 0.5, blocks.shape)
    return (blocks + noise * steps).astype(np.float32).reshape(values.shape)


def names_of(reader: gguf.GGUFReader) -> dict[str, str]:
    """The names of modules, as Hugging Face's classes of any family have them -> a GGUF tensor's, without its end."""
    architecture = str(reader.fields["general.architecture"].contents())
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    blocks = int(reader.fields[f"{architecture}.block_count"].contents())
    return {module: name for module, (_, name) in gguf.get_tensor_name_map(kind, blocks).mapping.items()}


def recovered_tensors(folder: Path) -> Callable[[str, np.ndarray, Any], np.ndarray]:
    """Gives the trained tensor for a name of a GGUF file. Rows of q and k of a Llama lie there in another order."""
    from safetensors.numpy import load_file

    trained = load_file(folder / "weights.safetensors")

    def give(name: str, values: np.ndarray, reader: gguf.GGUFReader) -> np.ndarray:
        stem, _, kind = name.rpartition(".")
        known = [m for m, n in names_of(reader).items() if n == stem]
        if stem == "token_embd":  # a head that is the table too is trained as the head
            known.append("lm_head")
        module = next((m for m in known if f"{m}.{kind}" in trained), None)
        if module is None:
            raise SystemExit(f"{folder} has nothing for {name}")
        rows = trained[f"{module}.{kind}"]
        architecture = str(reader.fields["general.architecture"].contents())
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            count = "head_count" if module.endswith("q_proj") else "head_count_kv"
            heads = int(reader.fields[f"{architecture}.attention.{count}"].contents())
            rows = rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        if rows.shape != values.shape:
            raise SystemExit(f"{folder}: {name} is {rows.shape}, and was {values.shape}")
        return np.ascontiguousarray(rows, np.float32)

    return give


class Maker:
    """Makes files and bundles of one source, and compares them with it."""

    def __init__(self, model: Path, options: argparse.Namespace, python: Path) -> None:
        self.options, self.python, self.folder = options, python, options.folder.resolve() / model.stem.lower()
        self.folder.mkdir(exist_ok=True)
        self.source = self.folder / "source.gguf"
        if not self.source.exists():
            other = moved if options.moved else None
            write_floats(
                model, self.source, other if options.recovered is None else recovered_tensors(options.recovered)
            )
        self.texts = {"package": PACKAGED.read_text(encoding="utf-8")}
        topics: Mapping[str, str] = pydoc_data.topics.topics
        self.texts["python"] = "\n\n".join(topics[key] for key in ("objects", "execmodel", "naming", "exceptions"))
        self._captured: CapturedModel | None = None
        self._search: FormatSearch | None = None
        self._referenced: dict[str, Path] | None = None

    @property
    def captured(self) -> CapturedModel:
        """The source as the passes see it."""
        if self._captured is None:
            self._captured = capture(self.source)
        return self._captured

    @property
    def sequences(self) -> list[torch.Tensor]:
        """The calibration tokens."""
        section, files = CalibrationSection(tokens=self.options.calibration_tokens), self.captured.tokenizer_files
        assert files is not None
        tokenizer, vocabulary = Tokenizer(files), self.captured.model_info.vocab_size
        return list(
            read_sequences(self.options.calibration, tokenizer, vocabulary, section.tokens, section.sequence_length)
        )

    @property
    def reference(self) -> Path:
        """The source in 32-bit floats."""
        return self.ours("f32", load_recipe("f32"))[0]

    def ours(self, name: str, recipe: Recipe) -> tuple[Path, float]:
        """The bundle of a recipe, and the seconds of its export."""
        bundle, start = self.folder / f"{name.replace(' ', '-')}.bundle", time.perf_counter()
        if not bundle.exists():
            if recipe.exact:
                enginewright.export(self.source, bundle, recipe=recipe)
            else:
                looked_at = CalibrationSection(tokens=self.options.calibration_tokens)
                wide = recipe.model_copy(update={"budget": WIDE, "calibration": looked_at})
                calibration = self.options.calibration if recipe.calibrated else None
                enginewright.export(self.source, bundle, recipe=wide, calibration=calibration)
        return bundle, time.perf_counter() - start

    def theirs(self, kind: str) -> tuple[Path, float]:
        """The file of a type, and the seconds that quantizing took."""
        target, start = self.folder / f"{kind}.gguf", time.perf_counter()
        if not target.exists():
            command = [self.python, "-m", "peers.quantize", self.source, target, kind, self.importance()]
            subprocess.run([*map(str, command)], check=True, cwd=HERE, env=environment(), stderr=subprocess.DEVNULL)
        return target, time.perf_counter() - start

    def importance(self) -> Path:
        """A file with the mean squares of what each matrix is multiplied with."""
        path = self.folder / "importance.npz"
        if path.exists():
            return path
        program = self.captured.program.copy()
        PassManager(
            split_before(default_pipeline(), "fuse_qkv")[0],
            pass_context(load_recipe("f32"), frozenset(), (), scratch=None, progress=silent),
        ).run(program)
        names = names_of(gguf.GGUFReader(self.source))
        sums: dict[str, np.ndarray] = {}

        def observe(node: torch.fx.Node, value: Any) -> None:
            if node in inputs:
                squares = value.reshape(-1, value.shape[-1]).square().mean(0).numpy()
                for module in inputs[node]:
                    if module in names:
                        sums[f"{names[module]}.weight"] = squares

        inputs: dict[torch.fx.Node, list[str]] = {}
        for node in program.nodes_of(*LINEARS):
            argument = node.args[0]
            assert isinstance(argument, torch.fx.Node)
            inputs.setdefault(argument, []).extend(node.meta[WHERE])
        fast = FastEvaluation(program, WeightCache())
        fast.evaluate(packed_inputs(program, self.sequences), observe)
        if not sums:
            raise SystemExit(f"{self.source} has no products whose modules llama.cpp's tensors are named after")
        np.savez(path, **sums)
        return path

    def at_size_of(self, kind: str) -> tuple[Path, float]:
        """``auto`` with the bytes of a type as its budget, searched once for all."""
        name = f"auto at {kind}"
        bundle = self.folder / f"{name.replace(' ', '-')}.bundle"
        if bundle.exists():
            return bundle, 0.0
        most = weight_bytes(self.theirs(kind)[0])
        if self._search is None:
            budget = BudgetSection(max_bytes=most)
            recipe = Recipe(name="auto", weights=WeightFormats(method="gptq"), budget=budget, auto=AutoSection())
            sequences = self.sequences
            measuring, checks = held_out(self.captured, sequences, "auto")
            context = pass_context(recipe, frozenset(), sequences, scratch=None, progress=silent)
            parameters = self.captured.model_info.parameters
            self._search = FormatSearch(
                Task(self.captured.program, recipe, parameters, measuring, checks, context, silent)
            )
            self._search.prepare()
        assignment = least_cost(self._search.options, most - self._search.fixed)
        if assignment is None:
            raise SystemExit(f"no choice of formats is as small as {kind}: {most:,} bytes")
        return self.ours(name, self._search.applied(assignment))

    def bits(self, file: Path) -> float:
        """Bits a weight, of all that is stored."""
        return 8 * weight_bytes(file) / self.captured.model_info.parameters

    def command(self, file: Path, prefix: Sequence[str] = ()) -> Command:
        """The worker that runs a GGUF file, or a bundle."""
        if file.is_dir():
            return Command(Path(sys.executable), "ours", tuple(prefix))
        return Command(self.python, ENGINES["llama.cpp"].worker, tuple(prefix))

    def kl(self, file: Path) -> dict[str, float]:
        """KL from the source on each text, in nats a token."""
        if self._referenced is None:
            self._referenced = {name: self.folder / f"reference-{name}.npz" for name in self.texts}
            if not all(reference.exists() for reference in self._referenced.values()):
                with LLM(self.reference, memory="512MiB") as llm:
                    for name, text in self.texts.items():
                        ids = llm.tokenizer.encode(text)[: self.options.tokens]
                        np.savez(self._referenced[name], ids=np.asarray(ids, np.int32), logits=llm.logits(ids))
        reports: dict[str, Report] = {
            name: run(self.command(file).line("logits", file, Workload(), "--reference", str(reference)))
            for name, reference in self._referenced.items()
        }
        return {name: report.figures["kl"] for name, report in reports.items()}


def weight_bytes(file: Path) -> int:
    """The bytes of all tensors of a GGUF file, or of a bundle."""
    if file.is_dir():
        return sum(t.bytes for n, t in Bundle.open(file).index.tensors.items() if not n.endswith(RECORDS))
    return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors)


def frontier(points: Sequence[Mapping[str, Any]], cost: Callable[[Any], float]) -> list[Mapping[str, Any]]:
    """The points that no other one beats at the same or a lower cost."""
    best: list[Mapping[str, Any]] = []
    for point in sorted(points, key=lambda p: (cost(p), worst(p))):
        if not best or worst(point) < worst(best[-1]):
            best.append(point)
    return best


def worst(point: Mapping[str, Any]) -> float:
    """The KL on the text where it is larger."""
    return max(point["kl"].values())


def beaten(model: Mapping[str, Any]) -> list[tuple[str, str | None, float | None]]:
    """Each of their types with the best of ours that takes no more bits, and our KL over theirs; None without one."""
    ours = [p for p in model["points"] if p["ours"]]
    pairs: list[tuple[str, str | None, float | None]] = []
    for point in (p for p in model["points"] if not p["ours"]):
        fitting = [p for p in ours if p["bits"] <= point["bits"] * (1 + NEAR)]
        best = min(fitting, key=worst, default=None)
        pairs.append(
            (point["name"], None, None) if best is None else (point["name"], best["name"], worst(best) / worst(point))
        )
    return pairs


def table(model: Mapping[str, Any]) -> str:
    """All points, by their size."""
    lines = [
        line(("of", "", "bits a weight", "KL, package's text", "KL, Python's", "tokens/s")),
        line(("---", "---", *["---:"] * 4)),
    ]
    for p in sorted(model["points"], key=lambda p: p["bits"]):
        speed = f"{statistics.median(p['speeds']):,.0f}" if p["speeds"] else ""
        kls = [f"{p['kl'][text]:.3g}" for text in ("package", "python")]
        lines.append(line(("ours" if p["ours"] else "llama.cpp", p["name"], f"{p['bits']:.2f}", *kls, speed)))
    return "\n".join(lines)


def page(result: Mapping[str, Any]) -> str:
    """benchmarks/notes/frontier.md."""
    how = {
        "trained": ", trained on by `optimize recover`",
        "moved": ", weights moved off the grid of their file by noise of up to half a step",
        "as in the file": "",
    }[result["weights"]]
    models = "\n\n".join(
        f"## {model['model']}\n\n{_where(model)}\n\n{table(model)}\n\n{comparison(model, result['weights'])}"
        for model in result["models"]
    )
    return f"""# Quality at every size

`python benchmarks/frontier.py` makes this page. It shows the KL divergence from 32-bit floats, on the first
{result["tokens"]:,} tokens of two texts that nothing was calibrated on: the package's, and Python's language reference.

- {" and ".join(model["model"] for model in result["models"])}{how}.
- llama.cpp's types have an importance matrix. It and our recipes saw the same {result["calibration_tokens"]:,}
  calibration tokens, of {result["calibrated_on"]}.
- *auto at* a type is our recipe `auto`, whose budget are the bytes of that type's weights.
- Bits a weight are those of all that is stored, tables of tokens included. Speed is that of decoding one request, the
  median of rounds in which all ran in turn.
- In the chart KL is the one on the text where it is larger.

![KL by bits a weight and by speed](frontier.svg)

{models}
"""


def _where(model: Mapping[str, Any]) -> str:
    machine = model["machine"]
    sets = (
        "AVX-512"
        if "avx512f" in machine["instruction_sets"]
        else "AVX2"
        if "avx2" in machine["instruction_sets"]
        else ""
    )
    return f"{machine['processor']}{' with ' + sets if sets else ''}, {machine['threads']} threads; {model['date']}."


def comparison(model: Mapping[str, Any], weights: str) -> str:
    """Compares each type of llama.cpp with the best of our points of its size, as a table."""
    if weights == "as in the file":
        return "The weights come from a file of 4 bits: types on its grid are nearly free, so nothing is compared."
    compared = beaten(model)
    above = [name for name, _, ratio in compared if ratio is not None and ratio > 1]
    smaller = [name for name, ours, _ in compared if ours is None]
    sentences = [
        f"At the size of each of their types, the best of ours that takes at most {100 * NEAR:.0f} % more bits. "
        "KL is the one on the text where it is larger.\n",
        line(("their type", "ours", "KL, ours over theirs")),
        line(("---", "---", "---:")),
        *(line((f"`{n}`", ours or "", f"{ratio:.2f}")) for n, ours, ratio in compared if ratio is not None),
        f"\nTheirs is below ours at the size of {', '.join(above)}." if above else "\nTheirs is nowhere below ours.",
        f"Nothing of ours is as small as {', '.join(smaller)}." if smaller else "",
    ]
    return "\n".join(part for part in sentences if part)


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 64, 24, 44, 46


def drawing(result: Mapping[str, Any]) -> str:
    """KL, as powers of ten, by bits a weight and by speed: a row for each model, as SVG."""
    parts: list[str] = []
    for row, model in enumerate(result["models"]):
        speeds = all(p["speeds"] for p in model["points"])
        parts += panel(model, "bits a weight", lambda p: float(p["bits"]), 0, row * HEIGHT)
        if speeds:
            parts += panel(model, "tokens a second", lambda p: statistics.median(p["speeds"]), WIDTH, row * HEIGHT)
    width, height = 2 * WIDTH, HEIGHT * len(result["models"])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    back = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head + 'font-family="sans-serif" font-size="12" fill="#57606a">', back, *parts, "</svg>", ""])


def panel(model: Mapping[str, Any], label: str, value: Callable[[Any], float], right: int, down: int) -> list[str]:
    """A model's KL by a value of its points; lines join those that none of the same maker's is better than in both."""
    points = model["points"]
    values, kls = [value(p) for p in points], [worst(p) for p in points]
    room = 0.06 * (max(values) - min(values)) or 1.0
    low, high = min(values) - room, max(values) + room
    bottom, top = np.floor(np.log10(min(kls))), np.ceil(np.log10(max(kls)))
    fewer = label == "bits a weight"

    def x(of: float) -> float:
        return round(LEFT + (of - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def y(kl: float) -> float:
        return round(TOP + (top - np.log10(kl)) / (top - bottom) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<g transform="translate({right} {down})">']
    parts.append(f'<text x="{LEFT}" y="24" font-size="14" fill="#24292f">{model["model"]}</text>')
    for power in range(int(bottom), int(top) + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{LEFT} {at}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{10.0**power:g}</text>')
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if (high - low) / step <= 10)
    for tick in range(step * int(np.ceil(low / step)), int(high) + 1, step):
        parts.append(f'<text x="{x(tick)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{label}</text>')
    for ours, color, who in ((True, "#0969da", "Enginewright"), (False, "#bc4c00", "llama.cpp")):
        mine = [p for p in points if p["ours"] is ours]
        best = frontier(mine, value if fewer else lambda p: -value(p))
        path = "L".join(f"{x(value(p))} {y(worst(p))}" for p in best)
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT - 8}" y="{14 if ours else 32}" text-anchor="end" fill="{color}">{who}</text>'
        )
        for p in mine:
            place = x(value(p)), y(worst(p))
            parts.append(f'<circle cx="{place[0]}" cy="{place[1]}" r="3.5" fill="{color}"/>')
            parts.append(
                f'<text x="{place[0] + (0 if ours else 6)}" y="{place[1] + (15 if ours else -5)}" font-size="10" '
                f'fill="{color}">{p["name"]}</text>'
            )
    return [*parts, "</g>"]


if __name__ == "__main__":
    sys.exit(main())
