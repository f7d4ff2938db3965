"""Records that ranks exchange when they start and when they end. They don't import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import metadata

from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import BundleError
from enginewright.runtime.shared.lowered_program import LoweredProgram
from enginewright.runtime.shared.records import Record


class PartSetting(Record, frozen=True, kw_only=True):
    """The settings with which every rank opens its part of the model.

    Attributes:
        bundle: the bundle's path on all machines.
        target: the target's name.
        partition: the partition as text, such as "tensor=2".
        blocks: the number of blocks to allocate for each cache group, the same on all ranks.
        same: facts that must be equal on all ranks, by name; see ``facts``.
    """

    bundle: str
    target: str
    partition: str
    blocks: dict[str, int]
    same: dict[str, str]


class RankReply(Record, frozen=True, kw_only=True):
    """The reply of a rank that has opened its part, or failed to.

    Attributes:
        problem: the error's message; "" without an error.
        kind: the name of the error's class.
        hint: the error's hint.
    """

    problem: str = ""
    kind: str = ""
    hint: str | None = None


class Report(Record, frozen=True, kw_only=True):
    """The reason why a rank has ended.

    Attributes:
        problem: the problem: its own, or that of the rank ``of``.
        of: the silent rank that it waited for; None if the problem is its own.
        met: True if some rank missed a collective, and it is unknown which one.
    """

    problem: str
    of: int | None = None
    met: bool = False


def facts(bundle: Bundle, program: LoweredProgram, further: Mapping[str, str]) -> dict[str, str]:
    """Returns the facts that a rank and rank 0 must agree on, by the names that errors use.

    ``program`` is this rank's program; ``further`` has a target's own facts.
    """
    return {
        "version of Enginewright": metadata.version("enginewright"),
        **further,
        "bundle": bundle.hash,
        "program": hashlib.sha256(program.to_json().encode()).hexdigest(),
    }


def check_same(here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raises BundleError naming a fact whose value ``here`` differs from rank 0's, ``there``."""
    for name, value in there.items():
        if here.get(name) != value:
            raise BundleError(
                f"its {name} is {here.get(name)}, and that of rank 0 is {value}",
                hint="Run all ranks with the same installation and bundle, and leave the bundle as it is.",
            )
