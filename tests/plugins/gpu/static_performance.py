"""A kernel's static performance, without a GPU: its registers, stack, shared memory, instructions and copies.

    PYTHONPATH=src:. python -m tests.plugins.gpu.static_performance [--write | --table] [--specs FILE] [NAME ...]

compiles every kernel for every GPU, and checks the rules. It runs with any version of Triton, and needs nothing else
but torch for the specs of a step's kernels (``step_specs.py``); without torch these are read from ``--specs``, a file
of (name, capability, spec) in JSON. ``--write`` records the numbers in static_performance.jsonl, which the tests
compare with; ``--table`` prints those of NAME for the docs. A kernel is added by a row in KERNELS, or in step_specs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from enginewright.plugins.gpu.choose_tiles import compile_attention
from enginewright.plugins.gpu.compile_ahead import CompiledKernel, compile_kernel, spec_of
from enginewright.plugins.gpu.plugin_kernels import SHARED_MEMORY
from enginewright.plugins.gpu.specs import AttentionShape, KernelSpec, combine_spec, write_spec
from enginewright.plugins.gpu.tiles import GPUS

CAPABILITIES = (80, 89, 90, 100, 120)
RECORD = Path(__file__).with_suffix(".jsonl")


@dataclass(frozen=True)
class Kernel:
    """The compilation of a kernel for a capability; ``copies``: its loops must copy ahead to shared memory."""

    make: Callable[[int], CompiledKernel]
    copies: bool = False


def _attention(shape: AttentionShape, split_keys: int, shared_memory: int | None, capability: int) -> CompiledKernel:
    return compile_attention(shape, capability, split_keys=split_keys, shared_memory=shared_memory)[0]


def _write(shape: AttentionShape, capability: int) -> CompiledKernel:
    return compile_kernel(write_spec(shape, capability))


def _combine(shape: AttentionShape, capability: int) -> CompiledKernel:
    return compile_kernel(combine_spec(shape, capability))


LLAMA = AttentionShape(32, 8, 128, 128, 32, "bf16", "bf16", 128**-0.5)
SHAPES = {
    "128": LLAMA,
    "128 fp8": AttentionShape(32, 8, 128, 128, 32, "bf16", "fp8", 128**-0.5),
    "128 int8": AttentionShape(32, 8, 128, 128, 32, "bf16", "int8", 128**-0.5),
    "64 f16": AttentionShape(9, 3, 64, 64, 32, "f16", "f16", 0.125),
    "256 window, cap": AttentionShape(8, 4, 256, 256, 32, "bf16", "bf16", 1 / 16, window=512, softcap=50.0),
    "192/128 sinks, slopes": AttentionShape(4, 4, 192, 128, 16, "bf16", "bf16", 0.1, sinks=True, slopes=True),
    "128 f32": AttentionShape(32, 8, 128, 128, 32, "f32", "f32", 128**-0.5),
    "576 latent": AttentionShape(128, 1, 576, 512, 32, "bf16", "bf16", 192**-0.5, values_in_keys=True),
    "576 latent fp8": AttentionShape(128, 1, 576, 512, 32, "bf16", "fp8", 192**-0.5, values_in_keys=True),
}

KERNELS: dict[str, Kernel] = {
    **{f"decode {name}": Kernel(partial(_attention, of, 512, None), copies=True) for name, of in SHAPES.items()},
    **{f"prefill {name}": Kernel(partial(_attention, of, 0, None), copies=True) for name, of in SHAPES.items()},
    "decode 128, plugin": Kernel(partial(_attention, LLAMA, 512, SHARED_MEMORY), copies=True),
    "prefill 128, plugin": Kernel(partial(_attention, LLAMA, 0, SHARED_MEMORY), copies=True),
    "write 128": Kernel(partial(_write, LLAMA)),
    "write 128 fp8": Kernel(partial(_write, SHAPES["128 fp8"])),
    "write 128 int8": Kernel(partial(_write, SHAPES["128 int8"])),
    "combine 128": Kernel(partial(_combine, LLAMA)),
}


def step_kernels(specs: Iterable[tuple[str, int, KernelSpec]]) -> dict[str, Kernel]:
    """The kernels of ``step_specs``, from its specs; products and attention multiply in loops."""
    kernel_specs: dict[str, dict[int, KernelSpec]] = {}
    for name, capability, spec in specs:
        kernel_specs.setdefault(name, {})[capability] = spec

    def make(of: dict[int, KernelSpec], capability: int) -> CompiledKernel:
        return compile_kernel(of[capability])

    return {
        name: Kernel(
            partial(make, of), copies=all(spec.kernel in ("product", "listed_attention") for spec in of.values())
        )
        for name, of in kernel_specs.items()
    }


try:
    from tests.plugins.gpu import step_specs

    KERNELS |= step_kernels(step_specs.every(CAPABILITIES))
except ModuleNotFoundError:  # torch is missing
    pass


@dataclass(frozen=True)
class Figures:
    """Counts of a compiled kernel. ``tile`` is (rows, keys, warps, stages) for attention, with columns in place of keys
    for products; ``copies`` are those in its code.
    """

    kernel: str
    capability: int
    tile: tuple[int, ...]
    registers: int
    stack: int
    shared_memory: int
    instructions: int
    copies: int


def figures_of(name: str, kernel: CompiledKernel) -> Figures:
    tile: tuple[int, ...] = ()
    if kernel.spec.kernel in ("paged_attention", "listed_attention"):
        tile = (kernel.spec.tile.rows, kernel.spec.tile.keys, kernel.spec.warps, kernel.spec.stages)
    elif kernel.spec.kernel == "product":
        sizes = (kernel.constant("ROWS"), kernel.constant("COLUMNS"))
        tile = (*(size for size in sizes if isinstance(size, int)), kernel.spec.warps, kernel.spec.stages)
    return Figures(
        name,
        kernel.spec.capability,
        tile,
        kernel.registers,
        kernel.stack,
        kernel.shared_memory,
        instructions(kernel.cubin),
        len(COPY.findall(kernel.ptx)),
    )


def instructions(cubin: bytes) -> int:
    """Counts those in the machine code, by Triton's own nvdisasm."""
    from triton.backends.nvidia.compiler import get_ptxas

    folder = Path(get_ptxas(90).path).parent
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([folder / "nvdisasm", "-c", str(path)], capture_output=True, text=True, check=True)
    return len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", done.stdout, re.MULTILINE))


