"""Reports of built engines: for an export, and for `optimize build`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.progress import Progress


@dataclass(frozen=True)
class BuiltPlan:
    """An engine for steps of one phase, built by ``optimize build``.

    ``scratch_bytes``: the GPU memory that it needs while it runs, reported by the library after loading.
    """

    phase: Literal["decode", "prefill"]
    plan: bytes
    scratch_bytes: int


@dataclass(frozen=True)
class EngineReport:
    """The report of a built engine, for report.json.

    Attributes:
        target: the target's name.
        file: the file's path in the bundle.
        seconds: the duration of building it.
        peak_rss_bytes: the peak resident memory of the process that built it.
        file_bytes: the size of the file.
        compute_capabilities: the compute capabilities that it was built for.
        profiles: sizes of its steps, as text.
        attentions: the number of attentions that the library fuses; others are computed op by op.
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
        built: False if the target was ready and wasn't changed.
        gpu: the GPU that the engines run on.
        library, version: the library that built them; only the same version can run them.
        engines: bytes of each engine's file, by the file's name.
        scratch: GPU memory in bytes that each engine needs while it runs, besides weights and caches, by file.
        copies: files of engines whose scratch memory is large enough for a copy of a cache, which TensorRT may have
            added.
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
        """Returns plain values for ``--json``."""
        return asdict(self)


class Build(Protocol):
    """Finishes a target of a bundle that waits for this machine. A target that is built has the module
    ``compile.build`` in its package, and in it this function, ``build``."""

    def __call__(self, bundle: Bundle, target: str, *, again: bool, progress: Progress) -> BuildReport:
        """Builds the target's engines. Raises an EnginewrightError.

        Args:
            bundle: a bundle, opened with the caller's trust.
            target: the target's name.
            again: True also rebuilds existing engines, for example for another GPU.
            progress: a function called with the stages "hash" (in bytes) and "build" (engines).
        """
