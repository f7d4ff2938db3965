"""``optimize build``: finishes a target of a bundle on a machine that has what building it needs."""

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
    """Builds a target that waits for this machine; touches that target's folder alone.

    Args:
        path: the bundle.
        target: of it; None: the first that is built so.
        trust: as for ``LLM``: what builds may run the bundle's kernels.
        again: also if it is ready, such as for another GPU.
        progress: called with the stages "hash" (in bytes) and "build" (engines).

    Raises:
        BundleError: the bundle is damaged, or has no such target, or one that is never built.
        TrustError: ``trust`` doesn't allow its kernels to run.
        TargetError: what building needs is not here, or refuses the network.
        CapacityError: the disk is too full for an engine.
    """
    bundle = Bundle.open(path, trust)
    name, module = part_for(bundle, "compile.build", target, "built on another machine")
    build: Build = module.build
    return build(bundle, name, again=again, progress=progress)
