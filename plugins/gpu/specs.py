"""The specifications of kernels: arguments, constants and grid, for launches and for compilation. It doesn't need
Triton.

Grids and integers are computed with ``+``, ``*`` and ``//`` alone, so that they may also be TensorRT's symbolic shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from importlib import import_module
from typing import Any, Literal, Protocol, SupportsInt, TypeVar, get_args

from enginewright.runtime.shared.errors import TargetError
from enginewright.runtime.shared.step_schema import ATTENTION_PORTS

from .tiles import (
    ROTATED_CODES,
    SPLIT_KEYS,
    CacheFormat,
    FloatType,
    GpuLimits,
    Tile,
    TileCase,
    gpu_of,
    looks_ahead,
    power_of_2,
    shares_of,
    width_of,
)

SamplingKernel = (
    Literal["penalize", "widen", "edit", "mask", "largest", "choose_largest"]
    | Literal["sums", "narrow", "cut", "spread", "nearest", "draw"]
)
SAMPLING_KERNELS: tuple[SamplingKernel, ...] = tuple(name for of in get_args(SamplingKernel) for name in get_args(of))
KernelName = (
    Literal["kv_write", "paged_attention", "combine_splits", "listed_attention", "decode_work", "merge_parts"]
    | Literal["embedding", "norm", "rope", "rope_kv_write", "gated_activation", "product", "sum_parts", "unpack"]
    | Literal["activation", "reduce", "invert_order", "combine_experts"]
    | Literal["stored_convolution", "stored_scan", "stored_delta_rule", "place"]
    | SamplingKernel
)
Constant = int | float | str | bool | None

SPLITS_AT_ONCE = 16
"""Parts of a context that ``combine_splits`` loads together."""

TILE_CONSTANTS = ("QUERIES", "ROWS", "KEYS", "AHEAD", "SHARES")
"""The constants of the attention kernel that differ by tile. Warps and stages do too, and aren't constants."""

_POINTERS: dict[CacheFormat, str] = {
    **{"f16": "*fp16", "bf16": "*bf16", "f32": "*fp32"},
    **{"int8": "*i8", "fp8": "*u8", "k8v8": "*i8", "k4v4": "*u8"},
}
_ENDS: dict[str, str] = {f"{half}_{what}_ends": f"{half}_{what}" for what in ("cache", "scales") for half in "kv"}
"""The arguments for a second cache, and their counterparts."""


class Size(Protocol):
    """An int, or a symbolic dimension."""

    def __add__(self: Number, other: Number | int, /) -> Number: ...
    def __mul__(self: Number, other: Number | int, /) -> Number: ...
    def __floordiv__(self: Number, other: Number | int, /) -> Number: ...


Number = TypeVar("Number", bound=Size)


