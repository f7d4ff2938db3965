"""Reports of engines that were built by an export or by `optimize build`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.progress import Progress


@dataclass(frozen=True)
class BuiltPlan:
    """An engine for steps of one phase, built by ``optimize build``.

    ``plan`` is the serialized engine. ``scratch_bytes`` is the GPU memory that it needs while it runs, as the library
    reports after loading.
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
        seconds: the duration of the build.
        peak_rss_bytes: the peak resident memory of the process that built it.
        file_bytes: the size of the file.
        compute_capabilities: the compute capabilities for which it was built.
        profiles: the sizes of its steps, as text.
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
        path: the bundle's path.
        target: the target's name.
        built: False if the target was ready and wasn't changed.
        gpu: the GPU on which the engines run.
        library, version: the library that built them; only the same version can run them.
        engines: the file's name -> the bytes of the engine.
        seconds: the duration of the build.
        scratch: the file's name -> the GPU memory in bytes that the engine needs while it runs, without weights and
            caches.
        copies: the files of engines whose scratch memory is large enough for a copy of a cache, which TensorRT may have
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
        """Returns the report as values that JSON has, for ``--json``."""
        return asdict(self)


class Build(Protocol):
    """Builds a target of a bundle on this machine, where it will run. It is the function ``build`` in the module
    ``compile.build`` of a target's package.
    """

    def __call__(self, bundle: Bundle, target: str, *, again: bool, progress: Progress) -> BuildReport:
        """Builds the target's engines. Raises an EnginewrightError.

        Args:
            bundle: a bundle, opened with the caller's trust.
            target: the target's name.
            again: True also rebuilds existing engines, for example for another GPU.
            progress: called with the stages "hash" (in bytes) and "build" (engines).
        """
