"""The distance of a model's linears from their bounds: read bandwidth for few rows, the multiply peak for many.

    python benchmarks/linear.py [--storages int8 int4 int4-offsets] [--rows 1 8 512] [--model smol] [--isa avx2]

Programs of one model's linears alone, of SmolLM2-135M or of a Llama of 1 billion parameters, each layer with weights
of its own so that caches flatter no more than they do in the model; activations are quantized or rounded ahead. Each
round runs every number of rows once; seconds are those of the program's steps, the median of the rounds. In the same
run a loop reads as many bytes as the model's weights, and one multiplies in registers alone. Above 64 rows the head has
one row only, as in a prefill, and is left out of its sums.

Everything is written to a JSON file in build/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from peers.loading import BUILD
from sparsity import GROUP, contents, operand, step_of

from enginewright.plugins.cpu import _cpu
from enginewright.plugins.native.executable import CpuProgram, isas
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.dtypes import Dtype
from enginewright.runtime.shared.lowered_program import Affine, Buffer, LoweredProgram, Operand, Step, WeightUse
from enginewright.runtime.shared.panel_layouts import Layout
from enginewright.runtime.shared.step_costs import stored_bytes
from enginewright.runtime.shared.weight_formats import FORMATS

_BYTES = {"f32": 4, "bf16": 2, "i8": 1, "i32": 4}
_T, _R, _ONE = Affine(t=1), Affine(r=1), Affine(1)
PREFILL = 64
"""More rows than these are a prefill: the head is one row."""


@dataclass(frozen=True)
class Model:
    """Shapes [N, K] of a layer's linears and of the head; ``layers`` that are timed, of ``all_layers``."""

    linears: dict[str, tuple[int, int]]
    head: tuple[int, int]
    layers: int
    all_layers: int


MODELS = {
    "smol": Model(
        {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}, (49152, 576), 30, 30
    ),
    "1b": Model(
        {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)}, (49152, 2048), 4, 16
    ),
}


@dataclass
class Row:
    """One kind of linear at a number of rows: the median of its seconds in all layers that were timed."""

    model: str
    storage: str
    linear: str
    rows: int
    bytes: int
    multiply_adds: int
    rounds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)

    @property
    def gigabytes(self) -> float:
        """10^9 bytes of weights and scales a second."""
        return self.bytes / self.seconds / 1e9

    @property
    def giga_multiply_adds(self) -> float:
        return self.multiply_adds / self.seconds / 1e9


def main() -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--storages", nargs="+", choices=list(STORAGES), default=["int8", "int4"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 512])
    parser.add_argument("--layers", type=int, default=0, help="that are timed; 0: as many as the caches can't hold")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", choices=isas(), default=isas()[0])
    parser.add_argument("--output", type=Path, default=BUILD / "linear.json")
    args = parser.parse_args()
    runs = []
    for name in args.model:
        model = replace(MODELS[name], layers=args.layers or MODELS[name].layers)
        for storage in args.storages:
            runner, rows = measure(name, model, storage, args.rows, args.rounds, args.threads, args.isa)
            made_of = storage if storage in ("f32", "bf16") else "i8"
            peak = _cpu.measure_peak(made_of, args.threads, runner.isa)
            size = sum(stored_bytes(u) for u in runner.lowered.weights if not u.name.startswith("table"))
            bandwidth = _cpu.measure_bandwidth(size, args.threads)
            print(f"\n{name} {storage} {runner.isa}, {args.threads} threads, {size / 1e6:.0f} MB of weights: ", end="")
            print(f"{bandwidth:.1f} GB/s, {peak:.0f} G multiply-adds/s")
            print_rows(rows, model, bandwidth, peak)
            measured = [asdict(r) | {"seconds": r.seconds} for r in rows]
            runs.append({"bandwidth": bandwidth, "peak": peak, "threads": args.threads, "rows": measured})
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    return 0


STORAGES: dict[str, tuple[Dtype, Layout, bool]] = {
    name + ("-offsets" if offsets else ""): (of.shifted if offsets and of.shifted else of.dtype, of.layout, offsets)
    for name, of in FORMATS.items()
    for offsets in ((False, True) if of.shifted else (False,))
    if of.layout is not None and (of.integers or not of.group_sizes)
}
"""By name: the type, the layout, and whether groups have offsets."""


def measure(
    name: str, model: Model, storage: str, counts: Sequence[int], rounds: int, threads: int, isa: str
) -> tuple[CpuProgram, list[Row]]:
    """Times the linears of ``model`` for each number of rows, interleaved."""
    program, steps = linears_of(model, storage)
    runner = CpuProgram(program, contents(program), blocks={}, threads=threads, isa=isa)
    stored = {u.name: stored_bytes(u) for u in program.weights}
    by_size: dict[tuple[str, int], Row] = {}
    for kind, (n, k) in {**model.linears, "head": model.head}.items():
        layers = 1 if kind == "head" else model.layers
        size = layers * sum(stored.get(f"{kind}0{end}", 0) for end in ("", ".scales", ".offsets"))
        for rows in counts:
            multiplied = 1 if kind == "head" and rows > PREFILL else rows
            by_size[kind, rows] = Row(name, storage, kind, rows, size, multiplied * layers * n * k)
    for turn in range(rounds + 1):
        for rows in counts:
            seconds = runner.profile(sampled_step(rows))[1]
            for kind, indices in steps.items():
                if turn:  # the first warms up
                    by_size[kind, rows].rounds.append(float(seconds[indices].sum()))
    return runner, list(by_size.values())


