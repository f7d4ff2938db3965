"""``optimize verify``: checks that a bundle is unchanged since its export, and that it computes what its source does.

Without a source it doesn't need torch, so that machines which serve bundles can check them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginewright.plugins.doctor.examine import examine
from enginewright.plugins.doctor.machine import look_at_machine
from enginewright.plugins.emit.finished_bundle import hash_files
from enginewright.plugins.native.executable import CpuProgram
from enginewright.plugins.onnx.serve.session import load_onnxruntime
from enginewright.plugins.steps.linear_io import LinearIo
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import (
    LEAST_CONTEXT,
    carried_code,
    check_code,
    context_of,
    make_executor,
    running,
    runs_here,
    takes,
    target_groups,
)
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.shared.errors import BundleError, MissingDependencyError, RequestError
from enginewright.runtime.shared.progress import Progress, silent
from enginewright.runtime.shared.targets import part

from .capture.find_source import find_source, older_reader
from .capture.model_source import Adapter, AdapterArgument, ModelSource, check_same_adapters, parse_adapters

if TYPE_CHECKING:
    from enginewright.optimizer.shared.export_records import VerificationReport


@dataclass(frozen=True)
class TargetCheck:
    """The result of checking one target.

    Attributes:
        why_not: the reason why it wasn't run here; None if it was.
        runs_with: settings of the executor: instruction set, threads.
        comparison: its difference from the source; None without a source.
    """

    target: str
    why_not: str | None
    runs_with: dict[str, str | int]
    comparison: VerificationReport | None


@dataclass(frozen=True)
class BundleCheck:
    """The result of checking an intact bundle.

    Attributes:
        files, bytes: the hashed files, and their size.
        source: the source that targets were compared with; None for none.
        outdated: the reason why the bundle should be exported again; None if there is none.
    """

    path: str
    files: int
    bytes: int
    source: str | None
    targets: tuple[TargetCheck, ...]
    seconds: float
    outdated: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns plain values for ``--json``."""
        return asdict(self)


def check_bundle(
    path: str | Path,
    *,
    source: str | Path | None = None,
    lora: Sequence[AdapterArgument] | None = None,
    targets: Sequence[str] | None = None,
    provider: str | None = None,
    trust: str | None = None,
    progress: Progress = silent,
) -> BundleCheck:
    """Checks the structure of a bundle, the hash of every file, and the program of every target that runs here.

    Code in the bundle runs only if ``trust`` allows it; for targets with other code, only the program is checked.

    Args:
        path: the bundle.
        source: the Hugging Face directory, GGUF file or Hub id that it was made from: every target that runs here is
            compared with it as at the export, within the budget of the manifest's recipe.
        lora: the adapters that were merged at the export, in the form of ``export``.
        targets: the targets to check; by default all.
        provider: the execution provider for targets of onnxruntime, as for ``LLM``; other targets ignore it.
        trust: as for ``LLM``.
        progress: called with the stages "hash" (in bytes) and "verify".

    Raises:
        BundleError: the bundle is missing, damaged or altered, or has no such target; names the file.
        TrustError: one of ``targets`` has code that ``trust`` doesn't allow.
        SourceError, UnsupportedModelError: the source can't be read, or the bundle was not made from it.
        VerificationError: a target differs from the source by more than the recipe allows; the text has the difference.
        MissingDependencyError: a package for the source, for one of ``targets`` or for ``provider`` isn't installed.
        RequestError: there is no such provider, or no target of the bundle has one.
    """
    start = time.perf_counter()
    bundle = Bundle.open(path, trust)
    names = list(dict.fromkeys(targets or bundle.targets))
    if provider is not None:
        _check_provider(bundle, names, provider)
    for name in targets or ():
        _check_runs(bundle, name)
    original = _source(bundle, source, parse_adapters(lora), progress)
    total = hash_files(bundle, progress)
    checks = []
    for name in names:
        _check_program(bundle, name)
        reason = _why_not(bundle, name)
        placement = Placement(provider=provider if _has_providers(bundle, name) else None)
        runs_with = {} if reason else _load(bundle, name, placement)
        compared = None if reason or original is None else _compare(bundle, original, name, placement, progress)
        checks.append(TargetCheck(name, reason, runs_with, compared))
    return BundleCheck(
        path=str(path),
        files=len(bundle.files),
        bytes=total,
        source=None if source is None else str(source),
        targets=tuple(checks),
        seconds=round(time.perf_counter() - start, 3),
        outdated=older_reader(bundle.manifest.source),
    )


