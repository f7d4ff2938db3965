"""The interface of emitters. An emitter brings a program into the form of one target and writes it into a bundle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from enginewright.passes.formats.section import Section
from enginewright.passes.framework.base import Pass
from enginewright.passes.ir.program import Program
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.runtime.bundle.buckets import BucketPlan
from enginewright.runtime.bundle.manifest import TargetManifest
from enginewright.runtime.shared.progress import Progress

from .bundle_writer import BundleWriter
from .engine_report import EngineReport

S = TypeVar("S", bound=Section)


def unrecorded(report: EngineReport) -> None:
    """Ignores a report."""


@dataclass(frozen=True)
class EmitOptions:
    """The inputs of an emitter in addition to the program.

    Attributes:
        engines: the recipe's [engines].
        context_length: the longest request of the bundle, in tokens; 0 if it isn't known.
        buckets: fixed sizes of steps. If an emitter writes them to ``buckets.plan_path``, its executor gets padded
            steps. None for no fixed sizes.
        record: called with the report of each engine that is built.
        sections: the recipe's tables for single targets.
    """

    engines: EnginesSection = field(default_factory=EnginesSection)
    context_length: int = 0
    buckets: BucketPlan | None = None
    record: Callable[[EngineReport], None] = unrecorded
    sections: tuple[Section, ...] = ()

    def section(self, kind: type[S]) -> S:
        """Returns the recipe's table of the class ``kind``; its defaults if the recipe has none."""
        return next((section for section in self.sections if isinstance(section, kind)), None) or kind()


class Emitter(Protocol):
    """The emitter of one target. ``name`` is the target's name in recipes and bundles."""

    @property
    def name(self) -> str: ...

    def passes(self) -> list[Pass]:
        """Returns the target's own passes in order: formats of fewer bits that only it supports, then fusions.

        They run on a copy of the program, which ``emit`` then gets. A recipe may turn off or require each exact pass by
        its name.
        """
        ...

    def emit(
        self, program: Program, writer: BundleWriter, progress: Progress, options: EmitOptions = EmitOptions()
    ) -> TargetManifest:
        """Writes the target's files and weights. ``program`` isn't changed. Equal programs give equal bytes.

        Args:
            program: a program with attention in its paged form, after ``passes``.
            writer: the bundle being written; it is not committed here.
            progress: called with the stage "emit", weight by weight.
            options: further inputs of the target; most targets need none.

        Returns:
            the target's manifest; its files are filled in when the bundle is committed.

        Raises:
            UnsupportedModelError: the target can't run an op of the program.
            TargetError, RecipeError: ``options`` can't be satisfied.
            BundleError, CapacityError: a file can't be written.
        """
        ...
