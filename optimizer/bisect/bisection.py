"""``bisect``: the first pass, layer, call and tensor at which two runs of a model differ."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from enginewright.optimizer.capture import CapturedModel, capture
from enginewright.optimizer.capture.check_source import TEXT
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.recipes.sections import PoolingSection
from enginewright.optimizer.recipes.stored import recipe_of
from enginewright.passes.framework.fast_evaluation import WeightCache
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import ComparisonError
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent
from enginewright.runtime.text.tokenizer import Tokenizer

from .bundle_run import BundleRun
from .explain import program_reasons
from .first_divergence import Comparison, PassSearch, compare, describe_divergence
from .program_run import ProgramRun
from .replay import CAPTURE, Stage, replay
from .report import BisectReport, FirstDivergence, SmallestFactor, StoredTensors
from .request import (
    Given,
    Options,
    check_calibration,
    check_layers,
    check_meaning,
    check_no_adapters,
    check_same_cache,
    check_same_model,
    choose_tokens,
    recovery_of,
)
from .runs import Run
from .source_run import SourceRun
from .stored_tensors import compare_bundles, compare_with_export, other_versions
from .tolerance import GAIN, ROUNDING, SAME_GAIN, SAME_INTEGERS, Tolerance, coarsest
from .values import Used, Values, in_layers, not_covered

EMISSION = "emission, stored weights or kernels"


def bisect(a: Given, b: Given, options: Options = Options(), progress: Progress | None = None) -> BisectReport:
    """Finds the first difference of two runs.

    A source and a bundle: the source is captured again and rewritten by the passes of the bundle's recipe; each stage
    is compared with the one before, and the bundle with the last. A source and itself: the same with the passes of
    ``options.recipe``. Two bundles, two targets or instruction sets of one, or two sources: directly.

    Each value that both runs have replaces the second run's value, so that a difference is caused by the call itself
    and not by an earlier one.

    Every stored tensor of a bundle is also compared, bit for bit, with the repeated export's or the other bundle's.

    Raises:
        RequestError: ``options`` has a layer that the model doesn't have.
        ComparisonError: the two are different models, have no value in common, or the calibration can't be repeated.
        SourceError, UnsupportedModelError, BundleError, RecipeError, PassError, CapacityError: as for an export and for
            opening a bundle.
    """
    a, b = (one.found(progress or silent) for one in (a, b))
    check_meaning(a, b, options or Options())
    with tempfile.TemporaryDirectory(prefix="enginewright-") as scratch:
        run = _Run(options or Options(), progress or silent, Path(scratch))
        if a.is_bundle and b.is_bundle:
            return run.two_bundles(a, b)
        if a.is_bundle or b.is_bundle:
            return run.source_and_bundle(*((b, a) if a.is_bundle else (a, b)))
        if a.is_same(b):
            return run.passes(a)
        return run.two_sources(a, b)


@dataclass
class _Run:
    options: Options
    progress: Progress
    scratch: Path
    notes: list[str] = field(default_factory=list)
    tensors: StoredTensors | None = None
    used: Used = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    # ---- what can be compared

    def source_and_bundle(self, source: Given, given: Given) -> BisectReport:
        assert isinstance(given.what, Path)
        bundle = Bundle.open(given.what)
        recipe = recipe_of(bundle)
        check_no_adapters(bundle, source)
        trained = recovery_of(bundle, self.options.recovered)
        target = given.target or _first_target(bundle)
        bundle.program(target)  # raises if there is none
        if trained is None:  # else it has the tokens
            check_calibration(bundle, target, recipe, self.options.calibration)
        name = f"{given.name}, target {target}"
        captured = self._capture(source, bundle.model.context_length, recipe.pooling)
        if trained is not None:
            trained.check_source(captured)
        check_same_model(captured.model_info, source.name, bundle.model, given.name)
        stages = replay(
            source.what,
            captured,
            recipe,
            target,
            calibration=self.options.calibration,
            recovered=trained,
            targets=tuple(bundle.manifest.targets),
            scratch=self.scratch,
            progress=self.progress,
        )
        last = stages[-1].program
        check_same_cache(last.cache_groups, source.name, bundle.program(target).cache_groups, given.name)
        sequences = self._tokens(bundle.model, bundle.tokenizer_files)
        run = self._source(source, bundle.model, recipe)
        lowering = lower_program(last)
        self.tensors = compare_with_export(lowering, bundle, target, self.options.layers, self.progress)
        if self.tensors.differing:
            self.notes += other_versions(bundle)
        search = self._search(run, stages, sequences, recipe)
        if (report := self._first_pass(search, source.name, name, sequences)) is not None:
            return report
        self.progress(ProgressEvent("compare", 0, 0, name))
        exported = search.program(len(stages) - 1)
        emitted = BundleRun(bundle, name, target=target, isa=given.isa, leaves=run.leaves, scaling=exported.scaling)
        shared = search.common(len(stages) - 1, emitted)
        values = emitted.values(sequences, shared)
        tolerance = self._tolerance(exact=not recipe.rounded)
        expected = search.values(len(stages) - 1, shared)
        compared = compare(exported, emitted, expected, values, tolerance, self.options.layers)
        self.used = emitted.used
        divergence = describe_divergence(EMISSION, None, emitted, compared, shared)
        if divergence is not None:
            calls = [call for call in emitted.calls if emitted.describe(call) in divergence.calls]
            more = program_reasons(lowering.program, emitted.program, calls)
            divergence = replace(divergence, reasons=[*divergence.reasons, *more])
        return self._report(source.name, f"{name} ({emitted.isa})", sequences, search, compared, divergence)

    def passes(self, source: Given) -> BisectReport:
        recipe = load_recipe(self.options.recipe or "f32")
        if recipe.searched:
            raise ComparisonError(
                f"recipe {recipe.name} searches for formats or shapes, which isn't a pass",
                hint="Export with it, and compare the bundle, whose recipe has what was chosen.",
            )
        captured = self._capture(source, recipe.context_length, recipe.pooling)
        info = captured.model_info
        stages = replay(
            source.what,
            captured,
            recipe,
            source.target or recipe.targets[0],
            calibration=self.options.calibration,
            scratch=self.scratch,
            progress=self.progress,
        )
        sequences = self._tokens(info, lambda: captured.tokenizer_files)
        run = self._source(source, info, recipe)
        search = self._search(run, stages, sequences, recipe)
        name = f"{source.name} through the passes of recipe {recipe.name}"
        report = self._first_pass(search, source.name, name, sequences)
        self.used = search.program(len(stages) - 1).used
        return report or self._report(source.name, name, sequences, search, None, None)

    def two_bundles(self, a: Given, b: Given) -> BisectReport:
        assert isinstance(a.what, Path)
        assert isinstance(b.what, Path)
        bundles = [Bundle.open(a.what), Bundle.open(b.what)]
        first, second = bundles
        check_same_model(first.model, a.name, second.model, b.name)
        targets = [side.target or _first_target(bundle) for side, bundle in zip((a, b), bundles, strict=True)]
        runs = [
            BundleRun(bundle, f"{side.name}, target {target}", target=target, isa=side.isa)
            for side, bundle, target in zip((a, b), bundles, targets, strict=True)
        ]
        for one in runs:
            check_layers(self.options.layers, one.leaves)
        groups = [bundle.program(target).cache_groups for bundle, target in zip(bundles, targets, strict=True)]
        check_same_cache(groups[0], a.name, groups[1], b.name)
        recipes = [recipe_of(bundle) for bundle in bundles]
        alike = recipes[0].weights == recipes[1].weights
        if not alike and any(r.weights.method == "awq" or r.weights.smooth or r.weights.rotate for r in recipes):
            raise ComparisonError(
                f"{a.name} and {b.name}: channels of one are changed (smooth, rotate, awq): values can't be compared",
                hint="Compare each of them with the source.",
            )
        sequences = self._tokens(first.model, first.tokenizer_files)
        tolerance = self._tolerance(exact=not recipes[0].rounded)
        if not alike:
            tolerance = self._coarse(max(recipes, key=coarsest))
            self.notes.append("the two have other formats: what rounding may do is allowed")
        layers = self.options.layers
        self.tensors = compare_bundles(first, targets[0], second, targets[1], alike, layers, self.progress)
        values_a, values_b = self._each(runs, sequences)
        compared = compare(runs[0], runs[1], values_a, values_b, tolerance, layers)
        self.used = runs[1].used
        divergence = describe_divergence("", None, runs[1], compared, values_a)
        names = [f"{run.name} ({run.isa})" for run in runs]
        return self._report(names[0], names[1], sequences, None, compared, divergence)

    def two_sources(self, a: Given, b: Given) -> BisectReport:
        captured = [self._capture(one, None) for one in (a, b)]
        infos = [c.model_info for c in captured]
        check_same_model(infos[0], a.name, infos[1], b.name)
        context = min(info.context_length for info in infos)
        sequences = self._tokens(infos[0], lambda: captured[0].tokenizer_files)
        runs = [self._source(one, replace(infos[0], context_length=context)) for one in (a, b)]
        values_a, values_b = self._each(runs, sequences)
        tolerance = self._tolerance(exact=True)
        compared = compare(runs[0], runs[1], values_a, values_b, tolerance, self.options.layers)
        # Transformers' modules have no calls: the program as captured has them, and knows what tokens use.
        program_run = ProgramRun(captured[1].program, b.name, leaves=runs[1].leaves)
        program_run.values(sequences, values_a)
        self.used = program_run.used
        divergence = describe_divergence("", None, program_run, compared, values_a)
        return self._report(a.name, b.name, sequences, None, compared, divergence)

    # ---- how

    def _capture(
        self, source: Given, context_length: int | None, pooling: PoolingSection | None = None
    ) -> CapturedModel:
        self.progress(ProgressEvent("capture", 0, 1, source.name))
        part = TEXT if isinstance(source.what, Path) else None  # what a bundle was made of
        captured = capture(source.what, context_length=context_length, part=part, pooling=pooling)
        self.progress(ProgressEvent("capture", 1, 1, captured.model_info.architecture))
        return captured

    def _source(self, source: Given, info: ModelInfo, recipe: Recipe | None = None) -> SourceRun:
        run = SourceRun(
            source.what,
            source.name,
            context_length=info.context_length,
            texts=info.pooling is not None,
            section=None if recipe is None else recipe.pooling,
        )
        if info.pooling is not None:
            self.notes.append(
                f"a model for {info.pooling.task}: values of tokens are compared, not those of whole texts"
            )
        check_layers(self.options.layers, run.leaves)
        return run

    def _tokens(self, info: ModelInfo, read_files: Callable[[], TokenizerFiles | None]) -> list[torch.Tensor]:
        options = self.options
        files = read_files() if options.texts else None
        tokenizer = Tokenizer(files) if files is not None and files.tokenizer_json else None
        return choose_tokens(info, tokens=options.tokens, texts=options.texts, seed=options.seed, tokenizer=tokenizer)

    def _each(self, runs: Sequence[Run], sequences: Sequence[torch.Tensor]) -> tuple[Values, Values]:
        self.progress(ProgressEvent("compare", 0, 2, runs[0].name))
        first = runs[0].values(sequences)
        self.progress(ProgressEvent("compare", 1, 2, runs[1].name))
        second = runs[1].values(sequences, first)
        self.progress(ProgressEvent("compare", 2, 2, ""))
        return first, second

    def _tolerance(self, *, exact: bool) -> Tolerance:
        if exact or self.options.tolerance:
            return Tolerance(self.options.tolerance or ROUNDING)
        return Tolerance(SAME_INTEGERS, gain=SAME_GAIN)

    def _coarse(self, recipe: Recipe) -> Tolerance:
        return Tolerance(self.options.tolerance or coarsest(recipe), chance=True, gain=GAIN)

    def _search(
        self, run: SourceRun, stages: Sequence[Stage], sequences: Sequence[torch.Tensor], recipe: Recipe
    ) -> PassSearch:
        self.progress(ProgressEvent("compare", 0, 0, run.name))
        source_values = run.values(sequences)
        tolerances = self._tolerance(exact=True), self._tolerance(exact=not recipe.rounded), self._coarse(recipe)
        layers = self.options.layers
        return PassSearch(run, source_values, stages, sequences, tolerances, WeightCache(), self.progress, layers)

    def _first_pass(self, search: PassSearch, a: str, b: str, sequences: Sequence[torch.Tensor]) -> BisectReport | None:
        first = search.first()
        if first is None:
            return None
        name = None if first.stage.name == CAPTURE else first.stage.name
        divergence = describe_divergence(first.stage.label, name, first.after, first.comparison, first.given)
        self.used = first.after.used
        return self._report(a, b, sequences, search, first.comparison, divergence)

    def _report(
        self,
        a: str,
        b: str,
        sequences: Sequence[torch.Tensor],
        search: PassSearch | None,
        comparison: Comparison | None,
        divergence: FirstDivergence | None,
    ) -> BisectReport:
        """Returns the report.

        Args:
            a, b: the names of the two runs.
            sequences: the token ids of each sequence, [S].
            search: the comparison of the passes; None if no passes were compared.
            comparison: the comparison with the first difference, or the last one; None if only passes were compared.
            divergence: the first difference; None without one.
        """
        compared = [one for one in (comparison, search) if one is not None]
        errors = [one.largest_error for one in compared if one.largest_error is not None]
        error, name = max(errors, default=(None, None)) if divergence is None else (None, None)
        least_sensitive = dict(search.least_sensitive) if search else {}
        if comparison and comparison.least_sensitive and not (divergence and divergence.pass_name):
            least_sensitive["steps of the bundle" if self.tensors else "modules"] = comparison.least_sensitive
        layers = self.options.layers
        used = {key: mask for key, mask in self.used.items() if in_layers(key[0], layers)}
        return BisectReport(
            a=a,
            b=b,
            sequences=[len(s) for s in sequences],
            layers=None if layers is None else sorted(layers),
            values_compared=max((one.values_compared for one in compared), default=0),
            tolerance=self._tolerance(exact=True).error,
            largest_error=error,
            largest_error_at=None if name is None else str(name),
            first_divergence=divergence,
            tensors=self.tensors,
            not_covered=not_covered(used),
            smallest_factors=[
                SmallestFactor(kind, factor, str(name)) for kind, (factor, name) in least_sensitive.items()
            ],
            notes=self.notes,
            seconds=round(time.perf_counter() - self.start, 3),
        )


def _first_target(bundle: Bundle) -> str:
    """Returns the bundle's first target with a lowered program. Raises ComparisonError if there is none."""
    if not bundle.programs:
        raise ComparisonError(
            f"{bundle.path}: none of its targets has a program that can be watched",
            hint="Export it for the target cpu.",
        )
    return next(iter(bundle.programs))
