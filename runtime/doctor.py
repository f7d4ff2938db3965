"""What of a bundle a machine can run, and why not the rest: ``optimize doctor``. Free of torch.

The checks are those that executors make when they open a target; here all are made, and nothing is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from enginewright.plugins.onnxruntime.library import NAME as OPERATORS
from enginewright.plugins.shared.errors import RequestError

from .bundle.linear_io import LinearIo
from .bundle.manifest import TargetManifest
from .bundle.reader import Bundle
from .executors.machine import Machine
from .executors.onnx_session import OLDEST, PROVIDERS, is_older
from .executors.tensorrt_checks import FLAVOURS, Problem, build_problem, choose_gpu, gpu_problem, library_problem
from .kv_cache.cache_groups import format_bytes

Verdict = Literal["runs", "needs-build", "can't"]


@dataclass(frozen=True)
class Finding:
    """What was found about a target.

    Attributes:
        target: its name.
        verdict: "runs" here; "needs-build": it can be finished here, and then runs; or it "can't".
        reasons: all that is in the way; nothing where it runs.
        todo: what to do about each.
        on: what it runs on, or would; what else is worth knowing.
    """

    target: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    todo: tuple[str, ...] = ()
    on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Examination:
    """A machine and, for each target, what was found."""

    machine: Machine
    findings: tuple[Finding, ...]

    def succeeds(self, named: Sequence[str] = ()) -> bool:
        """Whether a target runs here; of ``named`` ones, whether all do."""
        running = {finding.target for finding in self.findings if finding.verdict == "runs"}
        return set(named) <= running if named else bool(running)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"machine": asdict(self.machine), "targets": [asdict(finding) for finding in self.findings]}


def examine(machine: Machine, bundle: Bundle | None = None, named: Sequence[str] = ()) -> Examination:
    """Looks at the targets of a bundle, or, without one, at what its targets could be.

    Args:
        machine: from ``look_at_machine``.
        bundle: an open one, or None.
        named: the targets to look at; none: all.

    Raises:
        RequestError: a name that no target has.
    """
    for name in named:
        if name not in _CHECKS and (bundle is None or name not in bundle.targets):
            raise RequestError(f"target: there is no {name!r}", hint=f"Take one of {', '.join(TARGETS)}.")
    names = named or (tuple(_CHECKS) if bundle is None else tuple(bundle.targets))
    return Examination(machine, tuple(_finding(machine, bundle, name) for name in dict.fromkeys(names)))


@dataclass(frozen=True)
class _Checked:
    problems: tuple[Problem, ...] = ()
    on: tuple[str, ...] = ()


def _finding(machine: Machine, bundle: Bundle | None, name: str) -> Finding:
    if bundle is None:
        return _judged(name, _CHECKS[name](machine, None))
    target = bundle.targets.get(name)
    if target is None:
        there = ", ".join(bundle.targets) or "none"
        reason, todo = f"the bundle has no such target; it has {there}", f"Export again with --target {name}."
        return Finding(name, "can't", (reason,), (todo,))
    if name not in _CHECKS:
        return Finding(name, "can't", ("this Enginewright can't run it",), ("Install a newer enginewright.",))
    checked = _CHECKS[name](machine, target)
    if target.state == "ready":
        return _judged(name, _with_memory(checked, machine, bundle))
    reason = f"it is not built; it needs {target.needs or 'its device'}"
    if checked.problems:
        blocked = Problem(
            reason, f"Run `optimize build {bundle.path} --target {name}` where the rest of this is right."
        )
        return _judged(name, _Checked((blocked, *checked.problems), checked.on))
    todo = f"Run `optimize build {bundle.path} --target {name}` here."
    return Finding(name, "needs-build", (reason,), (todo,), checked.on)


def _judged(name: str, checked: _Checked) -> Finding:
    problems = checked.problems
    return Finding(
        name,
        "can't" if problems else "runs",
        tuple(problem.message for problem in problems),
        tuple(dict.fromkeys(problem.hint for problem in problems)),
        checked.on,
    )


def _with_memory(checked: _Checked, machine: Machine, bundle: Bundle) -> _Checked:
    """Weights are mapped, so that more of them than memory is slow, and not impossible."""
    weights = sum(blob.bytes for blob in bundle.index.blobs)
    if weights <= machine.free_bytes:
        return checked
    slow = f"its weights, {format_bytes(weights)}, are more than the {format_bytes(machine.free_bytes)} that are free"
    return _Checked(checked.problems, (*checked.on, slow))


def _check_cpu(machine: Machine, target: TargetManifest | None) -> _Checked:
    if not machine.instruction_sets:
        why = machine.problems.get("enginewright", "it has no kernels for this processor")
        hint = "Install a wheel of enginewright for this machine, or build it here: pip install enginewright"
        return _Checked((Problem(f"the extension module doesn't load: {why}", hint, missing=True),))
    return _Checked(on=(f"{machine.instruction_sets[0]} kernels, {_counted(machine.cores, 'core')}",))


def _check_onnx(machine: Machine, target: TargetManifest | None) -> _Checked:
    needed = target.io.onnxruntime if target is not None and target.io is not None else OLDEST
    found = machine.packages.get("onnxruntime")
    install = f"Install it with: pip install 'onnxruntime>={needed}'"
    if found is None:
        return _Checked((Problem("onnxruntime is not installed", install, missing=True),))
    if why := machine.problems.get("onnxruntime"):
        return _Checked((Problem(why, f"Install it anew: pip install --force-reinstall 'onnxruntime>={needed}'"),))
    if is_older(found, needed):
        return _Checked((Problem(f"it needs onnxruntime {needed} or newer, and {found} is installed", install),))
    known = [name for name, provider in PROVIDERS.items() if provider.full_name in machine.providers]
    on = f"onnxruntime {found}, providers {', '.join(known) or 'unknown'}"
    return _Checked(on=(on, *_variant(target.io if target is not None else None, machine)))


def _variant(io: LinearIo | None, machine: Machine) -> tuple[str, ...]:
    """Which of several files runs on a CPU, and why it isn't the fastest."""
    if io is None or len(io.variants) == 1:
        return ()
    taken = io.fastest(operators=machine.onnx_operators)
    runs = f"on a CPU its variant {taken} runs"
    return (runs if taken == io.variants[-1] else f"{runs}: variant kernels needs {OPERATORS}, which is missing",)


