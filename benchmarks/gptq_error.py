"""The errors that GPTQ leaves, ||X W^T - X Q^T|| / ||X W^T||: ours beside llm-compressor's, of the same layers.

    pip install --no-deps --target PEER llmcompressor==0.14.0.1 compressed-tensors==0.20.0 loguru datasets accelerate \\
        pandas python-dateutil tzdata pyarrow dill multiprocess xxhash psutil
    PYTHONPATH=PEER python benchmarks/gptq_error.py MODEL TEXT [--tokens 2048] [--output FILE.json]

(--no-deps, and a folder of its own: llm-compressor's pins exclude the transformers that Enginewright needs.)

Both get the same weights, the same X^T X, 4 bits in the same groups, symmetric or with offsets, 1 % damping and columns
in the order of activations with groups that stay together, which is llm-compressor's default. It takes scales from an
observer: its default has the range of a group ("minmax"), another searches for the least error ("mse"). Its scales stay
32-bit floats, ours are float16. torchao's GPTQ runs on GPUs alone.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.observers import Observer
from torch.fx.node import Node

from enginewright.optimizer.calibration.text_file import read_sequences
from enginewright.optimizer.capture import capture
from enginewright.optimizer.pipeline.pipeline import default_pipeline
from enginewright.passes.formats.round_to_4_bits import round_symmetric, round_with_offsets
from enginewright.passes.framework.fast_evaluation import FastEvaluation, WeightCache
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.token_sequences import packed_inputs
from enginewright.passes.ir.prequantized import CodeFormat, Codes, decode
from enginewright.passes.ir.program import Program
from enginewright.passes.quantization.gptq import Hessian, factorize, gptq
from enginewright.runtime.text.tokenizer import Tokenizer

# A GGUF of Q4_1 blocks lies on a grid of 4 bits with offsets in groups of 32, which any rounding finds again.
FORMATS = (CodeFormat(4, 32), CodeFormat(4, 64), CodeFormat(4, 64, offsets=True))
OBSERVERS = {"minmax": "memoryless_minmax", "mse": "memoryless_mse"}


@dataclass(frozen=True)
class LayerErrors:
    """Relative errors of one layer's output; ``theirs`` by observer."""

    layer: str
    columns: int
    group_size: int
    offsets: bool
    nearest: float
    ours: float
    theirs: dict[str, float]

    def is_of(self, code_format: CodeFormat) -> bool:
        """Returns True if the integers have this format."""
        return (self.group_size, self.offsets) == (code_format.group_size, code_format.offsets)


def compare(weight: torch.Tensor, hessian: torch.Tensor, layer: str, code_format: CodeFormat) -> LayerErrors:
    """weight [N, K] and X^T X [K, K] under each method."""
    exact, whole = weight.double(), hessian.double()
    size = float(((exact @ whole) * exact).sum())

    def error(rounded: torch.Tensor) -> float:
        off = rounded.double() - exact
        return math.sqrt(max(float(((off @ whole) * off).sum()), 0.0) / size)

    groups = weight.unflatten(-1, (-1, code_format.group_size))
    values, *factors = round_with_offsets(groups) if code_format.offsets else round_symmetric(groups)
    nearest = Codes(values.flatten(-2), *factors)
    return LayerErrors(
        layer=layer,
        columns=weight.shape[1],
        group_size=code_format.group_size,
        offsets=code_format.offsets,
        nearest=error(decode(nearest, code_format)),
        ours=error(decode(gptq(weight, hessian, code_format, factorize(hessian, damping=0.01)), code_format)),
        theirs={name: error(peer(weight, hessian, code_format, kind)) for name, kind in OBSERVERS.items()},
    )