def sampled_step(rows: int) -> StepInput:
    """All rows sampled, as in a decode, or the last one of a prefill."""
    step = step_of(rows)
    if rows > PREFILL:
        return step
    return replace(
        step,
        q_start=np.arange(rows + 1, dtype=np.int32),
        kv_len=np.ones(rows, np.int32),
        rows=np.arange(rows, dtype=np.int32),
    )


def print_rows(rows: Sequence[Row], model: Model, bandwidth: float, peak: float) -> None:
    """A line for each kind of linear and number of rows, and one for all."""
    print("rows  linear        us each     GB/s  share  G mul-adds/s  share")
    for count in dict.fromkeys(r.rows for r in rows):
        matching = [r for r in rows if r.rows == count]
        whole = 0.0
        for r in matching:
            layers = 1 if r.linear == "head" else model.layers
            whole += r.seconds / layers * (1 if r.linear == "head" else model.all_layers)
            print_line(r, r.seconds / layers, bandwidth, peak)
        counted = [r for r in matching if r.linear != "head" or count <= PREFILL]
        total = Row("", "", "all", count, sum(r.bytes for r in counted), sum(r.multiply_adds for r in counted))
        total.rounds = [sum(times) for times in zip(*(r.rounds for r in counted), strict=True)]
        print_line(total, whole, bandwidth, peak)
        print(f"{'':6}{count / whole:,.0f} tokens/s if there were only linears")


def print_line(row: Row, seconds: float, bandwidth: float, peak: float) -> None:
    """``seconds``: of one."""
    print(
        f"{row.rows:4}  {row.linear:8}{seconds * 1e6:13.1f}{row.gigabytes:9.1f}{row.gigabytes / bandwidth:7.2f}"
        f"{row.giga_multiply_adds:14.0f}{row.giga_multiply_adds / peak:7.2f}"
    )


def linears_of(model: Model, storage: str) -> tuple[LoweredProgram, dict[str, list[int]]]:
    """A program of the linears of all layers and the head, and the steps of each kind."""
    dtype, layout, offsets = STORAGES[storage]
    weights: list[WeightUse] = []
    buffers: list[Buffer] = []
    steps: list[Step] = []
    steps_of: dict[str, list[int]] = {kind: [] for kind in (*model.linears, "head")}
    arena = Affine()

    def buffer(kind: Dtype, columns: int, rows: Affine = _T) -> Operand:
        nonlocal arena
        size = rows * ((columns * _BYTES[kind] + 63) // 64 * 64)
        buffers.append(Buffer(name=f"b{len(buffers)}", size=size, offset=arena))
        arena = arena + size
        return operand("buffer", buffers[-1].name, kind, rows, columns)

    def inputs_of(x: Operand, k: int, rows: Affine) -> tuple[Operand, ...]:
        if dtype == "f32":
            return (x,)
        if dtype == "bf16":
            out: tuple[Operand, ...] = (buffer("bf16", k, rows),)
            steps.append(Step(op="cast_bf16", inputs=(x,), outputs=out))
            return out
        out = (buffer("i8", k, rows), buffer("f32", k // GROUP, rows), buffer("i32", k // GROUP, rows))
        steps.append(Step(op="quantize_activation", inputs=(x,), outputs=out, attrs={"group_size": GROUP}))
        return out

    def linear(kind: str, layer: int, inputs: tuple[Operand, ...], y: Operand, n: int, k: int) -> None:
        name = f"{kind}{layer}"
        weights.append(WeightUse(name=name, dtype=dtype, shape=(n, k), layout=layout))
        operands = [operand("weight", name, dtype, Affine(n), k)]
        op, attributes = "linear", dict[str, int]()
        if dtype not in ("f32", "bf16"):
            op, attributes = "quantized_linear", {"weight_group": GROUP, "activation_group": GROUP}
            attributes["has_offsets"] = offsets
            for end in (".scales", ".offsets") if offsets else (".scales",):
                weights.append(WeightUse(name=name + end, dtype="f16", shape=(n, k // GROUP), layout="panel32"))
                operands.append(operand("weight", name + end, "f16", Affine(n), k // GROUP))
        steps_of[kind].append(len(steps))
        steps.append(Step(op=op, inputs=(*inputs, *operands), outputs=(y,), attrs=attributes))

    ids = Operand(kind="input", name="ids", dtype="i32", shape=(_T,), strides=(_ONE,))
    inputs = {}
    for k in dict.fromkeys(k for _, k in model.linears.values()):
        weights.append(WeightUse(name=f"table{k}", dtype="f32", shape=(1, k), layout="rows"))
        hidden = buffer("f32", k)
        steps.append(
            Step(op="embedding", inputs=(ids, operand("weight", f"table{k}", "f32", _ONE, k)), outputs=(hidden,))
        )
        inputs[k] = hidden, inputs_of(hidden, k, _T)
    outs = {kind: buffer("f32", n) for kind, (n, _) in model.linears.items()}
    for layer in range(model.layers):
        for kind, (n, k) in model.linears.items():
            linear(kind, layer, inputs[k][1], outs[kind], n, k)
    n, k = model.head
    sampled = Operand(kind="input", name="rows", dtype="i32", shape=(_R,), strides=(_ONE,))
    last, logits = buffer("f32", k, _R), buffer("f32", n, _R)
    steps.append(Step(op="take_rows", inputs=(inputs[k][0], sampled), outputs=(last,)))
    linear("head", 0, inputs_of(last, k, _R), logits, n, k)
    program = LoweredProgram(
        cache_groups=(),
        weights=tuple(weights),
        buffers=tuple(buffers),
        steps=tuple(steps),
        outputs={"logits": logits},
        arena_bytes=arena,
    )
    return program, steps_of


if __name__ == "__main__":
    sys.exit(main())
