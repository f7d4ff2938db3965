"""Which kernels TensorRT's plugins launch, and how: grid, threads, shared memory, integers. Without TensorRT.

Sizes are ints or TensorRT's symbolic shapes, which take an int on their right only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Generic

from enginewright.plugins.shared.errors import TargetError
from enginewright.plugins.triton.compile_ahead import CompiledKernel
from enginewright.plugins.triton.specs import (
    AttentionShape,
    KernelSpec,
    Number,
    attention_spec,
    combine_spec,
    splits_of,
    tiles_of_step,
    write_spec,
)
from enginewright.plugins.triton.tiles import SPLIT_KEYS, attention_tiles, gpu_of

SHARED_MEMORY = 48 * 1024
"""Bytes that a block uses at most: for more a launch has to raise a limit of the driver's, and nothing says that
TensorRT does that for a plugin that is compiled ahead."""

TACTICS = 2
"""Tiles that TensorRT may choose among when it builds an engine; a bundle holds the code of each."""


@dataclass(frozen=True)
class Launch(Generic[Number]):
    """How a kernel is launched; ``integers`` are its arguments between inputs and outputs."""

    grid: tuple[Number | int, Number | int, Number | int]
    threads: int
    shared_memory: int
    integers: tuple[Number | int, ...]


def attention_specs(shape: AttentionShape, capability: int, split_keys: int) -> tuple[KernelSpec, ...]:
    """The attention kernels to choose from: for prefill (``split_keys`` 0), or for decoding in parts of that many keys.

    Raises TargetError for a GPU that isn't known, or where no tile fits.
    """
    gpu = gpu_of(capability)
    limit = min(SHARED_MEMORY, gpu.shared_memory)
    decode = split_keys > 0
    tiles = attention_tiles(shape.group, shape.width, shape.dtype, gpu, decode=decode, shared_memory=limit)
    specs = tuple(attention_spec(shape, capability, tile, split_keys) for tile in islice(tiles, TACTICS))
    if not specs:
        raise TargetError(
            f"paged attention in TensorRT: heads of {shape.width} elements of {shape.dtype} don't fit {limit} bytes of "
            "shared memory",
            hint="Use float16 or bfloat16.",
        )
    return specs


def layer_specs(shape: AttentionShape, capability: int, split_keys: int = SPLIT_KEYS) -> tuple[KernelSpec, ...]:
    """Every kernel that the plugins may ask for: what a bundle must hold for a layer of this shape."""
    return (
        write_spec(shape, capability),
        *attention_specs(shape, capability, 0),
        *attention_specs(shape, capability, split_keys),
        combine_spec(shape, capability),
    )


def write_launch(kernel: CompiledKernel, shape: AttentionShape, tokens: Number, pool: Number) -> Launch[Number]:
    """``kv_write`` of T tokens into a pool of P blocks."""
    integers = (pool * shape.block_size, shape.kv_heads * shape.head_size, shape.kv_heads * shape.value_size)
    return Launch((tokens, 1, 1), kernel.threads, kernel.shared_memory, integers)


def attention_launch(
    kernel: CompiledKernel, shape: AttentionShape, tokens: Number, requests: Number, blocks: Number
) -> Launch[Number]:
    """``paged_attention`` of T tokens of B requests, whose table has room for ``blocks`` blocks each."""
    split_keys, queries = kernel.constant("SPLIT_KEYS"), kernel.constant("QUERIES")
    assert isinstance(split_keys, int) and isinstance(queries, int)
    splits = splits_of(blocks, shape.block_size, split_keys) if split_keys else 1
    grid = (tiles_of_step(tokens, requests, queries), shape.kv_heads, splits)
    return Launch(grid, kernel.threads, kernel.shared_memory, (requests, blocks, shape.heads * shape.head_size))


def combine_launch(kernel: CompiledKernel, heads: int, tokens: Number, splits: Number) -> Launch[Number]:
    """``combine_splits`` of T tokens."""
    return Launch((tokens * heads, 1, 1), kernel.threads, kernel.shared_memory, (splits,))
