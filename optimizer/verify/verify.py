"""Compares a complete bundle with the source from which it was exported, in every export."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from enginewright.optimizer.capture.model_source import AnySource, ModelSource
from enginewright.optimizer.measure.pooled_runner import PooledRunner
from enginewright.optimizer.measure.source_runner import KEEP_BYTES, SourceRunner
from enginewright.optimizer.measure.windows import DEFAULT_WINDOW
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.shared.export_records import Comparison, TextComparison, VerificationReport
from enginewright.optimizer.shared.resources import peak_rss_bytes
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.base import Executor
from enginewright.runtime.executors.open import context_of, make_executor, target_groups
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import VerificationError
from enginewright.runtime.shared.memory import return_freed_memory
from enginewright.runtime.shared.progress import Progress, ProgressEvent
from enginewright.runtime.text.tokenizer import Tokenizer

from .packed_run import blocks_for, plan_steps
from .random_tokens import compare_random_tokens, tolerance_of_target
from .text import compare_text, why_no_text
from .verify_pooled import compare_random_texts, compare_sentences

SEEDS = (20261120, 20261121, 20261122)
"""Seeds of the random tokens. A later seed is used only if the earlier ones show a difference; see `_exact`."""

DEFAULT_MAX_KL = 0.05
"""The default budget of a recipe that loses precision: the largest mean KL per token, in nats."""

RANDOM_FACTOR = 10.0
"""The factor by which a recipe may exceed its budget on random tokens. A text has to meet the budget itself.

