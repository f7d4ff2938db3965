"""Checks if a machine can run the cpu target."""

from __future__ import annotations

from typing import Any

from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.errors import counted
from enginewright.runtime.shared.threads import available_threads

from ...doctor.checks import Checked, Problem
from ...doctor.machine import Machine
from ...native.processor import processor_features, processor_name


def check(machine: Machine, target: TargetManifest | None) -> Checked:
    if not machine.instruction_sets:
        why = machine.problems.get("enginewright", "it has no kernels for this processor")
        hint = "Install a wheel of enginewright for this machine, or build it here: pip install enginewright"
        return Checked((Problem(f"the extension module doesn't load: {why}", hint, missing=True),))
    return Checked(on=(f"{machine.instruction_sets[0]} kernels, {counted(machine.cores, 'core')}",))


def look(problems: dict[str, str]) -> dict[str, Any]:
    """Returns the fields of ``Machine`` that this target needs. If the extension doesn't load, ``problems`` gets the
    reason.
    """
    return {
        "processor": processor_name(),
        "instruction_sets": _instruction_sets(problems),
        "cores": available_threads(),
        "features": processor_features(),
    }


def _instruction_sets(problems: dict[str, str]) -> tuple[str, ...]:
    try:
        from ...native.executable import isas
    except ImportError as e:  # no wheel for this machine, or a build that failed
        problems["enginewright"] = str(e)
        return ()
    return tuple(isas())