def _check_tensorrt(name: str) -> Callable[[Machine, TargetManifest | None], _Checked]:
    flavour = FLAVOURS[name]

    def check(machine: Machine, target: TargetManifest | None) -> _Checked:
        section = target.tensorrt if target is not None else None
        found = machine.packages.get(flavour.module)
        capabilities, what = flavour.capabilities, f"{flavour.name}'s engines"
        library = library_problem(flavour, found, "")
        if section is not None and target is not None:
            capabilities, what = section.compute_capabilities, "the engines"
            library = library_problem(flavour, found, section.version)
            if target.state == "needs-build" and section.paged is not None:
                capabilities, what = section.paged.kernel_capabilities, "the attention kernels"
                library = build_problem(flavour, found, section.paged.library)
        problems = [library, gpu_problem(machine.gpus, machine.gpu_problem, capabilities, what)]
        gpu = choose_gpu(machine.gpus, capabilities)
        on = [] if found is None else [f"{flavour.name} {found}"]
        on += [] if gpu is None else [f"{gpu.name} ({gpu.capability}), {format_bytes(gpu.memory_bytes)}"]
        return _Checked(tuple(p for p in problems if p is not None), (", ".join(on),) if on else ())

    return check


def _check_torch_tensorrt(machine: Machine, target: TargetManifest | None) -> _Checked:
    torch, library = machine.packages.get("torch"), machine.packages.get("torch_tensorrt")
    problems = []
    if torch is None:
        hint = "Install a build of PyTorch with CUDA: see pytorch.org"
        problems.append(Problem("PyTorch is not installed", hint, missing=True))
    elif not machine.torch_cuda:
        hint = "Install a build of PyTorch with CUDA: see pytorch.org"
        problems.append(Problem(f"PyTorch {torch} is a build without CUDA", hint))
    if library is None:
        hint = "Install it with: pip install torch-tensorrt"
        problems.append(Problem("torch_tensorrt is not installed", hint, missing=True))
    if (no_gpu := gpu_problem(machine.gpus, machine.gpu_problem, ())) is not None:
        problems.append(no_gpu)
    on = [] if torch is None else [f"PyTorch {torch}"]
    on += [] if library is None else [f"torch_tensorrt {library}"]
    return _Checked(tuple(problems), (", ".join(on),) if on else ())


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


_CHECKS: dict[str, Callable[[Machine, TargetManifest | None], _Checked]] = {
    "cpu": _check_cpu,
    "onnx": _check_onnx,
    "tensorrt-rtx": _check_tensorrt("rtx"),
    "tensorrt": _check_tensorrt("tensorrt"),
    "torch-tensorrt": _check_torch_tensorrt,
}
"""In the order in which they are shown."""

TARGETS = tuple(_CHECKS)
"""All targets that there are."""
