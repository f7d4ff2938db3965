"""Builds the engines of the tensorrt target on a machine with TensorRT and the GPU, for ``optimize build``.

Only the target's folder changes: engines are written under temporary names and renamed, then the target's manifest is
replaced. If the process is killed, the bundle is unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from enginewright.runtime.bundle.manifest import FileSection, target_folder
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import check_code
from enginewright.runtime.shared.errors import BundleError, TargetError
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from ...doctor.checks import choose_gpu, gpu_problem
from ...doctor.machine import Machine, look_at_machine
from ...emit.engine_report import BuildReport, BuiltPlan
from ...emit.finished_bundle import add_file, hash_files, replace_manifest
from ...engines.checks import FLAVOURS, build_problem, holds_copies
from ...engines.section import EngineSection, TensorRtSection
from ...gpu.cuda_driver import InstalledGpu
from ...gpu.tiles import number_of
from ...steps.paged_section import PagedSection

MakeEngines = Callable[[Bundle, str, PagedSection, int], Iterable[BuiltPlan]]
"""A function that builds engines, such as ``build_engines``: (bundle, target, its section, compute capability) ->
serialized engines.
"""


Made = tuple[tuple[EngineSection, int], ...]
"""The written engines, each with the bytes of its scratch memory."""


LIBRARY = "TensorRT"


def build(
    bundle: Bundle,
    target: str,
    *,
    again: bool = False,
    progress: Progress = silent,
    machine: Machine | None = None,
    make: MakeEngines | None = None,
) -> BuildReport:
    """Builds the engines of a target that has none yet. Implements ``Build``.

    Args:
        bundle: a bundle, opened with the caller's trust: TensorRT runs the bundle's kernels while it builds.
        target: the target's name.
        again: True also rebuilds existing engines, for example for another GPU.
        progress: called with the stages "hash" (in bytes) and "build" (engines).
        machine: this machine; None examines it.
        make: builds the engines; None for TensorRT.

    Raises:
        BundleError: the bundle is damaged, or its target isn't built in this way.
        TrustError: the bundle isn't trusted.
        TargetError: the library, the driver or the GPU is missing, or TensorRT rejects the network.
        CapacityError: the disk is too full for an engine.
    """
    start = time.perf_counter()
    path, manifest = bundle.path, bundle.targets[target]
    section = manifest.section(TensorRtSection)
    if section is None or section.paged is None:
        raise BundleError(
            f"{path}: target {target!r} is {manifest.state}: nothing of it is built on another machine",
            hint="`optimize doctor` says what of a bundle runs here.",
        )
    if manifest.state == "ready" and not again:
        engines = {engine.file: engine.bytes for engine in section.engines}
        gpus = ", ".join(section.compute_capabilities)
        return BuildReport(str(path), target, False, gpus, LIBRARY, section.version, engines, 0)
    check_code(bundle, target)
    here = machine or look_at_machine()
    gpu = _check_machine(here, f"{path}: target {target!r}", section.paged)
    hash_files(bundle, progress)
    engines_with_scratch = _make(bundle, target, section.paged, gpu, make or _tensorrt(), progress)
    built = tuple(engine for engine, _ in engines_with_scratch)
    old, new = {engine.file for engine in section.engines}, {engine.file for engine in built}
    files = {name: entry for name, entry in manifest.files.items() if name not in old}
    files |= {engine.file: FileSection(bytes=engine.bytes, sha256=engine.sha256) for engine in built}
    ready = section.model_copy(
        update={
            "engines": built,
            "version": here.packages[FLAVOURS["tensorrt"].module],
            "compute_capabilities": (gpu.capability,),
        }
    )
    finished = manifest.with_section(ready).model_copy(
        update={"state": "ready", "needs": None, "files": dict(sorted(files.items()))}
    )
    replace_manifest(bundle.path, target, finished)
    for name in old - new:
        (bundle.path / target_folder(target) / name).unlink(missing_ok=True)
    return BuildReport(
        path=str(path),
        target=target,
        built=True,
        gpu=f"{gpu.name} ({gpu.capability})",
        library=LIBRARY,
        version=ready.version,
        engines={engine.file: engine.bytes for engine in built},
        seconds=round(time.perf_counter() - start, 3),
        scratch={engine.file: scratch for engine, scratch in engines_with_scratch},
        copies=_with_copies(section.paged, engines_with_scratch),
    )


def _with_copies(paged: PagedSection, made: Made) -> tuple[str, ...]:
    groups, profiles = paged.cache_groups, {p.phase: p for p in paged.profiles}
    return tuple(
        e.file for e, scratch in made if e.phase != "both" and holds_copies(scratch, groups, profiles[e.phase])
    )


def _check_machine(machine: Machine, what: str, paged: PagedSection) -> InstalledGpu:
    """Returns the GPU for which engines are built. Raises TargetError with all missing requirements."""
    flavour = FLAVOURS["tensorrt"]
    needs = "the attention kernels"
    problems = [
        build_problem(flavour, machine.packages.get(flavour.module), paged.library),
        gpu_problem(machine.gpus, machine.gpu_problem, paged.kernel_capabilities, needs),
    ]
    in_the_way = [problem for problem in problems if problem is not None]
    gpu = choose_gpu(machine.gpus, paged.kernel_capabilities)
    if in_the_way or gpu is None:
        raise TargetError(
            f"{what} can't be built here: {'; '.join(problem.message for problem in in_the_way)}",
            hint=" ".join(problem.hint.rstrip(".") + "." for problem in in_the_way),
        )
    return gpu


def _tensorrt() -> MakeEngines:
    from .build_engines import build_engines  # only here is TensorRT needed

    return build_engines


def _make(
    bundle: Bundle, target: str, paged: PagedSection, gpu: InstalledGpu, make: MakeEngines, progress: Progress
) -> Made:
    """Builds and writes all engines. After an error, it removes those that it wrote."""
    folder, total = bundle.path / target_folder(target), len(paged.profiles)
    built: list[tuple[EngineSection, int]] = []
    progress(ProgressEvent("build", 0, total))
    try:
        for one in make(bundle, target, paged, number_of(gpu.capability)):
            built.append((_write_engine(folder, one.phase, one.plan), one.scratch_bytes))
            progress(ProgressEvent("build", len(built), total, built[-1][0].file))
    except BaseException:
        for engine, _ in built:
            if f"{target_folder(target)}/{engine.file}" not in bundle.files:
                (folder / engine.file).unlink(missing_ok=True)
        raise
    return tuple(built)


def _write_engine(folder: Path, phase: Literal["decode", "prefill"], plan: bytes) -> EngineSection:
    name, file = add_file(folder, phase, ".engine", plan)
    return EngineSection(file=name, bytes=file.bytes, sha256=file.sha256, phase=phase)
