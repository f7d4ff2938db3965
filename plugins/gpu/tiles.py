"""The sizes of kernels' tiles by GPU, type and head size, and the limits of GPUs. They are plain numbers, without
Triton.

``shared_memory`` is the most bytes that one thread block may use: table "Technical Specifications per Compute
Capability" of the CUDA C++ Programming Guide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

from enginewright.runtime.shared.dtypes import Dtype, stored_bytes
from enginewright.runtime.shared.errors import TargetError
from enginewright.runtime.shared.kv_formats import KV_FORMATS, SCALED_CACHES, CacheDtype, CacheName
from enginewright.runtime.shared.weight_formats import FORMAT_OF, SCALED

FloatType = Literal["f16", "bf16", "f32"]
CacheFormat = CacheName

CACHE_BYTES: Mapping[CacheFormat, int] = {
    of.name: 1 if of.few_bits else stored_bytes(dtype, 1) for dtype, of in KV_FORMATS.items()
}
"""The most bytes of an element by format, also of a second cache."""

ROTATED_CODES: Mapping[CacheDtype, Dtype] = {"k8v8": "i8", "k4v4": "i4"}
"""The formats of rotated integers that kernels support, and the type of their codes."""
SCALED_FORMATS: Mapping[CacheDtype, CacheFormat] = {dtype: KV_FORMATS[dtype].name for dtype in SCALED_CACHES}

SPLIT_KEYS = 512
"""The number of keys of a split of a long context, for which one program computes attention when decoding."""

FEWEST_ROWS = 16
"""The fewest rows of a product on tensor cores."""


_BOUND_FROM = 90
"""The first compute capability with machine code for a single GPU (sm_90a, sm_100a or sm_120a). Machine code for it
doesn't run on all later GPUs of the same major number.
"""


@dataclass(frozen=True)
class GpuLimits:
    """The limits of one compute capability; 89 is 8.9.

    Attributes:
        capability: the compute capability.
        shared_memory: the most bytes of shared memory of a thread block.
        fp8: True if it has instructions to convert 8-bit floats.
        ptx: the version of PTX in which kernels are written, 84 for 8.4. It is an old one, because a driver rejects
            versions newer than itself. CUDA 12.4 has 8.4, 12.7 8.6 and 12.8 8.7 (PTX ISA, "Release Notes").
        family: the compute capabilities that run machine code for its family.
    """

    capability: int
    shared_memory: int
    fp8: bool
    ptx: int = 84
    family: tuple[int, ...] = ()

    @property
    def architecture(self) -> str:
        """The target of its machine code, such as "sm_100f"."""
        return f"sm_{self.capability}{'f' if self.family else 'a' if self.capability >= _BOUND_FROM else ''}"

    @property
    def portable_memory(self) -> int:
        """The shared memory that a thread block may use on every GPU that runs this one's machine code; 8.6, for
        example, runs code for 8.0.
        """
        return min(gpu.shared_memory for gpu in GPUS.values() if machine_code_runs(self.capability, gpu.capability))


GPUS = {
    gpu.capability: gpu
    for gpu in (
        GpuLimits(80, 163 * 1024, fp8=False),
        GpuLimits(86, 99 * 1024, fp8=False),
        GpuLimits(89, 99 * 1024, fp8=True),
        GpuLimits(90, 227 * 1024, fp8=True),
        GpuLimits(100, 227 * 1024, fp8=True, ptx=86, family=(103,)),
        GpuLimits(120, 99 * 1024, fp8=True, ptx=87, family=(121,)),
    )
}


def gpu_of(capability: int) -> GpuLimits:
    """Returns the limits of a compute capability. Raises TargetError if kernels can't be compiled for it."""
    if capability not in GPUS:
        known = ", ".join(map(str, GPUS))
        raise TargetError(
            f"compute capability {capability}: no kernels are compiled for it; known are {known}",
            hint="Name capabilities without a dot: 89 for 8.9. Older GPUs than 80 have no bfloat16.",
        )
    return GPUS[capability]


def machine_code_runs(made_for: int, on: int, *, family: bool = False) -> bool:
    """Returns True if a cubin for the compute capability ``made_for`` runs on ``on``.

    Below 9.0, both need the same major number, and ``on`` must not be older. From 9.0 on, both must be equal, or in one
    family if the cubin is for a ``family``.
    """
    if made_for == on or (family and made_for in GPUS and on in GPUS[made_for].family):
        return True
    return made_for < _BOUND_FROM and made_for // 10 == on // 10 and made_for <= on


