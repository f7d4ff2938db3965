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
"""The file in the target's folder with the network from which engines are built."""

KERNELS_FOLDER = "kernels"
"""The folder inside the target's folder with the kernels that the plugins launch, for each compute capability."""

LOGITS = "logits"


class PagedProfile(Record, frozen=True, kw_only=True):
    """The sizes of the steps of one engine, each as (least, best, most). Steps of the phase ``decode`` have one token
    per request.

    M and P are the same for all cache groups.
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
        """Returns True if a step of these sizes, with tables of ``blocks`` blocks, is within the profile."""
        sizes = ((tokens, self.T), (requests, self.B), (rows, self.R), (blocks, self.M))
        return all(least <= n <= most for n, (least, _, most) in sizes)


class PagedSection(Record, frozen=True, kw_only=True):
    """The section of a target whose engines read KV caches by block tables.

    Attributes:
        network: the file in the target's folder with the network.
        library: the smallest version of TensorRT that can build the engines.
        cache_groups: the cache groups in the program's order; ``dtype`` is the type of the engines' caches.
        profiles: the ranges of step sizes of each engine.
        kernel_capabilities: the compute capabilities for which kernels were compiled, so that engines can be built for
            them.
        split_keys: the number of keys in each split of a context, which a decode step computes in separate thread
            blocks.
        summed_products: the number of products summed on the way to a logit, which bounds the rounding error.
        caches: "aliased" if each cache is also an output, in the memory of its input; "ordered" if it is only an input.
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
    """A tensor of a layer's cache, of shape [P, K, *``of_slot``].

    Attributes:
        name: the name of the input.
        written: the name of the output that shares its memory.
        dtype: the type of its elements.
        of_slot: the shape of one slot.
    """

    name: str
    written: str
    dtype: CacheDtype
    of_slot: tuple[int, ...]

    @property
    def argument(self) -> str:
        """The tensor's name in kernels: k_cache, v_cache, k_scales or v_scales."""
        return self.name.partition(":")[0]


def cache_tensors(group: CacheGroup, layer: int) -> tuple[CacheTensor, ...]:
    """Returns a layer's tensors: keys, values, and then their scales if the cache has scales."""
    kinds: list[tuple[str, CacheDtype, tuple[int, ...]]] = [
        (f"{plane.name}_cache", group.dtype, plane.shape) for plane in group.planes
    ]
    if group.dtype in SCALED_CACHES:
        kinds += [(f"{plane.name}_scales", "f32", (plane.heads,)) for plane in group.planes]
    return tuple(CacheTensor(f"{kind}:{layer}", f"{kind}_written:{layer}", of, sizes) for kind, of, sizes in kinds)
