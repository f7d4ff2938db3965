"""How big a kernel's tiles are, by GPU, type and head size; what a GPU can do. Plain numbers: Triton isn't needed.

``shared_memory`` is the most that one thread block may use, in bytes: table "Technical Specifications per Compute
Capability" of the CUDA C++ Programming Guide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from enginewright.plugins.shared.errors import TargetError

FloatType = Literal["f16", "bf16", "f32"]
CacheFormat = Literal["f16", "bf16", "f32", "int8", "fp8"]

FLOAT_BYTES: dict[FloatType, int] = {"f16": 2, "bf16": 2, "f32": 4}
CACHE_FORMATS: tuple[CacheFormat, ...] = ("f16", "bf16", "f32", "int8", "fp8")

SPLIT_KEYS = 512
"""Keys of a part of a long context, which one program attends to when decoding."""

FEWEST_ROWS = 16
"""Of a product on tensor cores."""


@dataclass(frozen=True)
class Gpu:
    """One compute capability: 89 is 8.9.

    Attributes:
        fp8: has instructions to convert 8-bit floats.
        ptx: the version of PTX that kernels for it are written in, 84 for 8.4: an old one, as a driver takes none newer
            than itself. CUDA 12.4 has 8.4, 12.7 8.6 and 12.8 8.7, the first with these GPUs (PTX ISA, "Release Notes").
    """

    capability: int
    shared_memory: int
    fp8: bool
    ptx: int = 84


GPUS = {
    gpu.capability: gpu
    for gpu in (
        Gpu(80, 163 * 1024, fp8=False),
        Gpu(86, 99 * 1024, fp8=False),
        Gpu(89, 99 * 1024, fp8=True),
        Gpu(90, 227 * 1024, fp8=True),
        Gpu(100, 227 * 1024, fp8=True, ptx=86),
        Gpu(120, 99 * 1024, fp8=True, ptx=87),
    )
}


def gpu_of(capability: int) -> Gpu:
    """Raises TargetError for a capability that kernels aren't compiled for."""
    if capability not in GPUS:
        known = ", ".join(map(str, GPUS))
        raise TargetError(
            f"compute capability {capability}: no kernels are compiled for it; known are {known}",
            hint="Name capabilities without a dot: 89 for 8.9. Older GPUs than 80 have no bfloat16.",
        )
    return GPUS[capability]


@dataclass(frozen=True)
class Tile:
    """What a program of the attention kernel works on.

    ``queries`` tokens of a request with all heads of a group, in ``rows`` rows of a product (a power of 2), meet
    ``keys`` keys at a time.
    """

    queries: int
    rows: int
    keys: int
    warps: int
    stages: int


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def width_of(head_size: int) -> int:
    """Elements that a kernel makes of a head: a power of 2, and at least what a product on tensor cores takes."""
    return max(FEWEST_ROWS, power_of_2(head_size))


def decode_rows(group: int) -> int:
    """Rows of a tile of one token."""
    return max(FEWEST_ROWS, power_of_2(group))


def shared_memory_of(tile: Tile, width: int, element: int) -> int:
    """About how many bytes of shared memory a tile takes: queries, weights, and each stage's keys and values."""
    return (tile.rows * (width + tile.keys) + tile.stages * tile.keys * 2 * width) * element


def attention_tiles(
    group: int, width: int, dtype: FloatType, gpu: Gpu, *, decode: bool, shared_memory: int | None = None
) -> Iterator[Tile]:
    """Tiles for ``group`` query heads a key/value head that should fit the GPU, the best first.

    ``width`` is that of the wider of key and value heads, ``shared_memory`` the most to use if not all. Which tile is
    best has not been measured on a GPU.
    """
    limit = gpu.shared_memory if shared_memory is None else shared_memory
    element = FLOAT_BYTES[dtype]
    for rows, keys, warps, stages in _candidates(decode, group, wide=dtype == "f32" or width > 128):
        if rows < power_of_2(group):
            continue
        tile = Tile(1 if decode else rows // group, rows, keys, warps, stages)
        if shared_memory_of(tile, width, element) <= limit:
            yield tile


def _candidates(decode: bool, group: int, wide: bool) -> Iterator[tuple[int, int, int, int]]:
    """(rows, keys, warps, stages): as much as there may be first, and then less and less."""
    most = decode_rows(group) if decode else max(64 if wide else 128, power_of_2(group))
    least = decode_rows(group) if decode else max(FEWEST_ROWS, power_of_2(group))
    rows = most
    while rows >= least:
        for keys in (32, 16) if wide else (64, 32, 16):
            for stages in (3, 2, 1):
                yield rows, keys, 8 if rows * keys >= 128 * 64 else 4, stages
        rows //= 2