def _check_provider(bundle: Bundle, names: Sequence[str], provider: str) -> None:
    """Raises RequestError if none of the targets ``names`` has providers to choose from."""
    if not any(_has_providers(bundle, name) for name in names):
        owners = " or ".join(repr(name) for name in running() if takes(name, "provider"))
        raise RequestError(
            f"provider: {provider!r} is for target {owners}, and {', '.join(names) or 'nothing'} is looked at",
            hint="Leave it out.",
        )


def _check_runs(bundle: Bundle, name: str) -> None:
    """Raises BundleError, TrustError or MissingDependencyError if a target can't be run here."""
    if name in bundle.targets:
        check_code(bundle, name)
    if (reason := _why_not(bundle, name)) is not None:
        io = bundle.target(name).section(LinearIo)  # raises if it isn't there, or must be built first
        if io is not None:
            load_onnxruntime(io.onnxruntime)  # raises what says how to install it
        raise BundleError(f"{bundle.path}: target {name!r} can't be run: {reason}", hint="Leave --target out.")


def _source(
    bundle: Bundle, source: str | Path | None, adapters: Sequence[Adapter], progress: Progress
) -> ModelSource | None:
    """Finds the source with its adapters, and checks that these are the bundle's; None if no source is given."""
    if source is None:
        if adapters:
            raise RequestError("lora: adapters are a source's, and no source is given", hint="Pass --source too.")
        return None
    original = ModelSource(find_source(source, option="source", progress=progress), tuple(adapters))
    check_same_adapters(original, bundle.manifest.source, bundle.path)
    return original


def _has_providers(bundle: Bundle, name: str) -> bool:
    """Returns True if the target's executor has providers to choose from."""
    return name in bundle.targets and takes(name, "provider")


def engine_problem(bundle: Bundle, name: str) -> str | None:
    """Returns the reason why a target's engines can't run on this machine, or with this package; None if they can."""
    if not runs_here(name):
        return f"this Enginewright runs {', '.join(running())}"
    if carried_code(name) is None:
        return None
    (finding,) = examine(look_at_machine(), bundle, [name]).findings
    return None if finding.verdict == "runs" else "; ".join(finding.reasons)


def _why_not(bundle: Bundle, name: str) -> str | None:
    """Returns the reason why a target can't run here; None if it can."""
    target = bundle.targets.get(name)
    if target is None:
        return "the bundle doesn't have it"
    if target.state != "ready":
        return f"it is not built yet, and needs {target.needs or 'its device'}"
    if not runs_here(name):
        return f"this Enginewright runs {', '.join(running())}"
    if (code := carried_code(name)) is not None and bundle.trust is None:
        return f"it carries {code}, which run only for who trusts them"
    if carried_code(name) is not None:
        return engine_problem(bundle, name)
    if (io := target.section(LinearIo)) is not None:
        try:
            load_onnxruntime(io.onnxruntime)
        except MissingDependencyError as e:
            return e.message
    return None


def _check_program(bundle: Bundle, name: str) -> None:
    """Verifies a program of the cpu target's form, and its memory layout, without running it.

    Raises BundleError if it is inconsistent.
    """
    if name not in bundle.programs or getattr(part(name, "section"), "OWN_FORM", False):
        return  # a program of the target's own form: opening the bundle has looked at it
    program = bundle.programs[name]
    weights = {use.name: bundle.weight(use.name) for use in program.weights}
    blocks = {group.name: 1 for group in program.cache_groups}
    try:
        CpuProgram(program, weights, blocks=blocks, threads=1).check_memory()
    except BundleError as e:
        raise BundleError(f"{bundle.path}: target {name!r}: {e.message}", hint=e.hint) from e


def _load(bundle: Bundle, name: str, placement: Placement) -> dict[str, str | int]:
    """Loads a program, which checks every step and every weight; returns the executor's settings."""
    context = context_of(bundle, min(LEAST_CONTEXT, bundle.model.context_length))
    blocks = {group.name: 1 for group in target_groups(bundle, name, context)}
    with closing(make_executor(bundle, name, blocks, context, placement)) as executor:
        return executor.describe()


def _compare(
    bundle: Bundle, source: ModelSource, name: str, placement: Placement, progress: Progress
) -> VerificationReport:
    with MissingDependencyError.of_export("source: comparing with a source model", instead="leave --source out"):
        from .verify.compare_bundle import compare_bundle  # torch and transformers, which bundles do without
    return compare_bundle(bundle, source, name, progress, placement)
