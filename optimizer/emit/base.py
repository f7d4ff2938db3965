"""What an emitter is: it brings a program into the form of one target and writes it into a bundle."""

from __future__ import annotations

from typing import Protocol

from enginewright.passes.ir.program import Program
from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.bundle.writer import BundleWriter

from ..progress import Progress


class Emitter(Protocol):
    """One target. ``name`` is what recipes and bundles call it."""

    @property
    def name(self) -> str: ...

    def emit(self, program: Program, writer: BundleWriter, progress: Progress) -> TargetManifest:
        """Writes the target's files and weights; leaves ``program`` as it is. The same program gives the same bytes.

        Args:
            program: with attention in its paged form.
            writer: the bundle being written; it is not committed here.
            progress: told the stage "emit", weight by weight.

        Returns:
            the target's manifest; its files are filled in when the bundle is committed.

        Raises:
            UnsupportedModelError: the target can't run an op of the program.
            BundleError, CapacityError: a file can't be written.
        """
        ...