No model has learned a continuation of random tokens. So the KL there is a few times that of a text (int8 of SmolLM2:
0.010 and 0.005), and users don't notice it. Random tokens reveal programs that run packed requests wrongly, which costs
more KL.
"""

EXACT_HINT = "The model is not computed as it should be: please report it, with the model's configuration."


def lossy_hint(recipe: Recipe) -> str:
    """Returns the hint for a recipe that loses too much precision."""
    storages = {f.storage for f in recipe.weights.formats}
    if recipe.auto is not None or not any(f.stored.group_sizes for f in recipe.weights.formats):
        less = "Take a recipe that loses less (see `optimize recipes`)"
    elif "int4" in storages and recipe.weights.method == "nearest":
        less = "Take --recipe int4-awq or int4-gptq, as small and closer to the source, or int8"
    elif "int4" in storages:
        less = "Take --recipe int8"
    else:
        less = "Take --recipe bf16"
    return f"{less}; or allow more with max_kl in [budget] of a recipe of your own."


def verify(
    bundle: Bundle,
    source: AnySource,
    recipe: Recipe,
    target: str,
    progress: Progress,
    keep_bytes: int = KEEP_BYTES,
    placement: Placement = Placement(),
    *,
    time_source: bool = False,
) -> VerificationReport:
    """Compares a target of a bundle, run as a user's would be, with the source as transformers runs it.

    First on random tokens: two sequences, packed, with some decode steps. An exact recipe must be within rounding on
    them. A recipe that loses precision is judged by the package's text, if the model has a tokenizer and room for it:
    it must be within its KL budget there, and within RANDOM_FACTOR times that on random tokens; else within the budget
    on these.

    ``placement``: the devices and threads on which the target runs, by default those of a user. ``time_source``: True
    also times the source.

    Raises:
        VerificationError: they differ by more; says by how much.
        SourceError, UnsupportedModelError, BundleError, CapacityError: as their names say.
    """
    start = time.perf_counter()
    progress(ProgressEvent("verify", 0, 1, "reading the source"))
    # The context is that of the target's slots, which may be shorter than the model's.
    info = replace(bundle.model, context_length=context_of(bundle, None, target))
    return_freed_memory()
    folder = ModelSource.of(source).path
    runner: SourceRunner | PooledRunner
    if info.pooling is not None and folder is not None:
        context = bundle.model.context_length
        runner = PooledRunner(folder, recipe.pooling, context_length=context, keep_bytes=keep_bytes)
    else:
        runner = SourceRunner(source, context_length=bundle.model.context_length, keep_bytes=keep_bytes)
    files = bundle.tokenizer_files()
    tokenizer = Tokenizer(files) if files.tokenizer_json else None
    max_kl = max_kl_of(recipe)
    if max_kl is None and placement.variant in ("f16", "bf16"):
        max_kl = DEFAULT_MAX_KL
    omitted = "the recipe is exact" if max_kl is None else why_no_text(tokenizer, info)
    executor = _open(bundle, target, info, placement, with_text=omitted is None)
    with closing(executor):
        progress(ProgressEvent("verify", 0, 1, f"{target}: random tokens"))
        tolerance: float | None = None
        text: TextComparison | None = None
        if max_kl is None:
            seed, random, tolerance = _exact(
                lambda seed: _random(runner, executor, info, seed),
                tolerance_of_target(bundle, target),
                target,
            )
        else:
            seed, random = SEEDS[0], _random(runner, executor, info, SEEDS[0])
            most = max_kl if omitted is not None else RANDOM_FACTOR * max_kl
            _check_kl(random, most, recipe, target, "random tokens")
        if omitted is None and tokenizer is not None and max_kl is not None:
            return_freed_memory()
            if isinstance(runner, PooledRunner):
                text = compare_sentences(runner, executor, tokenizer, info)
            else:
                text = compare_text(runner, executor, tokenizer, info, progress, f"{target}: text")
            _check_kl(text, max_kl, recipe, target, "the text")
    speed = None
    if time_source and isinstance(runner, SourceRunner):
        speed = runner.speed(bundle.model.context_length)
    progress(ProgressEvent("verify", 1, 1, target))
    return VerificationReport(
        target=target if placement.variant is None else f"{target} ({placement.variant})",
        exact=max_kl is None,
        seed=seed,
        random_tokens=random,
        tolerance=tolerance,
        max_kl=max_kl,
        text=text,
        text_omitted=omitted,
        seconds=round(time.perf_counter() - start, 3),
        peak_rss_bytes=peak_rss_bytes(),
        source_speed=speed,
    )


def _random(runner: SourceRunner | PooledRunner, executor: Executor, info: ModelInfo, seed: int) -> Comparison:
    if isinstance(runner, PooledRunner):
        return compare_random_texts(runner, executor, info, seed)
    return compare_random_tokens(runner, executor, info, seed)


def max_kl_of(recipe: Recipe) -> float | None:
    """Returns the mean KL in nats per token that the recipe may cost; None if nothing but rounding may differ."""
    return None if recipe.exact else recipe.budget.max_kl or DEFAULT_MAX_KL


def _open(bundle: Bundle, target: str, info: ModelInfo, placement: Placement, *, with_text: bool) -> Executor:
    """Opens the executor that users get, with KV blocks for the compared tokens and no more."""
    text = min(DEFAULT_WINDOW, info.context_length) if with_text else 0
    plan = plan_steps(info.context_length)
    context = max(*plan.lengths, text)  # of slots, where they take the place of blocks
    groups = target_groups(bundle, target, context, placement)
    blocks = {g.name: max(blocks_for(plan, g.block_size), -(-text // g.block_size)) for g in groups}
    return make_executor(bundle, target, blocks, context, placement)


def _exact(
    compare: Callable[[int], Comparison], relative_tolerance: float, target: str
) -> tuple[int, Comparison, float]:
    """Compares on random tokens of each of SEEDS, until only rounding differs. Returns (seed, comparison, tolerance).

    Args:
        compare: compares on the tokens of a seed.
        relative_tolerance: the largest difference that rounding explains, as a share of the largest logit.
        target: the target, for the error.

    Raises VerificationError if all seeds show a larger difference.
    """
    worst: tuple[Comparison, float] | None = None
    for seed in SEEDS:
        result = compare(seed)
        tolerance = relative_tolerance * result.largest_logit
        if result.max_logit_error <= tolerance:
            return seed, result, tolerance
        worst = worst or (result, tolerance)
    assert worst is not None
    result, tolerance = worst
    raise VerificationError(
        f"target {target}: the exported program differs from its source: on random tokens a logit is off by "
        f"{result.max_logit_error:.3g}, where rounding explains {tolerance:.3g} (logits reach "
        f"{result.largest_logit:.3g}, KL {result.kl_mean:.3g} on average, top-1 agreement {result.top1_agreement:.1%})",
        hint=EXACT_HINT,
    )


def _check_kl(found: Comparison, most: float, recipe: Recipe, target: str, what: str) -> None:
    if found.kl_mean > most:
        allowed = max_kl_of(recipe) or DEFAULT_MAX_KL
        limit = f"the recipe's max_kl is {allowed:.3g}"
        if most != allowed:
            limit += f", of which {RANDOM_FACTOR:g} times as much is allowed there"
        raise VerificationError(
            f"target {target}: the exported program is too far from its source: {found.distance} on "
            f"{what}, and {limit} (top-1 agreement {found.top1_agreement:.1%}, a logit is "
            f"off by {found.max_logit_error:.3g} at most)",
            hint=lossy_hint(recipe),
        )
