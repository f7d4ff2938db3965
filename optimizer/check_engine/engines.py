"""The GPU engines that ``optimize doctor --run`` checks, and the task that it sends to the process of a check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from enginewright.optimizer.shared.target_parts import targets_with
from enginewright.plugins.doctor.engine import Engine
from enginewright.runtime.shared.targets import MEASURED, part

REFERENCE = MEASURED
"""The target that computes the expected tokens."""

TINY = "tiny"
"""The name, in a report, of the model that this package makes."""


def engines() -> dict[str, Engine]:
    """Returns the engines that can be checked, by target."""
    declared = {name: getattr(part(name, "serve.doctor"), "ENGINE", None) for name in targets_with("serve.doctor")}
    return {name: engine for name, engine in declared.items() if isinstance(engine, Engine)}


@dataclass(frozen=True)
class Task:
    """The task of a check's process.

    Attributes:
        target: the target to check.
        bundle: the path of a bundle with that target and the reference; "" for a tiny model, which is exported first.
        folder: an empty folder, for the tiny model's bundle.
        gpus: compute capabilities for that export; () for the target's default.
        build: True to build the bundle's target first, if it isn't ready.
    """

    target: str
    bundle: str
    folder: str
    gpus: tuple[str, ...] = ()
    build: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, which the process reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Task:
        """Returns the task with the values of ``to_json``."""
        return cls(**values | {"gpus": tuple(values["gpus"])})
