"""The savings and costs of 2:4 sparsity: kernels in every storage type, and a model pruned by each method.

    python benchmarks/sparsity.py [--rows 1 8 512] [--rounds 7] [--threads 2] [--kernels-only]
    python benchmarks/sparsity.py --model-only [--model PATH] [--storage int8] [--methods magnitude wanda sparsegpt]

Kernels: linears of 2048 x 2048 whose weights together exceed any cache, dense and sparse interleaved, each round
with a ratio of the two; activations are quantized or rounded ahead. The median of the ratios is printed, beside that
of the bytes, with the smallest and the largest. Model: SmolLM2-135M-Instruct, or --model, as each method would make
it, compared with its source on the built-in text, of which another part is for calibration.

Everything is written to a JSON file in build/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from peers.loading import BUILD, load_module

from enginewright.optimizer.capture import capture
from enginewright.optimizer.measure.windows import split_prefix
from enginewright.optimizer.pipeline.pipeline import choose_passes, split_before
from enginewright.optimizer.search.measure_choices import Check
from enginewright.optimizer.verify.text import evaluation_text
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.base import PassContext
from enginewright.passes.framework.manager import PassManager
from enginewright.passes.framework.pass_options import PassOptions
from enginewright.passes.framework.weight_formats import Sparsify, WeightFormats
from enginewright.passes.quantization.choose_formats import ChooseFormats
from enginewright.plugins.native.executable import CpuProgram
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.dtypes import Dtype
from enginewright.runtime.shared.lowered_program import (
    Affine,
    Buffer,
    LoweredProgram,
    Operand,
    Step,
    WeightUse,
)
from enginewright.runtime.shared.panel_layouts import Layout
from enginewright.runtime.shared.step_costs import stored_bytes
from enginewright.runtime.shared.weight_formats import FORMATS, Storage
from enginewright.runtime.text.tokenizer import Tokenizer

SIZE = 2048
GROUP = 32
WINDOW, MEASURED = 128, 8
"""Tokens of a window of text, and windows that are compared."""
DENSE_BYTES = 1 << 28
"""The bytes of all weights of a program together: more than the caches of most machines."""
STORAGES: dict[Storage, tuple[Dtype, Layout]] = {
    "f32": ("f32", "panel32"),
    "bf16": ("bf16", "panel32x2"),
    "int8": ("i8", "panel32x4"),
    "int4": ("i4", "panel32x8"),
}
METHODS = ("dense", "magnitude", "wanda", "sparsegpt")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_BYTES = {"f32": 4, "bf16": 2, "i8": 1, "i32": 4}
_T, _R, _ONE = Affine(t=1), Affine(r=1), Affine(1)


@dataclass
class KernelRow:
    """Sparse against dense of one storage type. ``ratios``: time of dense / time of sparse, of each round."""

    storage: str
    rows: int
    bytes_share: float
    gigabytes_per_second: float = 0.0
    ratios: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The speed of sparse kernels relative to dense ones."""
        return statistics.median(self.ratios)


def main() -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 512])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--storages", nargs="+", choices=list(STORAGES), default=list(STORAGES))
    parser.add_argument("--model", type=Path, help="a Hugging Face folder or a GGUF file; SmolLM2 if left out")
    parser.add_argument("--storage", choices=list(STORAGES), default="int8", help="of the model's weights")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=2048, help="of the calibration, from the built-in text")
    parser.add_argument("--kernels-only", action="store_true")
    parser.add_argument("--model-only", action="store_true")
    parser.add_argument("--output", type=Path, default=BUILD / "sparsity.json")
    args = parser.parse_args()
    results: dict[str, object] = {"threads": args.threads}
    if not args.model_only:
        kernels = [kernel_row(s, n, args.rounds, args.threads) for s in args.storages for n in args.rows]
        print("storage  rows  bytes  speed (smallest to largest)  sparse GB/s")
        for row in kernels:
            print(
                f"{row.storage:7}{row.rows:6}{row.bytes_share:7.2f}{row.ratio:7.2f}x ({min(row.ratios):.2f} to "
                f"{max(row.ratios):.2f}){row.gigabytes_per_second:14.1f}"
            )
        results["kernels"] = [asdict(row) | {"ratio": row.ratio} for row in kernels]
    if not args.kernels_only:
        model = args.model or load_module("fetch_model", EXAMPLES / "fetch_model.py").fetch()
        results["model"] = model_kl(model, args.storage, args.methods, args.tokens)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


