"""Finds optional modules of targets' packages for commands: see ``runtime.shared.targets``."""

from __future__ import annotations

from types import ModuleType

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import TARGETS
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.targets import part


def targets_with(name: str) -> list[str]:
    """Returns the targets whose package has the module ``name``, ours first.

    Raises TargetError for a package that can't be loaded.
    """
    return [target for target in TARGETS if part(target, name) is not None]


def part_for(bundle: Bundle, name: str, target: str | None, doing: str) -> tuple[str, ModuleType]:
    """Returns a target of a bundle whose package has the module ``name``, and that module.

    Args:
        bundle: the bundle.
        name: the module's name within the package.
        target: the only target to look at; None for the first that has the module.
        doing: a participle for messages, such as "tuned".

    Raises BundleError if no target has it.
    """
    there = ", ".join(sorted(bundle.targets)) or "none"
    if target is not None and target not in bundle.targets:
        raise BundleError(
            f"{bundle.path}: no target {target!r}; it has {there}", hint=f"Export again with --target {target}."
        )
    for one in [target] if target is not None else [t for t in TARGETS if t in bundle.targets]:
        module = part(one, name)
        if module is not None:
            return one, module
    what = f"target {target!r}" if target is not None else f"its targets ({there})"
    raise BundleError(
        f"{bundle.path}: nothing of {what} can be {doing}",
        hint=f"Targets that can be {doing}: {', '.join(targets_with(name))}.",
    )
