"""The launches of TensorRT's plugins: kernels, grid, threads, shared memory, integers. It doesn't need TensorRT.

Sizes are ints or TensorRT's symbolic shapes, which accept an int only as the right operand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from .choose_tiles import Compile, LayerKernels, compile_attention, compile_layer
from .compile_ahead import CompiledKernel, compile_kernel
from .specs import AttentionShape, Number, splits_of, tiles_of_step
from .tiles import SPLIT_KEYS, gpu_of

SHARED_MEMORY = 48 * 1024
"""The most bytes of shared memory of a plugin's thread block. A launch with more first has to raise a limit of the
kernel (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES). TensorRT takes the number of bytes of a kernel that is
compiled ahead (``KernelLaunchParams.shared_mem``), but its documentation doesn't say if it raises the limit. Our
launches do.
"""

TACTICS = 1
"""The number of tiles among which TensorRT may choose when it builds an engine. It would time them on invented inputs
(https://github.com/NVIDIA/TensorRT/issues/2552), whose lengths and tables don't resemble a step.
"""


@dataclass(frozen=True)
class Launch(Generic[Number]):
    """A launch of a kernel. ``integers`` are its arguments between inputs and outputs."""

    grid: tuple[Number | int, Number | int, Number | int]
    threads: int
    shared_memory: int
    integers: tuple[Number | int, ...]


def plugin_attention(
    shape: AttentionShape, capability: int, split_keys: int, compiler: Compile = compile_kernel
) -> tuple[CompiledKernel, ...]:
    """Compiles the attention kernels from which TensorRT may choose.

    ``split_keys``: 0 for prompts; for decoding, the keys of a split. Raises TargetError for an unknown GPU, or if no
    tile fits.
    """
    return compile_attention(
        shape,
        capability,
        split_keys=split_keys,
        shared_memory=SHARED_MEMORY,
        most=TACTICS,
        clamp=True,
        compiler=compiler,
    )


def plugin_kernels(
    shape: AttentionShape,
    capability: int,
    split_keys: int = SPLIT_KEYS,
    compiler: Compile = compile_kernel,
    *,
    large_tiles: bool = False,
) -> LayerKernels:
    """Compiles all kernels that the plugins may launch for a layer of this shape, which the bundle contains.

    ``large_tiles``: True allows as much shared memory as every GPU has that runs the kernels, False only
    ``SHARED_MEMORY``.
    """
    return compile_layer(
        shape,
        capability,
        split_keys=split_keys,
        shared_memory=gpu_of(capability).portable_memory if large_tiles else SHARED_MEMORY,
        most=TACTICS,
        clamp=True,
        compiler=compiler,
    )


def write_launch(kernel: CompiledKernel, shape: AttentionShape, tokens: Number, pool: Number) -> Launch[Number]:
    """Returns the launch of ``kv_write`` for T tokens and a pool of P blocks."""
    integers = (pool * shape.block_size, *shape.row_sizes)
    return Launch((tokens, 1, 1), kernel.threads, kernel.shared_memory, integers)


def attention_launch(
    kernel: CompiledKernel, shape: AttentionShape, tokens: Number, requests: Number, blocks: Number, pool: Number
) -> Launch[Number]:
    """Returns the launch of ``paged_attention`` for T tokens of B requests, tables of ``blocks`` blocks, and a pool of
    P blocks.
    """
    split_keys, tile = kernel.constant("SPLIT_KEYS"), kernel.spec.tile
    assert isinstance(split_keys, int)
    splits = splits_of(blocks, shape.block_size, split_keys) if split_keys else 1
    grid = shape.grid(tiles_of_step(tokens, requests, tile.queries), splits, tile.rows)
    integers: tuple[Number | int, ...] = (requests, blocks, shape.heads * shape.head_size)
    if "pool" in dict(kernel.spec.arguments):
        integers = (*integers, pool, tokens)
    return Launch(grid, kernel.threads, kernel.shared_memory, integers)


def combine_launch(kernel: CompiledKernel, heads: int, tokens: Number, splits: Number) -> Launch[Number]:
    """Returns the launch of ``combine_splits``, which combines the partial results of attention over splits.

    Args:
        kernel: the compiled kernel.
        heads: the query heads.
        tokens, splits: T, and the number of splits; expressions or numbers.
    """
    return Launch((tokens * heads, 1, 1), kernel.threads, kernel.shared_memory, (splits,))