def formats_of(storage: Storage, method: str) -> WeightFormats:
    """All linears sparse by ``method``, or dense; tables and head dense."""
    groups = (GROUP, GROUP) if storage.startswith("int") else (0, 0)
    dense = WeightFormat(
        storage=storage,
        group_size=groups[0],
        zero_point=False,
        activation=FORMATS[storage].activation,
        activation_group_size=groups[1],
    )
    if method == "dense":
        return WeightFormats(default=dense)
    sparse = dense.model_copy(update={"sparsity": "2:4"})
    return WeightFormats(default=sparse, embeddings=dense, sparsify=cast(Sparsify, method))


def model_kl(model: Path, storage: Storage, methods: Sequence[str], tokens: int) -> dict[str, float]:
    """Mean KL to the source of the program that each method would emit, on windows of the built-in text.

    Every second window is for calibration, of ``tokens`` in all; MEASURED of the others are what is compared.
    """
    captured = capture(model)
    assert captured.tokenizer_files is not None, "the model has no tokenizer"
    prefix, ids = split_prefix(Tokenizer(captured.tokenizer_files), evaluation_text())
    room = WINDOW - len(prefix)
    windows = [torch.tensor([*prefix, *ids[s : s + room]]) for s in range(0, len(ids) - room, room)]
    calibration, rest = windows[::2][: max(1, tokens // WINDOW)], windows[1::2]
    passes, _ = choose_passes({})
    before, later = split_before(passes, ChooseFormats.name)
    PassManager(before, PassContext()).run(captured.program)
    context = PassContext(calibration=tuple(calibration))
    check = Check(captured.program, later, context, {"text": rest[:MEASURED]})
    kl = {}
    for method in methods:
        options = PassOptions(weights=formats_of(storage, method))
        kl[method] = check.measure(replace(context, recipe=options))["text"]
        print(f"{storage} {method:10} mean KL {kl[method]:.4f}", flush=True)
    return kl


def kernel_row(storage: Storage, rows: int, rounds: int, threads: int) -> KernelRow:
    """Times dense and sparse interleaved."""
    dtype, layout = STORAGES[storage]
    dense_bytes = stored_bytes(WeightUse(name="w", dtype=dtype, shape=(SIZE, SIZE), layout=layout))
    count = max(1, (DENSE_BYTES if rows < 64 else DENSE_BYTES // 8) // dense_bytes)
    programs = [linears(dtype, kind, count) for kind in (layout, "sparse32")]
    runners = [CpuProgram(p, contents(p), blocks={}, threads=threads) for p in programs]
    sizes = [sum(stored_bytes(u) for u in p.weights if u.name != "table") for p in programs]
    row, seconds = KernelRow(storage, rows, sizes[1] / sizes[0]), 0.0
    step = step_of(rows)
    for turn in range(rounds + 1):
        times = [float(r.profile(step)[1][-count - 1 : -1].sum()) for r in runners]
        if turn:  # the first warms up
            row.ratios.append(times[0] / times[1])
            seconds += times[1]
    row.gigabytes_per_second = sizes[1] * rounds / seconds / 1e9
    return row


def step_of(rows: int) -> StepInput:
    """One request of that many tokens, the last of which is sampled."""
    ids = np.zeros(rows, np.int32)
    return StepInput(
        ids=ids,
        positions=np.arange(rows, dtype=np.int32),
        q_start=np.asarray([0, rows], np.int32),
        kv_len=np.asarray([rows], np.int32),
        block_table={},
        slots={},
        rows=np.asarray([rows - 1], np.int32),
    )


def contents(program: LoweredProgram) -> Mapping[str, npt.NDArray[np.generic]]:
    """Memory for its weights that is really there: each byte is 27, which is a small number in every type."""
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for use in program.weights:
        size = stored_bytes(use)
        memory = np.full(size + 64, 27, np.uint8)
        start = -memory.ctypes.data % 64
        arrays[use.name] = memory[start : start + size]
    return arrays


def linears(dtype: Dtype, layout: Layout, count: int) -> LoweredProgram:
    """``count`` products of one input; the last step takes the sampled row of the last."""
    weights: list[WeightUse] = [WeightUse(name="table", dtype="f32", shape=(1, SIZE), layout="rows")]
    buffers: list[Buffer] = []
    steps: list[Step] = []
    arena = Affine()

    def buffer(kind: Dtype, columns: int, rows: Affine = _T) -> Operand:
        nonlocal arena
        size = rows * (columns * _BYTES[kind])
        buffers.append(Buffer(name=f"b{len(buffers)}", size=size, offset=arena))
        arena = arena + size
        return operand("buffer", buffers[-1].name, kind, rows, columns)

    hidden, out, logits = buffer("f32", SIZE), buffer("f32", SIZE), buffer("f32", SIZE, _R)
    ids = Operand(kind="input", name="ids", dtype="i32", shape=(_T,), strides=(_ONE,))
    table = operand("weight", "table", "f32", _ONE, SIZE)
    steps.append(Step(op="embedding", inputs=(ids, table), outputs=(hidden,)))
    inputs: tuple[Operand, ...] = (hidden,)
    op, attributes = "linear", dict[str, int]()
    if dtype == "bf16":
        inputs = (buffer("bf16", SIZE),)
        steps.append(Step(op="cast_bf16", inputs=(hidden,), outputs=inputs))
    elif dtype in ("i8", "i4"):
        inputs = (buffer("i8", SIZE), buffer("f32", SIZE // GROUP), buffer("i32", SIZE // GROUP))
        steps.append(Step(op="quantize_activation", inputs=(hidden,), outputs=inputs, attrs={"group_size": GROUP}))
        op, attributes = "quantized_linear", {"weight_group": GROUP, "activation_group": GROUP}
    for i in range(count):
        weights.append(WeightUse(name=f"w{i}", dtype=dtype, shape=(SIZE, SIZE), layout=layout))
        operands = [operand("weight", f"w{i}", dtype, Affine(SIZE), SIZE)]
        if op == "quantized_linear":
            weights.append(WeightUse(name=f"s{i}", dtype="f16", shape=(SIZE, SIZE // GROUP), layout="panel32"))
            operands.append(operand("weight", f"s{i}", "f16", Affine(SIZE), SIZE // GROUP))
        steps.append(Step(op=op, inputs=(*inputs, *operands), outputs=(out,), attrs=dict(attributes)))
    sampled = Operand(kind="input", name="rows", dtype="i32", shape=(_R,), strides=(_ONE,))
    steps.append(Step(op="take_rows", inputs=(out, sampled), outputs=(logits,)))
    return LoweredProgram(
        cache_groups=(),
        weights=tuple(weights),
        buffers=tuple(buffers),
        steps=tuple(steps),
        outputs={"logits": logits},
        arena_bytes=arena,
    )


def operand(kind: str, name: str, dtype: Dtype, rows: Affine, columns: int) -> Operand:
    """A dense [rows, columns]."""
    shape, strides = (rows, Affine(columns)), (Affine(columns), _ONE)
    return Operand(kind=kind, name=name, dtype=dtype, shape=shape, strides=strides)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
