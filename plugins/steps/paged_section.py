"""The paged form of a step in TensorRT engines: their inputs and outputs, and the files that they are built from.

A step has T packed tokens of B requests and R rows of logits. Tables have M blocks for each request, and the pool of a
cache group has P blocks of K tokens. The arrays of a step are those of ``runtime.shared.step_schema``, in i32; a slot
of -1 isn't written. There are also:

    k_cache:L, v_cache:L     [P, K, Nkv, D]   for each layer L, of the cache group's type
    k_scales:L, v_scales:L   f32 [P, K, Nkv]  of caches of 8 bits
    logits                   f32 [R, V]
    k_cache_written:L, ...                    outputs for the caches and scales, bound to the same memory as
                                              k_cache:L, ...
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from enginewright.runtime.shared.contracts import CacheGroup
from enginewright.runtime.shared.kv_formats import SCALED_CACHES, CacheDtype
from enginewright.runtime.shared.records import Count, Positive, Record

NETWORK_FILE = "network.json"
"""The name in the target's folder of the network that its engines are built of."""

KERNELS_FOLDER = "kernels"
"""The folder in the target's folder of the code that the plugins launch, for each compute capability."""

LOGITS = "logits"


class PagedProfile(Record, frozen=True, kw_only=True):
    """Sizes of the steps of one engine, each (least, best, most). Steps of ``decode`` have one token a request.

    The same holds for all cache groups.
    """

    phase: Literal["decode", "prefill"]
    T: tuple[int, int, int]
    B: tuple[int, int, int]
    R: tuple[int, int, int]
    M: tuple[int, int, int]
    P: tuple[int, int, int]

    def __post_init__(self) -> None:
        for name, sizes in (("T", self.T), ("B", self.B), ("R", self.R), ("M", self.M), ("P", self.P)):
            if not 1 <= sizes[0] <= sizes[1] <= sizes[2]:
                raise ValueError(f"{name}: {list(sizes)} isn't [least, best, most]")

    def holds(self, tokens: int, requests: int, rows: int, blocks: int) -> bool:
        """Returns True if a step of these sizes, with tables of ``blocks`` blocks, runs in it."""
        sizes = ((tokens, self.T), (requests, self.B), (rows, self.R), (blocks, self.M))
        return all(least <= n <= most for n, (least, _, most) in sizes)


class PagedSection(Record, frozen=True, kw_only=True):
    """A target's section of the manifest, for engines that read KV caches by block tables.

    Attributes:
        library: the smallest version of TensorRT that can build the engines.
        cache_groups: cache groups in the program's order; each ``dtype`` is the type in the engines' caches.
        profiles: the range of step sizes of each engine.
        kernel_capabilities: compute capabilities of the GPUs that the kernels were compiled for, on which engines can
            be built.
        split_keys: number of keys in each part of a context that a decode step divides among thread blocks.
        summed_products: number of products summed on the way to a logit, which bounds the rounding error.
        caches: "aliased" if each cache is an output in the memory of an input; "ordered" if it is an input alone.
    """

    network: str = NETWORK_FILE
    library: str
    cache_groups: tuple[CacheGroup, ...]
    profiles: Annotated[tuple[PagedProfile, ...], Meta(min_length=1)]
    kernel_capabilities: Annotated[tuple[str, ...], Meta(min_length=1)]
    split_keys: Positive
    summed_products: Count = 0
    caches: Literal["aliased", "ordered"] = "aliased"


class CacheTensor(NamedTuple):
    """A tensor [P, K, *``of_slot``] of a layer's cache: an input, and the output that shares its memory."""

    name: str
    written: str
    dtype: CacheDtype
    of_slot: tuple[int, ...]

    @property
    def argument(self) -> str:
        """The tensor's name in kernels: k_cache, v_cache, k_scales or v_scales."""
        return self.name.partition(":")[0]


def cache_tensors(group: CacheGroup, layer: int) -> tuple[CacheTensor, ...]:
    """Returns a layer's tensors of keys and values, then of their scales if the cache has scales."""
    kinds: list[tuple[str, CacheDtype, tuple[int, ...]]] = [
        (f"{plane.name}_cache", group.dtype, plane.shape) for plane in group.planes
    ]
    if group.dtype in SCALED_CACHES:
        kinds += [(f"{plane.name}_scales", "f32", (plane.heads,)) for plane in group.planes]
    return tuple(CacheTensor(f"{kind}:{layer}", f"{kind}_written:{layer}", of, sizes) for kind, of, sizes in kinds)
