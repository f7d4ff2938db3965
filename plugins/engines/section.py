"""The ``tensorrt`` section of a target's manifest: its engines, their library and GPUs, and the sizes of their
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.records import Count, Record, Sha256

from ..steps.paged_section import PagedSection

Phase = Literal["decode", "prefill", "both"]
"""The kind of an engine's steps: "decode" has one token per request, "prefill" has prompts, "both" either."""


Capability = Annotated[str, Meta(pattern=r"^[0-9]+\.[0-9]+\Z")]


Range = tuple[int, int, int]
"""The minimum, optimum and maximum of a size in an optimization profile."""


def check_ranges(**ranges: Range) -> None:
    """Raises ValueError naming the first range that isn't ascending, or begins below 1."""
    for name, sizes in ranges.items():
        if not 1 <= sizes[0] <= sizes[1] <= sizes[2]:
            raise ValueError(f"{name}: {list(sizes)} isn't [least, best, most]")


class ProfileSection(Record, frozen=True, kw_only=True):
    """The sizes of one optimization profile of an engine, each as a range. Profiles are in the engine's order.

    Attributes:
        phase: the kind of its steps.
        B: requests.
        S: tokens of each request.
        R: rows of logits.
        C: positions of a slot, one number; unused rows write to the last position.
    """

    phase: Literal["decode", "prefill"]
    B: Range
    S: Range
    R: Range
    C: Annotated[int, Meta(gt=1)]

    def __post_init__(self) -> None:
        check_ranges(B=self.B, S=self.S, R=self.R)

    def holds(self, requests: int, tokens: int, rows: int) -> bool:
        """Returns True if a step of these sizes is within the profile."""
        return all(a <= n <= c for n, (a, _, c) in ((requests, self.B), (tokens, self.S), (rows, self.R)))


class EngineSection(Record, frozen=True, kw_only=True):
    """One engine; ``file`` is its plan's path in the target's folder.

    Engines of packed tokens have no ``profiles`` here: those of segments are in segments.json, equal for all engines,
    and those of the paged form in the section ``paged``, by phase.
    """

    file: Annotated[str, Meta(min_length=1)]
    bytes: Count
    sha256: Sha256
    phase: Phase = "both"
    profiles: tuple[ProfileSection, ...] = ()


class TensorRtSection(Record, frozen=True, kw_only=True):
    """The engines of a target, built or to be built.

    Attributes:
        flavour: the library; "rtx" is TensorRT-RTX.
        form: "whole" has the model in one engine, "segments" has an engine for each part between two attentions.
        version: the version of the library that built the engines, and the only one that can run them.
        compute_capabilities: the compute capabilities of the GPUs for which they are built, ascending.
        dtype: the type of activations and caches.
        engines: the engines; empty until they are built.
        paged: the section of engines whose caches are in blocks and whose attention is a plugin; None for other forms.
    """

    flavour: Literal["rtx", "tensorrt"]
    form: Literal["whole", "segments"] = "whole"
    version: str = ""
    compute_capabilities: Annotated[tuple[Capability, ...], Meta(min_length=1)]
    dtype: Literal["f32", "f16", "bf16"] = "f16"
    engines: tuple[EngineSection, ...] = ()
    paged: PagedSection | None = None

    def __post_init__(self) -> None:
        files = [engine.file for engine in self.engines]
        if len(set(files)) < len(files):
            raise ValueError("engines: one file is listed twice")
        for i, engine in enumerate(self.engines):
            linear = self.form == "whole" and self.paged is None
            if bool(engine.profiles) != linear:
                has = "none" if linear else "some, and those of packed tokens are in segments.json or in paged"
                raise ValueError(f"engines.{i}.profiles: there are {has}")


def made_with(target: TargetManifest) -> Iterator[tuple[str, str]]:
    """Yields (name, version) of the library and of the GPUs of a target's engines, for ``optimize sbom``."""
    if (section := target.section(TensorRtSection)) is not None:
        yield "tensorrt", section.version
        yield "compute_capabilities", ", ".join(section.compute_capabilities)
