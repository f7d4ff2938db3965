"""The ``stablehlo`` section of a target's manifest: its modules, their sizes, arguments and results.

The function "main" of a module for B requests of S tokens each, slots of C positions, and R rows of logits:

    input_ids    i64 [B, S]
    write_index  i64 [B]            the position in its slot of a request's first token in this step
    rows         i64 [R]            indices into the B*S tokens
    past         [B*Nkv, C, D]      of each layer of a cache group: keys, then values; in the order of ``caches``
    weights                         in the order of ``weights``

    logits       f32 [R, V]
    present      as the past, whose memory it reuses

A module is a portable artifact, which any StableHLO of its version or later reads. A module that calls ``kernels`` runs
only with their library (``kernels/``); if attention is among them, a slot consists of blocks of 32 tokens, as in the
cpu target's caches.
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
"""The names of our functions that modules may call. A function whose arguments change gets another name."""

BLOCK = 32
"""The number of tokens in a block of the caches that our attention kernels read."""

SECTION_FOLDER, IREE_FOLDER = "modules", "iree"
"""The folders inside the target's folder: of StableHLO modules, and of the files that IREE's compiler made from
them.
"""


class ModuleSection(Record, frozen=True, kw_only=True):
    """The sizes of a module. Smaller steps are padded to them.

    Attributes:
        requests, tokens: B, and S.
        places: the number of positions in a slot, C. The last one is for rows of padding.
        rows: the rows of logits, R.
    """

    requests: Positive
    tokens: Positive
    places: Annotated[int, Meta(gt=1)]
    rows: Positive

    @property
    def file(self) -> str:
        """The path of the module in the target's folder."""
        return f"{SECTION_FOLDER}/{self.name}.mlir.bc"

    def compiled(self, device: str) -> str:
        """Returns the path of IREE's compiled module for a device: a level of x86-64, or a GPU such as "sm_90"."""
        return f"{IREE_FOLDER}/{device}/{self.name}.vmfb"

    @property
    def name(self) -> str:
        """The module's name, such as "decode-8x640", "prompt-128x640" or, with logits for all tokens,
        "score-128x640".
        """
        if self.tokens == 1:
            return f"decode-{self.requests}x{self.places}"
        return f"{'prompt' if self.rows < self.tokens else 'score'}-{self.tokens}x{self.places}"


class IreeSection(Record, frozen=True, kw_only=True):
    """The facts about the modules that IREE compiled.

    Attributes:
        version: the version of IREE that compiled them; its runtime must have the same.
        levels: the levels of x86-64 for which they are compiled, lowest first.
        cuda: the compute capabilities for which they are compiled; only other programs run those.
    """

    version: str
    levels: tuple[LevelName, ...] = ()
    cuda: tuple[str, ...] = ()


class StableHloSection(Record, frozen=True, kw_only=True):
    """The modules of a target, and the facts that running a step needs.

    Attributes:
        version: the version of StableHLO that the modules are written for.
        jaxlib: the version of jaxlib at the export.
        modules: the sizes of the modules.
        caches: the names of the layers' input caches, in the order of the arguments.
        weights: the names of the bundle's weights, in the order of the arguments.
        cache_groups: the cache groups in the program's order.
        summed_products: the number of products summed on the way to a logit, which bounds the rounding error.
        kernels: the names of our functions that modules call.
        iree: the facts about the same modules compiled by IREE; None if they aren't.
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
        """The lengths of slots in positions, ascending."""
        return tuple(sorted({module.places for module in self.modules}))

    @property
    def in_blocks(self) -> bool:
        """True if our kernels compute attention, so that caches have the kernels' layout in blocks."""
        return ATTENTION in self.kernels

    @property
    def requests(self) -> int:
        """The most requests of a decode step."""
        return max(module.requests for module in self.modules)


SECTIONS = {"stablehlo": StableHloSection}


def made_with(target: TargetManifest) -> Iterator[tuple[str, str]]:
    if (section := target.section(StableHloSection)) is not None:
        yield "stablehlo", section.version
        yield "jaxlib", section.jaxlib
        if section.iree is not None:
            yield "iree", section.iree.version


def described(bundle: Bundle, target: str) -> Iterator[str]:
    """Yields lines of text about the modules, and about the sizes of IREE's files, for ``optimize inspect``."""
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
