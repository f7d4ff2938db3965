"""Hidden states beside keys and values as what a disk keeps of a prefix: bytes, time to restore, bits.

    python benchmarks/hidden_states_cache.py BUNDLE.. [--tokens 512] [--rounds 7] [--folder FOLDER] [--json FILE]

What the product for queries, keys and values reads is enough to make keys and values again (HCache: Gao et al., EuroSys
2025). Of each bundle, for the cpu target:

- Bits: a prompt runs, and what these products read is kept. Another prompt runs, whose products are given that instead:
  the KV cache must be the first one's, byte for byte.
- Time: what these products, the rotations and the writes to the cache take in a step of --tokens, of which queries are
  a part that restoring would leave out; and reading either kind from a file that the system has dropped.
- The speed of a disk below which hidden states would be restored sooner.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from peers.loading import BUILD
from peers.machine import commit, machine

from enginewright.plugins.cpu.serve.executor import CpuExecutor
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.kv_cache.kinds.table import cache_block_bytes
from enginewright.runtime.shared.contracts import StepInput
from enginewright.runtime.shared.lowered_program import LoweredProgram

Arrays = list[npt.NDArray[Any] | None]


def main() -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=BUILD, help="on the disk that is read")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measured(path, options) for path in options.bundles]
    result = {"date": date.today().isoformat(), "commit": commit(), "machine": machine(), "command": " ".join(sys.argv)}
    if options.json:
        options.json.write_text(json.dumps(result | {"tokens": options.tokens, "models": rows}, indent=1) + "\n")
    return 0


def measured(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One bundle's figures."""
    bundle = Bundle.open(path)
    program = bundle.program("cpu")
    blocks = {group.name: -(-options.tokens // group.block_size) for group in program.cache_groups}
    executor = CpuExecutor(bundle, blocks)
    products, writes = products_of(program)
    copies: dict[int, Arrays] = {}

    def keep(step: int, before: bool, arrays: Arrays) -> None:
        if before and step in products:
            copies[step] = [a if a is None else a.copy() for a in arrays]

    def give(step: int, before: bool, arrays: Arrays) -> None:
        if before and step in products:
            for to, source in zip(arrays, copies[step], strict=True):
                if to is not None:
                    to[...] = source

    memories = [m for group in program.cache_groups for m in executor.memory_of(group.name)]
    executor.program.watch(step_of(bundle, options.tokens, 1), keep)
    first = [memory.copy() for memory in memories]
    for memory in memories:
        memory[...] = 0
    executor.program.watch(step_of(bundle, options.tokens, 2), give)
    same = all(np.array_equal(memory, other) for memory, other in zip(memories, first, strict=True))

    seconds = []
    for _ in range(options.rounds):
        _, step_seconds = executor.program.profile(step_of(bundle, options.tokens, 1))
        seconds.append(
            (sum(step_seconds[i] for i in products), sum(step_seconds[i] for i in writes), float(step_seconds.sum()))
        )
    product, write, whole = (median(one[i] for one in seconds) / options.tokens for i in range(3))
    columns = [product_columns(program, i, w) for i, w in zip(products, writes, strict=True)]
    share = sum(kv for kv, _ in columns) / sum(every for _, every in columns)
    # Sums of groups (i32) follow from their elements.
    hidden = sum(
        a.nbytes // options.tokens
        for arrays in copies.values()
        for a in arrays
        if a is not None and a.dtype != np.int32
    )
    keys_and_values = sum(cache_block_bytes(group) // group.block_size for group in program.cache_groups)
    reads = {b: read_seconds(options.folder, b * options.tokens, options.rounds) for b in (hidden, keys_and_values)}
    restore = product * share + write
    row = {
        "model": bundle.model.name,
        "formats": sorted({group.dtype for group in program.cache_groups}),
        "hidden_bytes": hidden,
        "kv_bytes": keys_and_values,
        "same_bits": same,
        "compute_us": whole * 1e6,
        "products_us": product * 1e6,
        "keys_and_values_of_products": share,
        "restore_us": restore * 1e6,
        "read_hidden_us": reads[hidden] / options.tokens * 1e6,
        "read_kv_us": reads[keys_and_values] / options.tokens * 1e6,
        "pays_below_bytes_per_second": max(keys_and_values - hidden, 0) / restore,
    }
    print(
        f"{row['model']}: a token's hidden states {hidden:,} bytes, keys and values {keys_and_values:,}; bits "
        f"{'are the same' if same else 'DIFFER'}; restored in {row['restore_us']:.1f} us behind "
        f"{row['read_hidden_us']:.1f} of reading, beside {row['read_kv_us']:.1f} of reading keys and values and "
        f"{row['compute_us']:.0f} of computing; pays below {row['pays_below_bytes_per_second'] / 1e6:.0f} MB/s",
        flush=True,
    )
    executor.close()
    return row


def products_of(program: LoweredProgram) -> tuple[list[int], list[int]]:
    """Finds the step that gives a layer's keys, and the one that rotates and writes them, of each layer."""
    makers = {operand.name: i for i, step in enumerate(program.steps) for operand in step.outputs}
    products, writes = [], []
    for i, step in enumerate(program.steps):
        if step.op in ("rope_kv_write", "kv_write"):
            at = makers[step.inputs[1 if step.op == "rope_kv_write" else 0].name]
            while "linear" not in program.steps[at].op:  # norms of heads
                at = makers[program.steps[at].inputs[0].name]
            products.append(at)
            writes.append(i)
    return products, writes


def product_columns(program: LoweredProgram, product: int, write: int) -> tuple[int, int]:
    """The number of a product's columns that are keys and values, and the number of all its columns."""
    layer = int(next(o.name for o in program.steps[write].inputs if o.kind == "cache").rpartition("/")[2])
    group = next(g for g in program.cache_groups if layer in g.layers)
    every = program.steps[product].outputs[0].shape[-1].coefficients()[0]
    return min(group.kv_heads * (group.key_head_size + group.value_head_size), every), every


def step_of(bundle: Bundle, tokens: int, seed: int) -> StepInput:
    """A prompt of random tokens of one request, in the first blocks."""
    program = bundle.program("cpu")
    places = np.arange(tokens, dtype=np.int32)
    tables = {g.name: np.arange(-(-tokens // g.block_size), dtype=np.int32)[None] for g in program.cache_groups}
    return StepInput(
        ids=np.random.default_rng(seed).integers(0, bundle.model.vocab_size, tokens).astype(np.int32),
        positions=places,
        q_start=np.array([0, tokens], np.int32),
        kv_len=np.array([tokens], np.int32),
        rows=np.array([tokens - 1], np.int32),
        slots={g.name: places for g in program.cache_groups},
        block_table=tables,
    )


def read_seconds(folder: Path, size: int, rounds: int) -> float:
    """Seconds to read so many bytes from a file that isn't in the system's cache, as far as it drops them."""
    path = folder / "hidden-states-cache.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        path.write_bytes(np.random.default_rng(0).bytes(size))
        times = []
        for _ in range(rounds):
            with open(path, "rb", buffering=0) as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                begin = time.perf_counter()
                file.readall()
                times.append(time.perf_counter() - begin)
        return median(times)
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