@dataclass(frozen=True)
class AttentionShape:
    """The facts about an attention layer on which its kernels depend. Layers with equal shapes share kernels.

    Raises TargetError if the query heads aren't a multiple of the key/value heads, or if the types of queries and of a
    float cache differ.
    """

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    block_size: int
    dtype: FloatType
    cache: CacheFormat
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    exact: bool = False
    """True if a token's bits must not depend on the step that computes it."""
    values_in_keys: bool = False
    """True if a value is the first ``value_size`` channels of its key, and isn't stored beside it."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise TargetError(
                f"attention: {self.heads} query heads aren't a multiple of {self.kv_heads} key/value heads",
                hint="Every key/value head serves the same number of query heads.",
            )
        if not self.quantized and self.cache != self.dtype and self.dtype != "f32":
            raise TargetError(
                f"attention: queries of {self.dtype} over a cache of {self.cache}",
                hint=f"Use a cache of {self.dtype}, int8 or fp8.",
            )

    @classmethod
    def from_shapes(
        cls, q: Sequence[SupportsInt], keys: Sequence[SupportsInt], values: Sequence[SupportsInt], **rest: Any
    ) -> AttentionShape:
        """Makes the shape from those of q [T, Nq, D], the keys [P, K, Nkv, ..] and values or results [.., Dv]; T and P
        aren't used.

        ``rest``: the other attributes.
        """
        return cls(int(q[1]), int(keys[2]), int(q[2]), int(values[-1]), int(keys[1]), **rest)

    @property
    def row_sizes(self) -> tuple[int, int]:
        """The number of elements of a token's key and of its value, over all heads."""
        return self.kv_heads * self.head_size, self.kv_heads * self.value_size

    def grid(self, tiles: Number, splits: Number | int, rows: int) -> tuple[Number, int, Number | int]:
        """Returns the grid of an attention kernel: one program for each tile, share of a key/value head's query heads,
        and split.

        ``rows`` is the number of rows of a tile.
        """
        return tiles, self.kv_heads * shares_of(self.group, rows), splits

    @property
    def quantized(self) -> bool:
        """True if the cache has scales."""
        return self.cache not in get_args(FloatType)

    @property
    def rotated(self) -> bool:
        """True if the cache has rotated integers, whose scales have 16 bits."""
        return self.cache in ROTATED_CODES

    @property
    def ends(self) -> bool:
        """True if a second cache, of "k8v8", has the ends of requests."""
        return self.cache == "k4v4"

    @property
    def group(self) -> int:
        """The number of query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """The number of elements to which a kernel pads a head: that of keys or of values, whichever is larger."""
        return max(width_of(self.head_size), width_of(self.value_size))

    def tile_case(self, *, decode: bool) -> TileCase:
        """Returns the case by which a tile is chosen, for decoding or for prompts."""
        size = max(self.head_size, self.value_size)
        return TileCase(size, self.group, self.dtype, self.cache, decode, self.values_in_keys)


@dataclass(frozen=True)
class KernelSpec:
    """Everything that a kernel's machine code depends on, apart from the compiler.

    Attributes:
        kernel: the kernel's name.
        capability: the compute capability; 89 for 8.9.
        arguments: (name, Triton's type), in the kernel's order.
        constants: (name, value).
        aligned: integer arguments that are multiples of 16.
        warps, stages: Triton's options.
        unaligned: pointer arguments that needn't be multiples of 16; all others are.
    """

    kernel: KernelName
    capability: int
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    aligned: tuple[str, ...]
    warps: int
    stages: int
    unaligned: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """The name of the kernel's files without suffix, which is unique to this specification and the same on every
        machine.
        """
        return f"{self.kernel}-sm{self.capability}-{sha256(repr(self).encode()).hexdigest()[:16]}"

    @property
    def tile(self) -> Tile:
        """The tile of an attention kernel."""
        constants = dict(self.constants)
        queries, rows, keys = (constants[name] for name in ("QUERIES", "ROWS", "KEYS"))
        assert isinstance(queries, int) and isinstance(rows, int) and isinstance(keys, int)
        return Tile(queries, rows, keys, self.warps, self.stages)


def read_format(cache: CacheFormat, gpu: GpuLimits) -> str:
    """Returns FORMAT for the kernels that read a cache: "e4m3" for fp8 if the GPU has no instruction to convert it."""
    if cache == "fp8":
        return "fp8" if gpu.fp8 else "e4m3"
    return write_format(cache)


def write_format(cache: CacheFormat) -> str:
    """Returns FORMAT for the kernels that write a cache."""
    return {"fp8": "e4m3", "int8": "int8", "k8v8": "rotated8", "k4v4": "rotated4"}.get(cache, "float")


@dataclass(frozen=True)
class AttentionConstants:
    """The constants of attention kernels. A kernel gets all of them as one constant, C.

    SHARES programs divide the query heads of a key/value head. VALUE_STRIDE is the distance of the values of one head.
    With ENDS a second cache, of "rotated8", has the ends of requests. If values are the first channels of keys, the
    REST_SIZE others are loaded apart, padded to REST_WIDTH, as both parts need less padding than all: 512 and 64 in
    place of 1,024. WIDTH is that of the first part.
    """

    Q_HEADS: int
    KV_HEADS: int
    HEAD_SIZE: int
    VALUE_SIZE: int
    BLOCK_SIZE: int
    SCALE: float
    SOFTCAP: float
    WINDOW: int
    SINKS: bool
    SLOPES: bool
    FORMAT: str
    QUERIES: int
    ROWS: int
    KEYS: int
    SPLIT_KEYS: int
    WIDTH: int
    VALUE_WIDTH: int
    AHEAD: bool
    SHARES: int
    VALUE_STRIDE: int
    REST_SIZE: int
    REST_WIDTH: int
    ENDS: bool


def attention_constants(shape: AttentionShape, gpu: GpuLimits, tile: Tile, split_keys: int) -> dict[str, Constant]:
    """Returns the constants of ``paged_attention_kernel``; with ``split_keys`` 0, keys aren't split."""
    rest = shape.head_size - shape.value_size if shape.values_in_keys else 0
    constants = AttentionConstants(
        Q_HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        HEAD_SIZE=shape.head_size,
        VALUE_SIZE=shape.value_size,
        BLOCK_SIZE=shape.block_size,
        SCALE=shape.scale,
        SOFTCAP=shape.softcap,
        WINDOW=shape.window,
        SINKS=shape.sinks,
        SLOPES=shape.slopes,
        FORMAT=read_format(shape.cache, gpu),
        QUERIES=tile.queries,
        ROWS=tile.rows,
        KEYS=tile.keys,
        SPLIT_KEYS=split_keys,
        WIDTH=width_of(shape.head_size - rest),
        VALUE_WIDTH=width_of(shape.value_size),
        AHEAD=looks_ahead(tile, gpu),
        SHARES=shares_of(shape.group, tile.rows),
        VALUE_STRIDE=shape.head_size if shape.values_in_keys else shape.value_size,
        REST_SIZE=rest,
        REST_WIDTH=width_of(rest) if rest else 0,
        ENDS=shape.ends,
    )
    return dict(vars(constants)) | ({"EXACT": SPLIT_KEYS} if shape.exact else {})


@dataclass(frozen=True)
class ProductConstants:
    """The constants of ``product_kernel``, which gets all of them as one constant, C.

    ``FORMAT`` is "float", "int8", "fp8" (a pointer of that type), "e4m3" (bytes), "int4" or "uint4" (two values a byte,
    the first in its low half). GROUP is the number of neighbours along K that share a scale, and an offset with
    OFFSETS; 0 means all of K.

    PART: if it isn't 0, each program sums PART neighbours along K, chosen by its number along z, and ``out`` float32
    [parts, M, N] gets sums without bias and activation; ``sum_parts_kernel`` adds them. PART is a multiple of the
    elements of one iteration, which are STEPS products of DEPTH along K.

    CHAIN: if it isn't 0, each CHAIN neighbours along K have a sum of their own, and these are added in order: by this
    program, or with PART, which then is CHAIN, by ``sum_parts_kernel``. Both have the same bits.

    SWAP: out^T = weight @ x^T is computed instead; then Hopper's tensor cores read weights from registers.

    ROUNDED: dequantized weights are rounded to x's type, as ``unpack_kernel`` does: with many rows that is less work
    than scaling sums.

    BY_GROUP: 0 for a weight [.., N, K] with scales and offsets [.., N, G]; otherwise the distance in rows between
    groups of a weight [.., G, N, GROUP] with scales and offsets [.., G, N] (``Stored``). Then a step reads neighbours,
    and scales are copied STAGES iterations ahead too.
    """

    N: int
    K: int
    X_STRIDE: int
    OUT_STRIDE: int
    FORMAT: str
    GROUP: int
    OFFSETS: bool
    BIAS: bool
    GROUPED: bool
    ACTIVATION: str
    ROWS: int
    COLUMNS: int
    DEPTH: int
    STEPS: int
    SWAP: bool
    ROUNDED: bool
    BY_GROUP: int
    STAGES: int | None = None
    PART: int = 0
    CHAIN: int = 0


_TOGETHER: Mapping[KernelName, type[AttentionConstants] | type[ProductConstants]] = {
    "paged_attention": AttentionConstants,
    "listed_attention": AttentionConstants,
    "product": ProductConstants,
}
"""The kernels that take most of their constants as one object C, and its class."""


def taken_constants(kernel: KernelName, constants: Mapping[str, Constant]) -> dict[str, Any]:
    """Returns a specification's constants as the kernel's function takes them, some of them as one object C."""
    if (together := _TOGETHER.get(kernel)) is None:
        return dict(constants)
    names = {field.name for field in fields(together)}
    packed: dict[str, Any] = {name: value for name, value in constants.items() if name in names}
    alone = {name: value for name, value in constants.items() if name not in names}
    return {"C": together(**packed), **alone}


def write_constants(kv_heads: int, head_size: int, value_size: int, cache: CacheFormat) -> dict[str, Constant]:
    """Returns the constants of ``kv_write_kernel``. With a ``value_size`` of 0 it writes only keys."""
    return {
        "KV_HEADS": kv_heads,
        "HEAD_SIZE": head_size,
        "VALUE_SIZE": value_size,
        "FORMAT": write_format(cache),
        "HEADS": power_of_2(kv_heads),
        "WIDTH": power_of_2(head_size),
        "VALUE_WIDTH": power_of_2(value_size),
    }


def combine_constants(value_size: int) -> dict[str, Constant]:
    """Returns the constants of ``combine_splits_kernel``."""
    return {"VALUE_SIZE": value_size, "VALUE_WIDTH": width_of(value_size), "AT_ONCE": SPLITS_AT_ONCE}


ARGUMENTS: Mapping[KernelName, tuple[str, ...]] = {
    "paged_attention": (
        *("q", "k_cache", "v_cache", "k_scales", "v_scales", *ATTENTION_PORTS, "sinks", "slopes"),
        *("requests", "blocks", "q_stride", "pool", "total", "out", "lse", *_ENDS, "ends_table"),
    ),
    "listed_attention": (
        *("q", "k_cache", "v_cache", "k_scales", "v_scales", "block_table", "kv_len", "work", "sinks", "slopes"),
        *("blocks", "q_stride", "splits", "out", "lse", "q_start", *_ENDS, "ends_table"),
    ),
    "combine_splits": ("parts", "lse", "splits", "out", "kv_len", "q_start"),
    "merge_parts": ("parts", "lse", "splits", "out", "kv_len", "sinks", "q_start"),
    "kv_write": (
        *("k", "v", "slots", "k_cache_before", "v_cache_before", "k_scales_before", "v_scales_before"),
        *("capacity", "k_stride", "v_stride", "k_cache", "v_cache", "k_scales", "v_scales"),
    ),
}
"""The arguments in the order of the kernel's function, where both TensorRT's plugins and a step's calls launch it."""


def attention_spec(
    shape: AttentionShape, capability: int, tile: Tile, split_keys: int, *, clamp: bool = False
) -> KernelSpec:
    """Returns the specification of ``paged_attention_kernel`` for a layer.

    ``clamp``: True if it stays within its memory whatever its integers are.
    """
    gpu = gpu_of(capability)
    queries, form = _POINTERS[shape.dtype], read_format(shape.cache, gpu)
    types = {"q": queries, "out": "*fp32" if split_keys else queries}
    types |= _cache_types(shape, "*fp8e4nv" if form == "fp8" else _POINTERS[shape.cache])
    if shape.ends:
        ends = _cache_types(shape, _POINTERS["k8v8"])
        types |= {name: ends[of] for name, of in _ENDS.items()} | {"ends_table": "*i32"}
    types |= dict.fromkeys(ATTENTION_PORTS, "*i32")
    types |= dict.fromkeys(("sinks", "slopes", *(("lse",) if split_keys else ())), "*fp32")
    types |= dict.fromkeys(("requests", "blocks", "q_stride", *(("pool", "total") if clamp else ())), "i32")
    constants = attention_constants(shape, gpu, tile, split_keys) | ({"CLAMP": True} if clamp else {})
    aligned = ("q_stride",) if shape.head_size % 16 == 0 else ()
    return _spec("paged_attention", capability, types, constants, aligned, tile.warps, tile.stages)


def write_spec(shape: AttentionShape, capability: int) -> KernelSpec:
    """Returns the specification of ``kv_write_kernel`` for a layer and a compute capability, such as 90.

    The kernel writes the caches in place: each is an input (``NAME_before``) and an output, with the same address.
    """
    gpu_of(capability)
    caches = _cache_types(shape, _POINTERS[shape.cache])
    if shape.values_in_keys:
        caches = {name: of for name, of in caches.items() if name.startswith("k")}
    sizes = {"k": shape.head_size} | ({} if shape.values_in_keys else {"v": shape.value_size})
    types = dict.fromkeys(sizes, _POINTERS[shape.dtype]) | {"slots": "*i32"} | caches
    types |= {f"{name}_before": of for name, of in caches.items()}
    types |= dict.fromkeys(("capacity", *(f"{name}_stride" for name in sizes)), "i32")
    constants = write_constants(shape.kv_heads, shape.head_size, sizes.get("v", 0), shape.cache)
    strides = ((f"{name}_stride", size) for name, size in sizes.items())
    aligned = tuple(name for name, size in strides if size % 16 == 0)
    return _spec("kv_write", capability, types, constants, aligned)


def combine_spec(shape: AttentionShape, capability: int) -> KernelSpec:
    """Returns the specification of ``combine_splits_kernel`` for a layer."""
    gpu_of(capability)
    types = {"parts": "*fp32", "lse": "*fp32", "splits": "i32", "out": _POINTERS[shape.dtype]}
    return _spec("combine_splits", capability, types, combine_constants(shape.value_size))


def _cache_types(shape: AttentionShape, cache: str) -> dict[str, str]:
    scales = dict.fromkeys(("k_scales", "v_scales"), "*fp16" if shape.rotated else "*fp32") if shape.quantized else {}
    return dict.fromkeys(("k_cache", "v_cache"), cache) | scales


def _spec(
    kernel: KernelName,
    capability: int,
    types: Mapping[str, str],
    constants: Mapping[str, Constant],
    aligned: tuple[str, ...] = (),
    warps: int = 4,
    stages: int = 1,
) -> KernelSpec:
    arguments = tuple((name, types[name]) for name in ARGUMENTS[kernel] if name in types)
    return KernelSpec(kernel, capability, arguments, tuple(constants.items()), aligned, warps, stages)


def tiles_of_step(tokens: Number, requests: Number, queries: int) -> Number:
    """Returns a number of tiles of ``queries`` tokens that suffices for T tokens of B requests, however these are
    divided.
    """
    return tokens // queries + requests


def splits_of(blocks: Number, block_size: Number | int, split_keys: int = SPLIT_KEYS) -> Number:
    """Returns the number of splits of the longest context that ``blocks`` blocks can hold."""
    return (blocks * block_size + (split_keys - 1)) // split_keys


def aligned(floats: int) -> int:
    """Rounds a number of floats up so that they fill a multiple of 16 bytes."""
    return -(-floats // 4) * 4


def attention_scratch(
    tokens: int,
    heads: int,
    value_size: int,
    blocks: int,
    block_size: int,
    split_keys: int = SPLIT_KEYS,
    *,
    mixed: bool = False,
) -> int:
    """Returns the number of floats for the splits' results of ``tokens`` tokens, with tables of ``blocks`` blocks.

    It is 0 if contexts have only one split, unless steps may be ``mixed``. The result of a split is a row of values and
    two numbers with which it is merged; steps that aren't exact need only one.
    """
    splits = splits_of(blocks, block_size, split_keys)
    count = tokens * heads * splits
    return aligned(count * value_size) + 2 * count if splits > 1 or mixed else 0


_MODULES: Mapping[KernelName, str] = {
    "paged_attention": "attention_kernels",
    "combine_splits": "attention_kernels",
    "listed_attention": "attention_kernels",
    "decode_work": "attention_kernels",
    "merge_parts": "attention_kernels",
    "kv_write": "cache_kernels",
    "embedding": "step_kernels",
    "norm": "step_kernels",
    "rope": "step_kernels",
    "rope_kv_write": "step_kernels",
    "gated_activation": "step_kernels",
    "activation": "step_kernels",
    "reduce": "step_kernels",
    "invert_order": "step_kernels",
    "combine_experts": "step_kernels",
    "product": "product_kernels",
    "sum_parts": "product_kernels",
    "unpack": "product_kernels",
    **dict.fromkeys(("stored_convolution", "stored_scan", "stored_delta_rule"), "recurrence_kernels"),
    "place": "placing_kernels",
    **dict.fromkeys(SAMPLING_KERNELS, "sampling_kernels"),
    "penalize": "logit_kernels",
    "widen": "logit_kernels",
    "edit": "logit_kernels",
    "mask": "logit_kernels",
    "spread": "typical_kernels",
    "nearest": "typical_kernels",
}


def kernel_function(name: KernelName) -> Any:
    """Returns the ``triton.jit`` function of a kernel. Raises ModuleNotFoundError without Triton."""
    return getattr(import_module(f".{_MODULES[name]}", __package__), f"{name}_kernel")