def code_for(on: int, made_for: Iterable[int], families: Container[int] = ()) -> int | None:
    """Returns the compute capability among ``made_for`` whose compiled code is best for a GPU of ``on``; None if none
    runs.

    Machine code is preferred to PTX, which a driver translates for newer GPUs. ``families`` are the compute
    capabilities whose machine code was compiled for their family.
    """
    known = [c for c in made_for if c <= on]
    as_it_is = [c for c in known if machine_code_runs(c, on, family=c in families)]
    return max(as_it_is or [c for c in known if c < _BOUND_FROM], default=None)


@dataclass(frozen=True)
class Tile:
    """The tile of a program of the attention kernel.

    Attributes:
        queries: the number of a request's tokens.
        rows: the rows of the product, a power of 2: for each token all heads of a group, or some of them
            (``shares_of``).
        keys: the number of keys that are processed at a time.
        warps, stages: Triton's options.
    """

    queries: int
    rows: int
    keys: int
    warps: int
    stages: int


def power_of_2(n: int) -> int:
    """Returns the smallest power of 2 that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def width_of(head_size: int) -> int:
    """Returns the number of elements to which a kernel pads a head: a power of 2, and at least the tensor cores'
    minimum.
    """
    return max(FEWEST_ROWS, power_of_2(head_size))


def decode_rows(group: int) -> int:
    """Returns the number of rows in a tile of one token, with ``group`` query heads."""
    return max(FEWEST_ROWS, power_of_2(group))


def shares_of(group: int, rows: int) -> int:
    """Returns the number of programs that divide the ``group`` query heads of a key/value head.

    It is the smallest number of equal shares that fit into a tile of ``rows`` rows.
    """
    return next(n for n in range(1, group + 1) if group % n == 0 and group // n <= rows)


@dataclass(frozen=True)
class TileCase:
    """The case for which a tile is chosen.

    Attributes:
        head_size: the size of keys or of values, whichever is larger.
        group: the number of query heads per key/value head.
        dtype: the type of the queries.
        cache: the format of the cache.
        decode: True for steps with one token per request.
        values_in_keys: True if values are the first channels of their keys. These are then wide, so a program has few
            query heads of a group.
    """

    head_size: int
    group: int
    dtype: FloatType
    cache: CacheFormat
    decode: bool
    values_in_keys: bool = False

    @property
    def fewest_rows(self) -> int:
        """The rows of the smallest tile."""
        return FEWEST_ROWS if self.values_in_keys else decode_rows(self.group)


def looks_ahead(tile: Tile, gpu: GpuLimits) -> bool:
    """Returns True if the kernel looks up blocks one step before it copies their keys, so that copies can run ahead.

    Triton 3.9 can't compile that with the tensor cores of compute capability 10.0.
    """
    return gpu.capability != 100 or tile.queries == 1


def least_shared_memory(tile: Tile, case: TileCase, gpu: GpuLimits) -> int:
    """Returns the least bytes of shared memory that a tile needs, for the keys and values that are copied ahead."""
    copies = tile.stages - 1 if looks_ahead(tile, gpu) else min(tile.stages - 1, 1)
    return copies * tile.keys * 2 * case.head_size * CACHE_BYTES[case.cache]


def attention_tiles(case: TileCase, gpu: GpuLimits, shared_memory: int | None = None) -> Iterator[Tile]:
    """Yields tiles, best first: the measured one if there is one, then those of the rule.

    Tiles that can't fit into ``shared_memory`` bytes (None: the GPU's limit) are left out. Only ``compile_attention``
    finds out which tiles do fit.
    """
    limit = gpu.shared_memory if shared_memory is None else shared_memory
    known = measured_tiles(gpu.capability).get(case)
    if known is not None:
        yield known
    for rows, keys, warps, stages in _rule(case, gpu):
        heads = case.group // shares_of(case.group, rows)
        tile = Tile(1 if case.decode else rows // heads, rows, keys, warps, stages)
        if tile != known and least_shared_memory(tile, case, gpu) <= limit:
            yield tile


def _rule(case: TileCase, gpu: GpuLimits) -> Iterator[tuple[int, int, int, int]]:
    """Yields the candidates of tiles for a case, (rows, keys, warps, stages), from large to small."""
    return _decode_rule(case) if case.decode else _prompt_rule(case, gpu)


def _decode_rule(case: TileCase) -> Iterator[tuple[int, int, int, int]]:
    """Yields tiles for decoding. Copying ahead (3 stages) is preferred to wide tiles, as the bytes in flight matter
    most.
    """
    width, single = width_of(case.head_size), _is_single(case)
    most = 32 if single or width > 128 else 64 if width > 64 else 128
    deep = (4, 3) if CACHE_BYTES[case.cache] == 1 else (3,)
    # If two blocks over a latent vector fit a multiprocessor only without copies ahead, one that copies is better.
    for depths in (deep, (2,)) if case.values_in_keys else (deep, (2,), (1,)):
        for keys, stages in product(_halves(most, 16), depths):
            yield case.fewest_rows, keys, 8 if single else 4, stages


def _prompt_rule(case: TileCase, gpu: GpuLimits) -> Iterator[tuple[int, int, int, int]]:
    """Yields tiles for prompts, large ones first. Sums are in registers, of which 8 warps have twice as many as 4."""
    fewest_rows, width, single = case.fewest_rows, width_of(case.head_size), _is_single(case)
    most = 32 if single else 128 if width <= 128 and gpu.capability in (90, 100) else 64
    most_rows = 128 if not single and width <= 128 else 64 if width <= 64 or not single else 32
    if case.values_in_keys and width > 512:  # no GPU has registers for more rows
        most_rows = 32
    for depths, fewest in (((3, 2), 32), ((3, 2), 16), ((1,), 16)):
        for rows in _halves(max(most_rows, fewest_rows), fewest_rows):
            for keys, stages in product(_halves(most if fewest > 16 or depths == (1,) else 16, fewest), depths):
                yield rows, keys, 8 if single or rows * width >= 64 * 128 else 4, stages


def _is_single(case: TileCase) -> bool:
    """Returns True for float32 queries, whose products don't use tensor cores."""
    return case.dtype == "f32"