def peer(weight: torch.Tensor, hessian: torch.Tensor, code_format: CodeFormat, observer: str) -> torch.Tensor:
    """The weights that llm-compressor's integers stand for, [N, K]; called as its GPTQModifier calls it."""
    arguments = QuantizationArgs(
        num_bits=4,
        type="int",
        symmetric=not code_format.offsets,
        strategy="group",
        group_size=code_format.group_size,
        actorder="static",
        observer=observer,
    )
    watching = Observer.load_from_registry(observer, base_name="weight", args=arguments)
    watching(weight)
    parameters = watching.get_qparams()
    quantized, _, gave_up = quantize_weight(
        weights=weight.clone()[None],
        hessians=hessian.clone()[None],
        scale=parameters["scale"][None],
        zero_point=parameters["zero_point"][None],
        global_scale=None,
        quant_args=arguments,
    )
    assert not gave_up.any(), "llm-compressor rounded to the nearest"
    return quantized[0]


def layers(program: Program, sequences: Sequence[torch.Tensor]) -> Iterator[tuple[str, Node, torch.Tensor]]:
    """Every linear of the layers with X^T X of its inputs, which are those of the model in floats."""
    fast = FastEvaluation(program, WeightCache(0))
    rows: list[tuple[str, Node, torch.Tensor]] = []

    def compute(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if node.target is torch.ops.ew.linear.default and node is not program.logits:
            hessian = Hessian(args[0].shape[-1])
            hessian.add(args[0])
            rows.append((" + ".join(node.meta["where"]), node, hessian.sum))
        return fast.compute(node, args, kwargs)

    inputs = packed_inputs(program, sequences)
    program.evaluate(inputs, compute=compute, read=fast.read)
    yield from rows


def main() -> None:
    """Compares all layers and prints a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder or a GGUF file")
    parser.add_argument("text", type=Path, help="calibration text")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--every", type=int, default=1, help="take every n-th linear")
    parser.add_argument("--output", type=Path, help="a JSON file for all figures")
    arguments = parser.parse_args()
    captured = capture(arguments.model)
    program, files = captured.program, captured.tokenizer_files
    passes = default_pipeline()
    end = next(i for i, p in enumerate(passes) if p.name == "choose_formats")
    PassManager(passes[:end]).run(program)
    tokenizer = None if files is None else Tokenizer(files)
    sequences = read_sequences(arguments.text, tokenizer, captured.model_info.vocab_size, arguments.tokens, 256)
    about: dict[str, Any] = {
        "model": arguments.model.name,
        "tokens": sum(len(s) for s in sequences),
        "peer": f"llmcompressor {version('llmcompressor')}",
        "torch": version("torch"),
    }
    results: list[LayerErrors] = []
    start = time.perf_counter()
    for name, node, hessian in list(layers(program, sequences))[:: arguments.every]:
        expr = program.weight_of(node.args[1])
        assert expr is not None
        weight = expr.evaluate().float()
        results.extend(compare(weight, hessian, name, code_format) for code_format in FORMATS)
        print(f"{len(results) // len(FORMATS):4} {name:.100}", flush=True)
        about["summaries"] = [summary([r for r in results if r.is_of(f)]) for f in FORMATS]
        about["layers"] = [asdict(r) for r in results]
        if arguments.output is not None:  # again after each layer: it may take a while
            arguments.output.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    for one in about["summaries"]:
        print(json.dumps(one))
    print(f"{time.perf_counter() - start:.0f} s")


def summary(results: Sequence[LayerErrors]) -> dict[str, Any]:
    """Geometric means of the errors, and on how many layers ours is no larger, by observer."""

    def mean(values: Sequence[float]) -> float:
        return round(math.exp(sum(map(math.log, values)) / len(values)), 5)

    return {
        "group_size": results[0].group_size,
        "offsets": results[0].offsets,
        "layers": len(results),
        "nearest": mean([r.nearest for r in results]),
        "ours": mean([r.ours for r in results]),
        "theirs": {name: mean([r.theirs[name] for r in results]) for name in OBSERVERS},
        "ours_is_at_most_theirs": {name: sum(r.ours <= r.theirs[name] for r in results) for name in OBSERVERS},
        "largest_ratio": {name: round(max(r.ours / r.theirs[name] for r in results), 4) for name in OBSERVERS},
    }


if __name__ == "__main__":
    main()
