"""The check of ``optimize doctor``: which targets of a bundle a machine can run, and why not the others. It doesn't
import torch.

Executors make the same checks when they open a target; here no target is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import TARGETS
from enginewright.runtime.shared.errors import MissingDependencyError, RequestError, TargetError
from enginewright.runtime.shared.memory import format_bytes
from enginewright.runtime.shared.targets import part

from .checks import Check, Checked, Problem
from .machine import Machine

Verdict = Literal["runs", "needs-build", "can't"]


@dataclass(frozen=True)
class Finding:
    """The verdict on a target.

    Attributes:
        target: the target's name.
        verdict: "runs" if it runs here, "needs-build" if it can be built here and then runs, or "can't".
        reasons: all problems; () if it runs.
        todo: the remedy for each problem.
        on: the devices that it runs on, or would; and further notes.
    """

    target: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    todo: tuple[str, ...] = ()
    on: tuple[str, ...] = ()


@dataclass(frozen=True)
class Examination:
    """A machine, and the finding for each target."""

    machine: Machine
    findings: tuple[Finding, ...]

    def succeeds(self, named: Sequence[str] = ()) -> bool:
        """Returns True if some target runs here; if targets are ``named``, True if all of them do."""
        running = {finding.target for finding in self.findings if finding.verdict == "runs"}
        return set(named) <= running if named else bool(running)

    def to_json(self) -> dict[str, Any]:
        """Returns the examination as values that JSON has, for ``--json``."""
        return {"machine": asdict(self.machine), "targets": [asdict(finding) for finding in self.findings]}


def examine(machine: Machine, bundle: Bundle | None = None, named: Sequence[str] = ()) -> Examination:
    """Examines the targets of a bundle; without a bundle, all targets that exist.

    Args:
        machine: the result of ``look_at_machine``.
        bundle: an open bundle, or None.
        named: the targets to examine; empty for all.

    Raises:
        RequestError: no target has one of the names.
    """
    for name in named:
        if name not in TARGETS and (bundle is None or name not in bundle.targets):
            raise RequestError(f"target: there is no {name!r}", hint=f"Take one of {', '.join(TARGETS)}.")
    names = named or (tuple(TARGETS) if bundle is None else tuple(bundle.targets))
    return Examination(machine, tuple(_finding(machine, bundle, name) for name in dict.fromkeys(names)))


def require(machine: Machine, name: str, doing: str, bundle: Bundle | None = None, *, unbuilt: bool = False) -> None:
    """Raises MissingDependencyError or TargetError with everything that a machine lacks for a target.

    Args:
        machine: the result of ``look_at_machine``.
        name: the target's name.
        doing: the participle for the message "can't be ...", such as "compiled".
        bundle: the bundle with the target, or None.
        unbuilt: True accepts a target that must be built first and can be built here.
    """
    (finding,) = examine(machine, bundle, [name]).findings
    if finding.verdict == "runs" or (unbuilt and finding.verdict == "needs-build"):
        return
    message = f"target {name}: it can't be {doing} on this machine: {'; '.join(finding.reasons)}"
    hint = " ".join(one.removesuffix(".") + "." for one in finding.todo)
    missing = any("not installed" in reason for reason in finding.reasons)
    raise (MissingDependencyError if missing else TargetError)(message, hint=hint)


def _finding(machine: Machine, bundle: Bundle | None, name: str) -> Finding:
    if bundle is None:
        return _judged(name, _checked(name, machine, None))
    target = bundle.targets.get(name)
    if target is None:
        there = ", ".join(bundle.targets) or "none"
        reason, todo = f"the bundle has no such target; it has {there}", f"Export again with --target {name}."
        return Finding(name, "can't", (reason,), (todo,))
    if name not in TARGETS:
        return Finding(name, "can't", ("this Enginewright can't run it",), ("Install a newer enginewright.",))
    checked = _checked(name, machine, target)
    if target.state == "ready":
        return _judged(name, _with_memory(checked, machine, bundle))
    reason = f"it is not built; it needs {target.needs or 'its device'}"
    if checked.problems:
        blocked = Problem(
            reason, f"Run `optimize build {bundle.path} --target {name}` where the rest of this is right."
        )
        return _judged(name, Checked((blocked, *checked.problems), checked.on))
    todo = f"Run `optimize build {bundle.path} --target {name}` here."
    return Finding(name, "needs-build", (reason,), (todo,), checked.on)


def _checked(name: str, machine: Machine, target: TargetManifest | None) -> Checked:
    """Returns the result of the check in a target's package; no problems if the package has no check."""
    check: Check = getattr(part(name, "serve.doctor"), "check", lambda machine, target: Checked())
    return check(machine, target)


def _judged(name: str, checked: Checked) -> Finding:
    problems = checked.problems
    return Finding(
        name,
        "can't" if problems else "runs",
        tuple(problem.message for problem in problems),
        tuple(dict.fromkeys(problem.hint for problem in problems)),
        checked.on,
    )


def _with_memory(checked: Checked, machine: Machine, bundle: Bundle) -> Checked:
    """Adds a note if the weights exceed the free memory. As they are mapped, this is slow but possible."""
    weights = sum(blob.bytes for blob in bundle.index.blobs)
    if weights <= machine.free_bytes:
        return checked
    slow = f"its weights, {format_bytes(weights)}, are more than the {format_bytes(machine.free_bytes)} that are free"
    return Checked(checked.problems, (*checked.on, slow))
