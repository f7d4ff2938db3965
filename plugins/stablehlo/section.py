"""The ``stablehlo`` section of a target's manifest: its modules, the sizes of each, and what they take and give.

A module's function "main", of B requests of S tokens each, in slots that have C places now, and R rows of logits:

    input_ids    i64 [B, S]
    write_index  i64 [B]            where in its slot a request's first token of this step goes
    rows         i64 [R]            indices into the B*S tokens
    past         [B*Nkv, C, D]      of each layer of a cache group: keys, then values; in the order of ``caches``
    weights                         in the order of ``weights``

    logits       f32 [R, V]
    present      as the past, whose memory it takes

It is a portable artifact: any StableHLO from its version on reads it. One that calls ``kernels`` runs where those are
(``kernels/``); if attention is among them, a slot is blocks of 32 tokens, as the cpu target's caches are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from enginewright.plugins.steps.x86_levels import LevelName
from enginewright.runtime.bundle.manifest import TargetManifest, target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.memory import format_bytes
from enginewright.runtime.shared.records import Count, Positive, Record

from ..steps.linear_io import LinearCacheGroup

LINEAR, ROTATE, WRITE_CACHE, ATTENTION = KERNELS = (
    "enginewright_linear",
    "enginewright_rotate",
    "enginewright_write_cache",
    "enginewright_attention",
)
"""Functions of ours that modules may call. One with other arguments would have another name."""

BLOCK = 32
"""Tokens of a block of the caches that attention reads."""

SECTION_FOLDER, IREE_FOLDER = "modules", "iree"
"""The folders in the target's folder: StableHLO, and what IREE's compiler made of it."""


class ModuleSection(Record, frozen=True, kw_only=True):
    """One module: steps of these sizes, padded if need be.

    Attributes:
        requests, tokens: B, and S of each.
        places: the places of a slot, C. The last is for rows that rest.
        rows: rows of logits, R.
    """

    requests: Positive
    tokens: Positive
    places: Annotated[int, Meta(gt=1)]
    rows: Positive

    @property
    def file(self) -> str:
        """The module's path in the target's folder."""
        return f"{SECTION_FOLDER}/{self.name}.mlir.bc"

    def compiled(self, device: str) -> str:
        """Returns the path of IREE's compiled module for a device, a level of x86-64 or a GPU such as "sm_90"."""
        return f"{IREE_FOLDER}/{device}/{self.name}.vmfb"

    @property
    def name(self) -> str:
        """Such as "decode-8x640", "prompt-128x640" and, where all its rows are wanted, "score-128x640"."""
        if self.tokens == 1:
            return f"decode-{self.requests}x{self.places}"
        return f"{'prompt' if self.rows < self.tokens else 'score'}-{self.tokens}x{self.places}"


class IreeSection(Record, frozen=True, kw_only=True):
    """The modules that IREE compiled.

    Attributes:
        version: the version of IREE that compiled them; the same must run them.
        levels: levels of x86-64 that they are compiled for, the plainest first.
        cuda: compute capabilities that they are compiled for; nothing of ours runs those.
    """

    version: str
    levels: tuple[LevelName, ...] = ()
    cuda: tuple[str, ...] = ()


class StableHloSection(Record, frozen=True, kw_only=True):
    """The modules of a target, and all that running a step needs.

    Attributes:
        version: the version of StableHLO that the modules are written for.
        jaxlib: the version that compiled them when they were made.
        modules: modules by phase and size.
        caches: names of the layers' inputs "past", in the order of the arguments.
        weights: names of the bundle's weights, in the order of the arguments.
        cache_groups: cache groups in the program's order.
        summed_products: the number of products summed on the way to a logit, which bounds the error of rounding.
        kernels: the functions of ours that modules call.
        iree: the same modules compiled ahead by IREE; None if they aren't.
    """

    version: str
    jaxlib: str
    modules: Annotated[tuple[ModuleSection, ...], Meta(min_length=1)]
    caches: tuple[str, ...]
    weights: tuple[str, ...]
    cache_groups: Annotated[tuple[LinearCacheGroup, ...], Meta(min_length=1)]
    summed_products: Count
    kernels: tuple[str, ...] = ()
    iree: IreeSection | None = None

    def __post_init__(self) -> None:
        if len({module.name for module in self.modules}) < len(self.modules):
            raise ValueError("modules: one is there twice")
        for places in self.lengths:
            if not any(m.requests == m.tokens == 1 for m in self.modules if m.places == places):
                raise ValueError(f"modules: there is none of one request of one token in slots of {places} places")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of places that slots may have, rising; the last is their capacity."""
        return tuple(sorted({module.places for module in self.modules}))

    @property
    def in_blocks(self) -> bool:
        """True if attention is our kernels', and caches have their layout."""
        return ATTENTION in self.kernels

    @property
    def requests(self) -> int:
        """Most of a decode step."""
        return max(module.requests for module in self.modules)


SECTIONS = {"stablehlo": StableHloSection}


def made_with(target: TargetManifest) -> Iterator[tuple[str, str]]:
    if (section := target.section(StableHloSection)) is not None:
        yield "stablehlo", section.version
        yield "jaxlib", section.jaxlib
        if section.iree is not None:
            yield "iree", section.iree.version


def described(bundle: Bundle, target: str) -> Iterator[str]:
    """The modules, and what IREE's compiler made of them, with its size."""
    section = bundle.targets[target].section(StableHloSection)
    if section is None:
        return
    places = ", ".join(str(length) for length in section.lengths)
    ours = ", calling our kernels" if section.kernels else ""
    yield f"{len(section.modules)} modules of StableHLO {section.version}, slots of {places} places{ours}"
    if (iree := section.iree) is not None:
        devices = [*(f"x86-64-{level}" for level in iree.levels), *(f"CUDA {number}" for number in iree.cuda)]
        folder = f"{target_folder(target)}/{IREE_FOLDER}/"
        files = [file.bytes for path, file in bundle.files.items() if path.startswith(folder)]
        size = format_bytes(sum(files))
        yield f"compiled by IREE {iree.version} for {', '.join(devices)}: {len(files)} files, {size}"