def _halves(most: int, least: int) -> Iterator[int]:
    while most >= least:
        yield most
        most //= 2


@dataclass(frozen=True)
class ProductTile:
    """The tile of one program of the product kernel.

    Attributes:
        rows, columns: the rows and columns of the result.
        depth: the elements along K per step.
        warps, stages: Triton's options.
        swap: True if the transpose is computed: weight @ x^T.
        programs: K is divided if there are far fewer programs than this; 0 never divides it.
        rounded: True if dequantized weights are rounded to the type of x.
        chain: the elements along K that are summed together; these sums are added in order (``exact_tile``). 0: K is
            one sum, or is divided as ``programs`` says.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False
    programs: int = 0
    rounded: bool = False
    chain: int = 0


FEW_PRODUCT = ProductTile(rows=16, columns=32, depth=64, warps=4, stages=5, programs=512)
SMALL_PRODUCT = ProductTile(rows=64, columns=64, depth=64, warps=4, stages=3, programs=256)
LARGE_PRODUCT = ProductTile(rows=128, columns=128, depth=32, warps=8, stages=3)
LARGE_STORED_PRODUCT = ProductTile(rows=64, columns=128, depth=64, warps=8, stages=3)
OFFSETS_PRODUCT = ProductTile(rows=64, columns=64, depth=64, warps=8, stages=3, programs=256)
"""The tile for more than 16 rows of weights with offsets (uint4), of many rows or of experts. With the tiles of floats
some of a product would be on the stack.
"""

_NIBBLES = (
    ProductTile(16, 128, 128, warps=2, stages=3, programs=512),
    ProductTile(32, 64, 128, warps=4, stages=3, swap=True, programs=512),
    ProductTile(64, 64, 128, warps=4, stages=3, swap=True, programs=512, rounded=True),
)
FORMS: Mapping[str, str] = {**{dtype: FORMAT_OF[dtype] for dtype in SCALED}, "u4": "uint4"}
"""The type of a weight's values -> the format in which kernels read them; floats aren't here."""

NARROW_PRODUCTS: Mapping[str, tuple[ProductTile, ...]] = {
    "int8": (
        ProductTile(16, 64, 128, warps=4, stages=3, programs=512),
        ProductTile(32, 64, 128, warps=4, stages=3, programs=512),
        ProductTile(64, 128, 64, warps=4, stages=3, swap=True, programs=512, rounded=True),
    ),
    "fp8": (
        ProductTile(16, 64, 128, warps=4, stages=3, programs=512),
        ProductTile(32, 128, 128, warps=4, stages=3, swap=True, programs=256),
        ProductTile(64, 128, 128, warps=4, stages=3, swap=True, programs=256),
    ),
    "int4": _NIBBLES,
    "uint4": _NIBBLES,
}
"""The tiles for products of 16-bit floats with quantized weights, by format and in the order of rows. 40 to 72 of each
were timed on an H100 (``benchmarks/gpu_truth.py``, product tiles), with weights of an 8B model: int8 in groups of 32,
uint4 in groups of 64, fp8 in one. int4 uses uint4's.
"""

UNPACKED_ROWS = 65
"""The number of rows from which on a quantized weight is dequantized, and a library multiplies. On an H100 an 8B model
of the recipe int8 needed 21.3 ms for 512 rows that way, and 22.2 ms for 128 with the product kernel at that time. For
2,048 rows it needed a third of the kernel's time. 65 to 256 rows haven't been timed with the current tiles:
``benchmarks/gpu_truth.py``, stage D.
"""


def product_tile(rows: int, form: str, dtype: FloatType = "bf16") -> ProductTile:
    """Returns the tile for a product of ``rows`` rows of type ``dtype`` with a weight of format ``form``."""
    if form != "float" and dtype != "f32":
        narrow = NARROW_PRODUCTS[form]
        if (tile := next((tile for tile in narrow if rows <= tile.rows), None)) is not None:
            return tile
        if rows <= 256:
            return narrow[-1]
        return OFFSETS_PRODUCT if form == "uint4" else LARGE_STORED_PRODUCT
    if rows <= FEW_PRODUCT.rows:
        return FEW_PRODUCT
    if form == "uint4":
        return OFFSETS_PRODUCT
    if rows <= 256:
        return SMALL_PRODUCT
    return LARGE_PRODUCT if form == "float" else LARGE_STORED_PRODUCT


EXACT_ROWS = 64
"""The rows of the tiles of ``exact_tile``: enough for decoding and for prompts."""

_MOST_CHAINS = 8


def exact_tile(depth: int, form: str, group: int, dtype: FloatType) -> ProductTile:
    """Returns the tile for all products with a weight [.., ``depth``] in which a result depends only on its row of x.

    The sums along K depend only on ``depth``, so ranks with some of a weight's rows have the same sums.
    """
    tile = product_tile(EXACT_ROWS, form, dtype)
    if form == "fp8" and dtype != "f32":  # two sums of its own tile would be on the stack
        tile = replace(tile, columns=64)
    if form == "uint4" and dtype != "f32":
        tile = replace(tile, warps=8)
    unit = math.lcm(tile.depth, group or 1)
    chains = max(1, min(_MOST_CHAINS, depth // _LEAST_PART))
    return replace(tile, chain=-(-depth // (chains * unit)) * unit, programs=EXACT_PROGRAMS)


EXACT_PROGRAMS = 256
"""The number of tiles of columns from which on one program computes all sums along K, in steps with few rows."""

PRODUCT_ROWS = sorted({tile.rows for tiles in NARROW_PRODUCTS.values() for tile in tiles})
"""The largest numbers of rows for each tile of a product that is summed in parts."""

_LEAST_PART = 512
"""The least number of elements along K that one program of a product sums."""


def part_of_product(
    rows: int, depth: int, columns: int, form: str, group: int, dtype: FloatType, tile: ProductTile | None = None
) -> int:
    """Returns the elements along K that one program of ``split_product_calls`` sums; 0 if K isn't divided.

    The arguments are the sizes of the product, the format and group size of the weight, the type of x and the tile
    (None chooses it).
    """
    tile = product_tile(rows, form, dtype) if tile is None else tile
    if tile.chain:
        few = rows <= tile.rows and -(-columns // tile.columns) < tile.programs
        return tile.chain if few and tile.chain < depth else 0
    if form == "float" or rows > tile.rows or not tile.programs:
        return 0
    tiles = -(-columns // tile.columns)
    parts = min(round(tile.programs / tiles), depth // _LEAST_PART)
    unit = math.lcm(tile.depth, group or 1)
    part = -(-depth // (max(parts, 1) * unit)) * unit
    return part if part < depth else 0


def tiles_file(capability: int) -> Path:
    """Returns the path of the file with a GPU's measured tiles, one line of JSON for each case."""
    return Path(__file__).with_name(f"tiles_sm{capability}.jsonl")


