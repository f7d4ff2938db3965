"""Runs the searches of a recipe, in the order of its passes: removed weights, key/value heads, then formats of weights,
and of caches, which have a budget of their own.

Each uses a part of one budget. ``max_kl`` in [prune] and in [attention] are their parts; formats get the rest of
[budget], because [auto] compares the changed model with the source. Removing weights pays only if formats don't save
more with the same KL, so both variants are tried, and the smaller result is used.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from enginewright.optimizer.capture import CapturedModel
from enginewright.optimizer.pipeline.pass_context import Recovered, pass_context
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.verify.held_out import held_out
from enginewright.passes.framework.base import PassContext
from enginewright.passes.ir.code_files import CodeFiles
from enginewright.runtime.shared.progress import Progress

from .format_seconds import Clock
from .formats import FormatSearch
from .kv_formats import KvFormatSearch
from .kv_heads import KvHeadSearch
from .pruning import PruningSearch
from .report import AutoReport, Candidate, KvFormatsReport, KvSearchReport, PruneReport
from .search import Found, NothingToChooseError, NothingWithinError, Report, Search, Task

FORMATS_ALONE, SHAPES_TOO = "formats alone", "less of the model, then formats"


@dataclass(frozen=True)
class Searching:
    """The inputs that all searches of an export, or a recovery, share.

    Attributes:
        captured: the model; its program isn't changed.
        sequences: calibration tokens, [S] each.
        scratch, memory_budget, code_files: see ``PassContext``.
        progress: called with the stages "prune", "heads", "auto" and "caches".
        recovered: trained weights; None without a recovery.
        targets: the targets of the export.
        clock: see ``Task``.
    """

    captured: CapturedModel
    sequences: Sequence[torch.Tensor]
    scratch: Path | None
    memory_budget: int | None
    progress: Progress
    recovered: Recovered | None = None
    targets: Sequence[str] = ()
    clock: Clock | None = None
    code_files: CodeFiles | None = None


@dataclass(frozen=True)
class Searched:
    """The results of all searches: a recipe with fixed choices in place of the searches, and a report of each
    search.
    """

    recipe: Recipe
    auto: AutoReport | None = None
    pruning: PruneReport | None = None
    heads: KvSearchReport | None = None
    caches: KvFormatsReport | None = None
    candidates: tuple[Candidate, ...] = ()

    @property
    def anything(self) -> bool:
        """True if the recipe has something to search for."""
        return any(r is not None for r in (self.auto, self.pruning, self.heads, self.caches))


def search(recipe: Recipe, given: Searching) -> Searched:
    """Runs all searches of a recipe, and returns their results.

    Raises:
        RequestError: there are too few sequences to measure and to check with.
        VerificationError: no choice meets the budget; the text has the nearest.
        RecipeError: there is nothing to choose.
    """
    return _search_caches(_search_shapes_and_weights(recipe, given), given)


def _search_shapes_and_weights(recipe: Recipe, given: Searching) -> Searched:
    if recipe.auto is None:
        return search_shapes(recipe, given)
    plain = without_searched_shapes(recipe)
    if plain == recipe:
        return _search_formats(search_shapes(recipe, given), given)
    return _smaller_of_two(recipe, plain, given)


def search_shapes(recipe: Recipe, given: Searching) -> Searched:
    """Searches for the weights to remove, then for key/value heads. A recipe without these searches is returned
    unchanged.

    Raises the errors of ``search``.
    """
    return _search_heads(_search_pruning(Searched(recipe), given), given)


def without_searched_shapes(recipe: Recipe) -> Recipe:
    """Returns the recipe without shapes that are searched for under a KL budget. Fixed numbers and cache sizes
    stay.
    """
    return _whole_heads(_unpruned(recipe))


def search_captured(
    kind: type[Search[Report]],
    captured: CapturedModel,
    recipe: Recipe,
    context: PassContext,
    progress: Progress,
    clock: Clock | None = None,
) -> Found[Report]:
    """Runs one search on the captured model.

    Every second calibration sequence is used for measuring units; the check uses the others, the package's text, and
    the random tokens of the bundle's verification, which applies the budget to them.

    Args:
        kind: the class of the search.
        captured: the model; its program isn't changed.
        recipe: has the budget; its earlier changes of the model's shape are fixed numbers.
        context: of the passes; its calibration is at least two sequences.
        progress: called with the search's stage.
        clock: see ``Task``.

    Raises:
        RequestError: there are too few sequences.
        VerificationError, RecipeError: as ``search``.
    """
    sequences, checks = held_out(captured, context.calibration, kind.section)
    scratch = None if context.scratch is None else context.scratch / kind.stage
    if scratch is not None:
        scratch.mkdir()
    try:
        info, context = captured.model_info, replace(context, scratch=scratch)
        inputs = captured.program, recipe, info.parameters, sequences, checks, context, progress, clock
        return kind(Task(*inputs, info.context_length)).run()
    finally:
        if scratch is not None:
            shutil.rmtree(scratch)


def _search(kind: type[Search[Report]], recipe: Recipe, given: Searching) -> Found[Report]:
    context = pass_context(
        recipe,
        frozenset(),
        given.sequences,
        scratch=given.scratch,
        code_files=given.code_files,
        progress=given.progress,
        memory_budget=given.memory_budget,
        recovered=given.recovered,
        targets=given.targets,
    )
    return search_captured(kind, given.captured, recipe, context, given.progress, given.clock)


def _search_pruning(found: Searched, given: Searching) -> Searched:
    if found.recipe.prune is None or found.recipe.prune.max_kl is None:
        return found
    pruned = _search(PruningSearch, found.recipe, given)
    return replace(found, recipe=pruned.recipe, pruning=pruned.report)


def _search_heads(found: Searched, given: Searching) -> Searched:
    if found.recipe.attention is None or not found.recipe.attention.searched:
        return found
    grouped = _search(KvHeadSearch, found.recipe, given)
    return replace(found, recipe=grouped.recipe, heads=grouped.report)


def _search_formats(found: Searched, given: Searching) -> Searched:
    chosen = _search(FormatSearch, found.recipe, given)
    return replace(found, recipe=chosen.recipe, auto=chosen.report)


def _search_caches(found: Searched, given: Searching) -> Searched:
    if not found.recipe.kv_cache.searched:
        return found
    chosen = _search(KvFormatSearch, found.recipe, given)
    return replace(found, recipe=chosen.recipe, caches=chosen.report)


def _unpruned(recipe: Recipe) -> Recipe:
    """Returns the recipe without the search of [prune]; layers listed there are still removed."""
    prune = recipe.prune
    if prune is None or prune.max_kl is None:
        return recipe
    named = {"channels": 0.0, "heads": 0.0, "layers": 0, "overrides": (), "max_kl": None}
    return recipe.model_copy(update={"prune": prune.model_copy(update=named) if prune.drop else None})


def _whole_heads(recipe: Recipe) -> Recipe:
    """Returns the recipe without the search of [attention], unless that has a required cache size."""
    attention = recipe.attention
    if attention is None or not attention.searched or attention.max_cache_bytes_per_token is not None:
        return recipe
    return recipe.model_copy(update={"attention": None})


def _smaller_of_two(recipe: Recipe, plain: Recipe, given: Searching) -> Searched:
    """Returns the smaller result of the searches with and without changes of shapes."""
    results: dict[str, Searched] = {}
    failed: dict[str, NothingWithinError] = {}
    for name, one, shapes in ((FORMATS_ALONE, plain, search_shapes), (SHAPES_TOO, recipe, _what_can_go)):
        try:
            results[name] = _search_formats(shapes(one, given), given)
        except NothingWithinError as e:
            failed[name] = e
    if not results:
        raise failed[FORMATS_ALONE]
    smallest = min(results, key=lambda name: _bytes(results[name]))
    candidates = [_candidate(name, searched, smallest) for name, searched in results.items()]
    candidates += [Candidate(name, None, 0.0, None, False, e.message) for name, e in failed.items()]
    return replace(results[smallest], candidates=tuple(candidates))


def _what_can_go(recipe: Recipe, given: Searching) -> Searched:
    """Searches for changes of shapes within their parts of the budget. Raises NothingWithinError if there are none."""
    result, reasons = Searched(recipe), list[str]()
    for look, without in ((_search_pruning, _unpruned), (_search_heads, _whole_heads)):
        try:
            result = look(result, given)
        except (NothingWithinError, NothingToChooseError) as e:
            left = without(result.recipe)
            if left == result.recipe:  # a cache that the recipe demands
                raise
            result, reasons = replace(result, recipe=left), [*reasons, e.message]
    if result.pruning is None and result.heads is None:
        raise NothingWithinError("; ".join(reasons))
    return result


def _bytes(found: Searched) -> int:
    assert found.auto is not None
    return found.auto.chosen.bytes


def _candidate(name: str, found: Searched, taken: str) -> Candidate:
    assert found.auto is not None
    return Candidate(name, _bytes(found), found.auto.shapes_kl, found.auto.chosen.measured_kl, name == taken)
