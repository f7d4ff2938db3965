"""Prepares the reference that passes are measured against: tokens, and the source's logits on them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from enginewright.optimizer.capture import CapturedModel
from enginewright.optimizer.capture.model_source import AnySource, ModelSource
from enginewright.optimizer.measure.pooled_runner import PooledRunner
from enginewright.optimizer.measure.source_runner import KEEP_BYTES
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.passes.framework.fast_evaluation import WeightCache
from enginewright.runtime.shared.progress import Progress, ProgressEvent
from enginewright.runtime.text.tokenizer import Tokenizer

from .measure import SourceLogits
from .measure_passes import Advice, PassMeasurements
from .measuring_tokens import EXACT_LENGTH, LENGTH, measuring_tokens
from .verify import lossy_hint, max_kl_of


def measure_against(
    source: AnySource,
    captured: CapturedModel,
    recipe: Recipe,
    *,
    calibration: Sequence[torch.Tensor],
    started: float,
    progress: Progress,
    keep_bytes: int = KEEP_BYTES,
    recipe_from: str | Path | None = None,
) -> PassMeasurements:
    """Runs the source and the captured program on a few tokens; passes are measured on the same ones.

    Args:
        source: the model that was captured.
        captured: the captured program, before any pass.
        recipe: the recipe, whose budget limits the losses.
        calibration: token ids of some sequences, [S] each; () takes the package's text, or random tokens.
        started: the time at which the export began, by ``time.perf_counter``.
        progress: called with the stage "measure".
        keep_bytes: weights of at most this many bytes as float32 are read once. Larger models are measured in fewer
            places, and on fewer tokens.
        recipe_from: the name or the file of the recipe, for the command in an error's hint.

    Raises:
        SourceError, UnsupportedModelError: as for an export.
        VerificationError: the captured program is not the source's.
    """
    begin = time.perf_counter()
    info, files = captured.model_info, captured.tokenizer_files
    tokenizer = Tokenizer(files) if files is not None and files.tokenizer_json else None
    few = 4 * info.parameters > keep_bytes
    tokens = measuring_tokens(
        calibration, tokenizer, info, EXACT_LENGTH if recipe.exact else LENGTH // 2 if few else LENGTH
    )
    progress(ProgressEvent("measure", 0, 1, f"the source on {tokens.origin}"))
    cache = WeightCache(keep_bytes)
    folder = ModelSource.of(source).path
    if info.pooling is not None and folder is not None:
        runner = PooledRunner(folder, recipe.pooling, context_length=info.context_length, keep_bytes=keep_bytes)
        logits = SourceLogits.of_pooled(runner, tokens, cache)
    else:
        logits = SourceLogits.of(source, info.context_length, tokens, keep_bytes, cache, progress)
    return PassMeasurements(
        logits,
        captured.program,
        max_kl=max_kl_of(recipe),
        cache=cache,
        few=few,
        started=started,
        spent=time.perf_counter() - begin,
        advice=Advice(lossy_hint(recipe), _bisect(ModelSource.of(source), recipe_from)),
        progress=progress,
    )


def _bisect(source: ModelSource, recipe: str | Path | None) -> str:
    """Returns the command that bisects the passes; "" for model objects and adapters, which the command doesn't
    support.
    """
    if source.path is None or source.adapters:
        return ""
    words = ["optimize", "bisect", str(source.model), *(["--recipe", str(recipe)] if recipe is not None else [])]
    return " ".join(map(shlex.quote, words))
