"""``optimize build``: builds a target of a bundle on a machine with the needed hardware and software."""

from __future__ import annotations

from pathlib import Path

from enginewright.plugins.emit.engine_report import Build, BuildReport
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.progress import Progress, silent

from .shared.target_parts import part_for


def build_target(
    path: str | Path,
    target: str | None = None,
    *,
    trust: str | None = None,
    again: bool = False,
    progress: Progress = silent,
) -> BuildReport:
    """Builds a target that an export couldn't build; changes only that target's folder.

    Args:
        path: the bundle.
        target: the target's name; None for the first one that is built in this way.
        trust: as for ``LLM``; builds may run the bundle's kernels.
        again: True also rebuilds existing engines, for example for another GPU.
        progress: called with the stages "hash" (in bytes) and "build" (engines).

    Raises:
        BundleError: the bundle is damaged, or has no such target, or the target isn't built in this way.
        TrustError: ``trust`` doesn't allow its kernels to run.
        TargetError: hardware or software is missing, or the library refuses the network.
        CapacityError: the disk is too full for an engine.
    """
    bundle = Bundle.open(path, trust)
    name, module = part_for(bundle, "compile.build", target, "built on another machine")
    build: Build = module.build
    return build(bundle, name, again=again, progress=progress)
