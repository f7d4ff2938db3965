"""``bisect``: the first pass, layer, call and tensor at which two ways of computing a model part."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from enginewright.optimizer.capture import CapturedModel, capture
from enginewright.optimizer.capture.find_source import describe_source, find_source
from enginewright.optimizer.recipes.of_bundle import recipe_of
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe
from enginewright.optimizer.shared.progress import Progress, ProgressEvent, silent
from enginewright.passes.framework.fast_evaluation import WeightCache
from enginewright.passes.lowering.lower_program import lower_program
from enginewright.plugins.shared.contracts import CacheGroup, ModelInfo
from enginewright.plugins.shared.errors import ComparisonError
from enginewright.runtime.bundle.manifest import MANIFEST_PATH
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.text.tokenizer import Tokenizer

from .bundle_side import BundleSide
from .explain_program import program_reasons
from .judge import GAIN, ROUNDING, SAME_GAIN, SAME_INTEGERS, Judge, coarsest
from .parting import describe_parting
from .points import Used, Values, in_layers, not_covered
from .program_side import ProgramSide
from .remake import CAPTURE, Stage, check_calibration, recovery_of, remake
from .report import BisectReport, Parting, SmallestFactor, StoredTensors
from .same_model import check_layers, check_same_cache, check_same_model
from .search import Comparison, PassSearch, compare
from .sides import Side
from .source_side import SourceSide
from .stored_tensors import compare_bundles, compare_with_export, other_versions
from .tokens import choose_tokens

EMISSION = "emission, stored weights or kernels"


@dataclass(frozen=True)
class Given:
    """One of the two things to compare.

    Attributes:
        what: a bundle's folder, a Hugging Face directory, a GGUF file, a Hub id, or a transformers model.
        target, isa: of a bundle: which of its targets, and the instruction set; None takes the first, and the best.
    """

    what: Path | PreTrainedModel
    target: str | None = None
    isa: str | None = None

    @property
    def is_bundle(self) -> bool:
        return isinstance(self.what, Path) and (self.what / MANIFEST_PATH).is_file()

    @property
    def name(self) -> str:
        return describe_source(self.what).name if isinstance(self.what, Path) else type(self.what).__name__

    def found(self, progress: Progress) -> Given:
        """The same with a path that is there: of a Hub id, that of what was fetched."""
        return replace(self, what=find_source(self.what, progress=progress)) if isinstance(self.what, Path) else self

    def is_same(self, other: Given) -> bool:
        """Whether it is the same model or bundle, whatever target is meant."""
        if isinstance(self.what, Path) and isinstance(other.what, Path):
            return self.what.resolve() == other.what.resolve()
        return self.what is other.what


@dataclass(frozen=True)
class Options:
    """How to compare.

    Attributes:
        tolerance: of relative errors, in place of what is allowed by default.
        recipe: of a source that is compared with itself through the passes: a name or a file; None takes f32.
        calibration: a file, for a recipe that needs one.
        tokens, texts: sequences to compare on; none of both: random ones by ``seed``.
        recovered: the folder of ``recover``, for a bundle of what was trained.
        layers: numbers of the layers to compare; None: all, and what is outside of layers.
    """

    tolerance: float | None = None
    recipe: str | None = None
    calibration: Path | None = None
    tokens: Sequence[Sequence[int]] = ()
    texts: Sequence[str] = ()
    seed: int = 0
    recovered: Path | None = None
    layers: Collection[int] | None = None


def bisect(a: Given, b: Given, options: Options = Options(), progress: Progress | None = None) -> BisectReport:
    """Finds where two sides part.

    A source and a bundle: the source is captured again and goes through the passes of the bundle's recipe; each stage
    is compared with the one before, and the bundle with the last. A source and itself: through the passes of
    ``options.recipe``. Two bundles, two targets or instruction sets of one, two sources: directly.

    Every side goes on with the first one's values at the points that both have, so that what is found is a call's own
    doing, and not the consequence of an earlier one.

    Every stored tensor of a bundle is compared too, bit for bit: with the repeated export's, or the other bundle's.

    Raises:
        RequestError: a layer is asked for that the model doesn't have.
        ComparisonError: the two are different models, have no point in common, or the calibration can't be repeated.
        SourceError, UnsupportedModelError, BundleError, RecipeError, PassError, CapacityError: as for an export and for
            opening a bundle.
    """
    a, b = (given.found(progress or silent) for given in (a, b))
    _check_meaning(a, b, options or Options())
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
        trained = recovery_of(bundle, self.options.recovered)
        if trained is None:  # else it has the tokens
            check_calibration(bundle, recipe, self.options.calibration)
        target = given.target or _first_target(bundle)
        bundle.program(target)  # raises if there is none
        name = f"{given.name}, target {target}"
        captured = self._capture(source, bundle.model.context_length)
        if trained is not None:
            trained.check_source(captured)
        check_same_model(captured.model_info, source.name, bundle.model, given.name)
        stages = remake(
            source.what,
            captured,
            recipe,
            target,
            calibration=self.options.calibration,
            recovered=trained,
            scratch=self.scratch,
            progress=self.progress,
        )
        last = stages[-1].program
        check_same_cache(last.cache_groups, source.name, _groups(bundle, target), given.name)
        sequences = self._tokens(bundle.model, bundle.tokenizer_files)
        side = self._source(source, bundle.model.context_length)
        lowering = lower_program(last)
        self.tensors = compare_with_export(lowering, bundle, target, self.options.layers, self.progress)
        if self.tensors.differing:
            self.notes += other_versions(bundle)
        search = self._search(side, stages, sequences, recipe)
        if (found := self._first_pass(search, source.name, name, sequences)) is not None:
            return found
        self.progress(ProgressEvent("compare", 0, 0, name))
        made = search.program(len(stages) - 1)
        emitted = BundleSide(bundle, name, target=target, isa=given.isa, leaves=side.leaves, scaling=made.scaling)
        shared = search.common(len(stages) - 1, emitted)
        values = emitted.run(sequences, shared)
        judge = self._judge(exact=not recipe.rounded)
        expected = search.values(len(stages) - 1, shared)
        compared = compare(made, emitted, expected, values, judge, self.options.layers)
        self.used = emitted.used
        parting = describe_parting(EMISSION, None, made, emitted, expected, values, compared, judge, shared)
        if parting is not None:
            calls = [call for call in emitted.calls if emitted.describe(call) in parting.calls]
            more = program_reasons(lowering.program, emitted.program, calls)
            parting = replace(parting, reasons=[*parting.reasons, *more])
        return self._report(source.name, f"{name} ({emitted.isa})", sequences, search, compared, parting)

    def passes(self, source: Given) -> BisectReport:
        recipe = load_recipe(self.options.recipe or "f32")
        if recipe.searched:
            raise ComparisonError(
                f"recipe {recipe.name} searches for formats or shapes, which isn't a pass",
                hint="Export with it, and compare the bundle, whose recipe has what was chosen.",
            )
        captured = self._capture(source, recipe.context_length)
        info = captured.model_info
        stages = remake(
            source.what,
            captured,
            recipe,
            source.target or recipe.targets[0],
            calibration=self.options.calibration,
            scratch=self.scratch,
            progress=self.progress,
        )
        sequences = self._tokens(info, lambda: captured.tokenizer_files)
        side = self._source(source, info.context_length)
        search = self._search(side, stages, sequences, recipe)
        name = f"{source.name} through the passes of recipe {recipe.name}"
        found = self._first_pass(search, source.name, name, sequences)
        self.used = search.program(len(stages) - 1).used
        return found or self._report(source.name, name, sequences, search, None, None)

    def two_bundles(self, a: Given, b: Given) -> BisectReport:
        assert isinstance(a.what, Path)
        assert isinstance(b.what, Path)
        bundles = [Bundle.open(a.what), Bundle.open(b.what)]
        first, second = bundles
        check_same_model(first.model, a.name, second.model, b.name)
        targets = [given.target or _first_target(bundle) for given, bundle in zip((a, b), bundles, strict=True)]
        sides = [
            BundleSide(bundle, f"{given.name}, target {target}", target=target, isa=given.isa)
            for given, bundle, target in zip((a, b), bundles, targets, strict=True)
        ]
        for one in sides:
            check_layers(self.options.layers, one.leaves)
        groups = [_groups(bundle, target) for bundle, target in zip(bundles, targets, strict=True)]
        check_same_cache(groups[0], a.name, groups[1], b.name)
        recipes = [recipe_of(bundle) for bundle in bundles]
        alike = recipes[0].weights == recipes[1].weights
        if not alike and "awq" in {recipe.weights.method for recipe in recipes}:
            raise ComparisonError(
                f"{a.name} and {b.name}: one has its channels scaled (awq), so their values can't be compared",
                hint="Compare each of them with the source.",
            )
        sequences = self._tokens(first.model, first.tokenizer_files)
        judge = self._judge(exact=not recipes[0].rounded)
        if not alike:
            judge = self._coarse(max(recipes, key=coarsest))
            self.notes.append("the two have other formats: what rounding may do is allowed")
        layers = self.options.layers
        self.tensors = compare_bundles(first, targets[0], second, targets[1], alike, layers, self.progress)
        of_a, of_b = self._each(sides, sequences)
        compared = compare(sides[0], sides[1], of_a, of_b, judge, layers)
        self.used = sides[1].used
        parting = describe_parting("", None, sides[0], sides[1], of_a, of_b, compared, judge, of_a)
        names = [f"{side.name} ({side.isa})" for side in sides]
        return self._report(names[0], names[1], sequences, None, compared, parting)

    def two_sources(self, a: Given, b: Given) -> BisectReport:
        captured = [self._capture(given, None) for given in (a, b)]
        infos = [c.model_info for c in captured]
        check_same_model(infos[0], a.name, infos[1], b.name)
        context = min(info.context_length for info in infos)
        sequences = self._tokens(infos[0], lambda: captured[0].tokenizer_files)
        sides = [self._source(given, context) for given in (a, b)]
        of_a, of_b = self._each(sides, sequences)
        judge = self._judge(exact=True)
        compared = compare(sides[0], sides[1], of_a, of_b, judge, self.options.layers)
        # Transformers' modules tell no calls: the program as captured has them, and tells what tokens use.
        made = ProgramSide(captured[1].program, b.name, leaves=sides[1].leaves)
        made.run(sequences, of_a)
        self.used = made.used
        parting = describe_parting("", None, sides[0], made, of_a, of_b, compared, judge, of_a)
        return self._report(a.name, b.name, sequences, None, compared, parting)

    # ---- how

    def _capture(self, source: Given, context_length: int | None) -> CapturedModel:
        self.progress(ProgressEvent("capture", 0, 1, source.name))
        captured = capture(source.what, context_length=context_length)
        self.progress(ProgressEvent("capture", 1, 1, captured.model_info.architecture))
        return captured

    def _source(self, source: Given, context_length: int) -> SourceSide:
        side = SourceSide(source.what, source.name, context_length=context_length)
        check_layers(self.options.layers, side.leaves)
        return side

    def _tokens(self, info: ModelInfo, read_files: Callable[[], TokenizerFiles | None]) -> list[torch.Tensor]:
        options = self.options
        files = read_files() if options.texts else None
        tokenizer = Tokenizer(files) if files is not None and files.tokenizer_json else None
        return choose_tokens(info, tokens=options.tokens, texts=options.texts, seed=options.seed, tokenizer=tokenizer)

    def _each(self, sides: Sequence[Side], sequences: Sequence[torch.Tensor]) -> tuple[Values, Values]:
        self.progress(ProgressEvent("compare", 0, 2, sides[0].name))
        first = sides[0].run(sequences)
        self.progress(ProgressEvent("compare", 1, 2, sides[1].name))
        second = sides[1].run(sequences, first)
        self.progress(ProgressEvent("compare", 2, 2, ""))
        return first, second

    def _judge(self, *, exact: bool) -> Judge:
        if exact or self.options.tolerance:
            return Judge(self.options.tolerance or ROUNDING)
        return Judge(SAME_INTEGERS, gain=SAME_GAIN)

    def _coarse(self, recipe: Recipe) -> Judge:
        return Judge(self.options.tolerance or coarsest(recipe), chance=True, gain=GAIN)

    def _search(
        self, side: SourceSide, stages: Sequence[Stage], sequences: Sequence[torch.Tensor], recipe: Recipe
    ) -> PassSearch:
        self.progress(ProgressEvent("compare", 0, 0, side.name))
        given = side.run(sequences)
        judges = self._judge(exact=True), self._judge(exact=not recipe.rounded), self._coarse(recipe)
        layers = self.options.layers
        return PassSearch(side, given, stages, sequences, judges, WeightCache(), self.progress, layers)

    def _first_pass(self, search: PassSearch, a: str, b: str, sequences: Sequence[torch.Tensor]) -> BisectReport | None:
        found = search.first()
        if found is None:
            return None
        parting = describe_parting(
            found.stage.label,
            None if found.stage.name == CAPTURE else found.stage.name,
            found.before,
            found.after,
            found.of_before,
            found.of_after,
            found.comparison,
            found.judge,
            found.given,
        )
        self.used = found.after.used
        return self._report(a, b, sequences, search, found.comparison, parting)

    def _report(
        self,
        a: str,
        b: str,
        sequences: Sequence[torch.Tensor],
        search: PassSearch | None,
        comparison: Comparison | None,
        parting: Parting | None,
    ) -> BisectReport:
        nearest = [x for x in (comparison and comparison.nearest, search and search.worst) if x]
        largest = max(nearest, default=None) if parting is None else None
        blind = dict(search.blindest) if search else {}
        if comparison and comparison.blindest and not (parting and parting.pass_name):
            blind["steps of the bundle" if self.tensors else "modules"] = comparison.blindest
        layers = self.options.layers
        used = {key: mask for key, mask in self.used.items() if in_layers(key[0], layers)}
        return BisectReport(
            a=a,
            b=b,
            sequences=[len(s) for s in sequences],
            layers=None if layers is None else sorted(layers),
            points=max(comparison.points if comparison else 0, search.points if search else 0),
            tolerance=self._judge(exact=True).tolerance,
            largest_error=None if largest is None else largest[0],
            largest_error_at=None if largest is None else str(largest[1]),
            parting=parting,
            tensors=self.tensors,
            not_covered=not_covered(used),
            smallest_factors=[SmallestFactor(kind, factor, str(point)) for kind, (factor, point) in blind.items()],
            notes=self.notes,
            seconds=round(time.perf_counter() - self.start, 3),
        )


def _check_meaning(a: Given, b: Given, options: Options) -> None:
    """Raises ComparisonError for what is asked of a side that can't have it, instead of leaving it out."""
    for given in (a, b):
        if not given.is_bundle and given.isa is not None:
            raise ComparisonError(
                f"{given.name} is a model, which transformers computes: it has no instruction set to choose",
                hint="Instruction sets are for bundles.",
            )
    if options.recipe is not None and (a.is_bundle or b.is_bundle or not a.is_same(b)):
        raise ComparisonError(
            f"a recipe is given ({options.recipe}), but {a.name} and {b.name} aren't a model and itself",
            hint="A bundle goes by the recipe that it was made by; leave it out.",
        )


def _first_target(bundle: Bundle) -> str:
    """A target that runs here."""
    if not bundle.programs:
        raise ComparisonError(
            f"{bundle.path}: none of its targets has a program that can be watched",
            hint="Export it for the target cpu.",
        )
    return next(iter(bundle.programs))


def _groups(bundle: Bundle, target: str) -> list[CacheGroup]:
    return [group.to_group() for group in bundle.program(target).cache_groups]
