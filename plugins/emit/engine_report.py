"""Engines that were built: what an export reports of them, and what `optimize build` writes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.progress import Progress


@dataclass(frozen=True)
class BuiltPlan:
    """An engine for steps of one phase, as ``optimize build`` writes it.

    ``scratch_bytes``: of GPU memory that it needs while it runs, as the library says once it is loaded.
    """

    phase: Literal["decode", "prefill"]
    plan: bytes
    scratch_bytes: int


@dataclass(frozen=True)
class EngineReport:
    """An engine as it was built, for report.json.

    Attributes:
        target: the target's name.
        file: the file's path in the bundle.
        seconds: the time of building it, in seconds.
        peak_rss_bytes: the most that the process which built it had resident.
        file_bytes: the size of the file.
        compute_capabilities: the compute capabilities that it was built for.
        profiles: sizes of its steps, as text.
        attentions: attentions that the library fuses; others are computed op by op.
    """

    target: str
    file: str
    seconds: float
    peak_rss_bytes: int
    file_bytes: int
    compute_capabilities: tuple[str, ...]
    profiles: tuple[str, ...]
    attentions: int


@dataclass(frozen=True)
class BuildReport:
    """The result of `optimize build`.

    Attributes:
        built: False if the target was ready, and was left alone.
        gpu: the GPU that the engines run on.
        library, version: the library that built them; the same version has to run them.
        engines: file -> bytes.
        scratch: file -> bytes of GPU memory that the engine needs while it runs, besides weights and caches.
        copies: files of engines whose memory is large enough for a copy of a cache, which TensorRT may have added.
    """

    path: str
    target: str
    built: bool
    gpu: str
    library: str
    version: str
    engines: dict[str, int]
    seconds: float
    scratch: dict[str, int] = field(default_factory=dict)
    copies: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Makes plain values for ``--json``."""
        return asdict(self)


class Build(Protocol):
    """Finishes a target of a bundle that waits for this machine. A target that is built has the module
    ``compile.build`` in its package, and in it this function, ``build``."""

    def __call__(self, bundle: Bundle, target: str, *, again: bool, progress: Progress) -> BuildReport:
        """Raises an error of ours.

        Args:
            bundle: a bundle, opened with the caller's trust.
            target: the target's name.
            again: also if it is ready, such as for another GPU.
            progress: a function called with the stages "hash" (in bytes) and "build" (engines).
        """