COPY = re.compile(r"cp\.async\.(?:c[ag]|bulk)")
PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma|fma\.rn\.f32|fma\.rn\.f32x2)")


def loops(ptx: str) -> Iterator[str]:
    """The innermost loops: what lies between a label and a jump back to it, without another such."""
    lines = ptx.splitlines()
    labels = {label[1]: i for i, line in enumerate(lines) if (label := re.match(r"(\$\w+):", line))}
    jumps = [
        (labels[label[1]], i) for i, line in enumerate(lines) if (label := re.search(r"bra(?:\.uni)?\s+(\$\w+)", line))
    ]
    back = [(first, last) for first, last in jumps if first <= last]
    for first, last in back:
        if not any(first <= f and t <= last and (f, t) != (first, last) for f, t in back):
            yield "\n".join(lines[first : last + 1])


def broken(kernel: Kernel, compiled: CompiledKernel) -> list[str]:
    """The rules that a compiled kernel breaks."""
    spec, rules = compiled.spec, []
    gpu = GPUS[spec.capability]
    if compiled.stack:
        rules.append(f"{compiled.stack} bytes of stack")
    if compiled.shared_memory > gpu.shared_memory:
        rules.append(f"{compiled.shared_memory} bytes of shared memory")
    (version,) = re.findall(r"^\.version (\d+)\.(\d+)$", compiled.ptx, re.MULTILINE)
    if int("".join(version)) > gpu.ptx:
        rules.append(f"PTX {'.'.join(version)}, newer than {gpu.ptx}")
    if kernel.copies:
        multiplying = [loop for loop in loops(compiled.ptx) if PRODUCT.search(loop)]
        if not multiplying:
            rules.append("no loop with products")
        for loop in multiplying:
            if not COPY.search(loop):
                rules.append("a loop whose keys and values aren't copied to shared memory ahead")
    if kernel.copies and spec.stages > 2 and (spec.kernel == "product" or spec.tile.queries == 1):
        waits = [int(n, 0) for n in re.findall(r"cp\.async\.wait_group\s+(\w+)", "".join(loops(compiled.ptx)))]
        if not any(waits):
            rules.append("no copy is under way while another is waited for")
    return rules


def recorded() -> dict[tuple[str, int], Figures]:
    entries = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
    figures = [Figures(**{**entry, "tile": tuple(entry["tile"])}) for entry in entries]
    return {(f.kernel, f.capability): f for f in figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--specs", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    if options.specs is not None:
        entries = json.loads(options.specs.read_text(encoding="utf-8"))
        KERNELS.update(step_kernels((name, capability, spec_of(spec)) for name, capability, spec in entries))
    by_kernel, failed = {} if not RECORD.exists() else recorded(), False
    for name in options.names or KERNELS:
        for capability in CAPABILITIES:
            compiled = KERNELS[name].make(capability)
            figures = by_kernel[name, capability] = figures_of(name, compiled)
            wrong = broken(KERNELS[name], compiled)
            failed |= bool(wrong)
            print(json.dumps(asdict(figures)), *wrong, flush=True)
    if options.write:
        lines = [
            json.dumps(asdict(by_kernel[name, c])) + "\n"
            for name in KERNELS
            for c in CAPABILITIES
            if (name, c) in by_kernel
        ]
        RECORD.write_text("".join(lines), encoding="utf-8")
    if options.table:
        print(table([f for (name, _), f in by_kernel.items() if not options.names or name in options.names]))
    sys.exit(failed)


def table(figures: list[Figures]) -> str:
    """Writes in Markdown: tile, registers, stack, shared memory, instructions, copies."""
    heads = "kernel | GPU | tile | registers | stack | shared memory, KB | instructions | cp.async"
    lines = [f"| {heads} |", "| --- " * 8 + "|"]
    for f in figures:
        tile = f"{f.tile[0]}x{f.tile[1]}, {f.tile[2]}, {f.tile[3]}" if f.tile else ""
        numbers = f"{f.registers} | {f.stack} | {f.shared_memory / 1000:.0f} | {f.instructions:,} | {f.copies}"
        lines.append(f"| {f.kernel} | {f.capability / 10} | {tile} | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