@cache
def measured_tiles(capability: int) -> dict[TileCase, Tile]:
    """Returns the measured tiles of a GPU, by case; {} if it has no file."""
    path = tiles_file(capability)
    return read_tiles(path) if path.exists() else {}


def read_tiles(path: Path) -> dict[TileCase, Tile]:
    """Reads a file of ``write_tiles``. Raises TargetError naming the line that is invalid."""
    tiles = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            case = TileCase(**{field.name: entry[field.name] for field in fields(TileCase) if field.name in entry})
            tile = Tile(**{field.name: entry[field.name] for field in fields(Tile)})
        except (ValueError, KeyError, TypeError) as e:
            raise TargetError(f"{path}:{number}: isn't a tile: {e}", hint="Write the file by a sweep.") from e
        tiles[case] = tile
    return tiles


def write_tiles(path: Path, tiles: Mapping[TileCase, tuple[Tile, dict[str, Any]]]) -> None:
    """Writes one line for each case: the case, its tile, and further facts, such as the measured time."""
    lines = [json.dumps({**asdict(case), **asdict(tile), **more}) + "\n" for case, (tile, more) in tiles.items()]
    path.write_text("".join(sorted(lines)), encoding="utf-8")


def number_of(capability: str) -> int:
    """Converts a capability's text to a number: "9.0" to 90."""
    major, _, minor = capability.partition(".")
    return 10 * int(major) + int(minor)


def capability_of(number: int) -> str:
    """Converts a capability's number to its text: 90 to "9.0"."""
    return f"{number // 10}.{number % 10}"
