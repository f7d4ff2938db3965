"""Records that ranks exchange when they start and when they end. Free of torch."""

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
        partition: the partition's text, such as "tensor=2".
        blocks: blocks to allocate by cache group, the same on all ranks.
        same: facts that must be equal on all ranks, by name: see ``facts``.
    """

    bundle: str
    target: str
    partition: str
    blocks: dict[str, int]
    same: dict[str, str]


class RankReply(Record, frozen=True, kw_only=True):
    """The reply of a rank that has opened its part: no ``problem``, or one, the name of its error, and a hint."""

    problem: str = ""
    kind: str = ""
    hint: str | None = None


class Report(Record, frozen=True, kw_only=True):
    """The reason why a rank ends: its own problem, or the silence of the rank ``of``.

    ``met``: True if a rank missed a collective, and it is unknown which one.
    """

    problem: str
    of: int | None = None
    met: bool = False


def facts(bundle: Bundle, program: LoweredProgram, further: Mapping[str, str]) -> dict[str, str]:
    """Returns the facts that a rank and rank 0 must agree on, by the names that errors use. ``program``: the rank's."""
    return {
        "version of Enginewright": metadata.version("enginewright"),
        **further,
        "bundle": bundle.hash,
        "program": hashlib.sha256(program.to_json().encode()).hexdigest(),
    }


def check_same(here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raises BundleError naming a value that differs from rank 0's, ``there``."""
    for name, value in there.items():
        if here.get(name) != value:
            raise BundleError(
                f"its {name} is {here.get(name)}, and that of rank 0 is {value}",
                hint="Run all ranks with the same installation and bundle, and leave the bundle as it is.",
            )
