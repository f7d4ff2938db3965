"""``recover``: trains the program that a recipe makes of a model, so that its predictions are the model's."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from enginewright.optimizer.calibration import tokens_of_recipe
from enginewright.optimizer.capture import CapturedModel, capture
from enginewright.optimizer.capture.find_source import find_source
from enginewright.optimizer.recipes.recipe import Recipe, load_recipe, recipe_file
from enginewright.optimizer.search.compose import Searching, search_shapes
from enginewright.optimizer.shared.resources import peak_rss_bytes
from enginewright.passes.formats.rounding import ROUNDINGS
from enginewright.runtime.shared.errors import RecipeError, RequestError
from enginewright.runtime.shared.memory import free_memory
from enginewright.runtime.shared.progress import Progress, ProgressEvent, silent

from .distillation import Teacher
from .finished import FinishedRecovery, entries_of, fingerprint
from .folder import FORMAT, Description, RecoveryFolder
from .memory import TrainingMemory, check_memory
from .options import RecoverOptions, RecoveryReport
from .plot import loss_page
from .prepare import Prepared, prepare
from .sequences import Sequences, read_or_sample
from .training import Training

_KEEP_ALL = 1 << 62
"""The value of ``keep_bytes`` that keeps the whole source in memory. It runs in every step, and was counted before."""


def recover(
    source: str | Path | PreTrainedModel,
    output: str | Path,
    *,
    recipe: str | Path | Recipe,
    text: str | Path | None = None,
    options: RecoverOptions | None = None,
    calibration: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
) -> RecoveryReport:
    """Makes a smaller model from a source by a recipe, and trains it to predict as the source does.

    ``export(source, bundle, recovered=output)`` then writes a bundle with the trained weights. Training runs the same
    program as the bundle, with the same rounding. The loss is the KL divergence of the next token's distribution from
    the source's.

    Args:
        source: a Hugging Face directory, a GGUF file, a Hub id, or a transformers model, which isn't changed.
        output: a folder for the weights, checkpoints and figures.
        recipe: a built-in recipe's name, a TOML file, or a Recipe; it must change the model.
        text: a file of text or JSONL to train on; without it, text is sampled from the source.
        options: the settings of training.
        calibration: as for ``export``.
        resume: True continues from the newest checkpoint in ``output``. With the same options the result has the same
            bits as a training without the interruption.
        overwrite: True replaces an existing recovery.
        tokenizer: the tokenizer if ``source`` is a transformers model.
        progress: a function that is called during the work.

    Raises:
        SourceError, UnsupportedModelError, RecipeError, PassError: as for ``export``.
        RequestError: an option is out of range, the text is invalid or too small, or ``output`` exists.
        CapacityError: there is too little memory or disk space; the message has the needed size.
        VerificationError: the loss has diverged.
    """
    start, on_progress = time.perf_counter(), progress or silent
    settings = options or RecoverOptions()
    settings.check()
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    requested = chosen
    check_recipe(chosen)
    folder = RecoveryFolder(output)
    if not resume:
        named = {"the recipe": recipe_file(recipe), "the text": text, "the calibration file": calibration}
        source_path = None if isinstance(source, PreTrainedModel) else source
        folder.refuse_if_there(overwrite, {"the source": source_path, **named})
    with _threads(settings.threads), tempfile.TemporaryDirectory() as scratch:
        if not isinstance(source, torch.nn.Module):
            source = find_source(source, progress=on_progress)
        on_progress(ProgressEvent("capture", 0, 1, str(getattr(source, "name_or_path", source))))
        captured = capture(source, tokenizer=tokenizer, context_length=chosen.context_length)
        on_progress(ProgressEvent("capture", 1, 1, captured.model_info.architecture))
        if resume:
            old = _to_resume(folder, captured, requested, settings)
            chosen = old.recipe
            sequences, looked_at = folder.tokens(old.origin)
        else:
            sequences = read_or_sample(source, captured, text, settings, on_progress, _KEEP_ALL)
            looked_at = tokens_of_recipe(source, captured, chosen, (), calibration, on_progress)
            chosen = search_shapes(chosen, Searching(captured, looked_at, Path(scratch), None, on_progress)).recipe
        prepared = prepare(captured, chosen, looked_at, scratch=Path(scratch), progress=on_progress)
        description = Description(
            format=FORMAT,
            source=fingerprint(captured),
            asked=requested,
            recipe=chosen,
            options=settings.what_counts(),
            origin=sequences.origin,
            weights=entries_of(prepared.module.program),
        )
        _check_memory(prepared, captured, sequences, settings)
        taught_by = source if isinstance(source, PreTrainedModel) else Path(source)
        teacher = Teacher(taught_by, captured.model_info.context_length, _KEEP_ALL)
        training = Training(prepared.module, teacher, sequences, settings)
        resumed_at: int | None = None
        if resume:
            checkpoint = folder.newest()
            if checkpoint is not None:
                training.take_up(checkpoint)
                resumed_at = checkpoint.step
        else:
            folder.begin(description, sequences, looked_at, overwrite=overwrite)
        training.run(on_progress, folder.checkpoint)
    report = RecoveryReport(
        path=str(output),
        recipe=chosen.name,
        origin=sequences.origin,
        steps=training.step,
        parameters=sum(p.numel() for p in prepared.module.parameters()),
        tokens=sequences.tokens,
        held_out_tokens=sequences.held_out_tokens,
        losses=training.losses,
        measured=training.measured,
        tokens_per_second=round(training.tokens_per_second, 1),
        seconds=round(time.perf_counter() - start, 3),
        peak_rss_bytes=peak_rss_bytes(),
        resumed_at=resumed_at,
    )
    finished = description.model_copy(update={"report": report.to_json()})
    folder.finish(prepared.module.named_weights(), finished, loss_page(report))
    return report


def check_recipe(recipe: Recipe) -> None:
    """Raises RecipeError for a recipe that changes nothing, or that rounds in a way that training can't."""
    if recipe.auto is not None:  # training is in floats then, and formats are searched for by the export
        if recipe.prune is None and recipe.attention is None:
            raise RecipeError(
                f"recipe {recipe.name}: [auto] searches for formats, and training needs to know them",
                hint="Export once, and recover with the recipe that was found: BUNDLE/report/recipe.toml.",
            )
        return
    if recipe.weights.method != "nearest":
        raise RecipeError(
            f"recipe {recipe.name}: weights.method {recipe.weights.method!r} chooses integers by other means than "
            "rounding, and would choose others than those that were trained",
            hint='Take method = "nearest" (the recipe int4, say): training finds what rounds well. Or recover without '
            "[weights], and export what was trained with them.",
        )
    for storage in (f.storage for f in recipe.weights.formats if not ROUNDINGS[f.storage].trained):
        raise RecipeError(
            f"recipe {recipe.name}: training can't round weights to {storage} yet",
            hint=f"Recover without [weights], and export what was trained in {storage}.",
        )
    if recipe.weights.sparsify == "sparsegpt":
        raise RecipeError(
            f"recipe {recipe.name}: weights.sparsify 'sparsegpt' changes what it keeps, which training does better",
            hint='Take sparsify = "wanda": what it leaves out stays out, and training moves the rest.',
        )
    if recipe.weights.keep_blocks:
        raise RecipeError(
            f"recipe {recipe.name}: weights.keep_blocks keeps the file's integers, and training changes them",
            hint="Leave keep_blocks out.",
        )
    if recipe.exact:
        raise RecipeError(
            f"recipe {recipe.name}: it changes nothing that could be recovered",
            hint="Take one that loses something: other formats, fewer heads, channels or layers.",
        )


def _to_resume(folder: RecoveryFolder, captured: CapturedModel, recipe: Recipe, options: RecoverOptions) -> Description:
    """Returns the description of the recovery to resume. Raises an error if it is finished, or of another model, recipe
    or options.
    """
    old = folder.description()
    FinishedRecovery(folder, old).check_source(captured)
    if old.asked != recipe:
        raise RecipeError(
            f"recipe {recipe.name}: {folder.path} was begun with another one ({old.asked.name})",
            hint="Resume with the same recipe, or begin anew with --force.",
        )
    now = options.what_counts()
    for key, value in old.options.items():
        if now.get(key) != value:
            raise RequestError(
                f"{key}: {folder.path} was begun with {value!r}, and this is {now.get(key)!r}",
                hint="Resume with the same options, or begin anew with --force.",
            )
    if old.report is not None:
        raise RequestError(f"{folder.path} is finished: there is nothing to resume", hint="Export it.")
    return old


def _check_memory(prepared: Prepared, captured: CapturedModel, sequences: Sequences, options: RecoverOptions) -> None:
    longest = max(len(s) for s in sequences.training)
    tokens = max(longest, sum(len(s) for s in sequences.batch(0, options)) // options.accumulate)
    trained = sum(p.numel() for p in prepared.module.parameters())
    needed = TrainingMemory.of(prepared.module.program, trained, captured.model_info.parameters, tokens, longest)
    # The weights themselves are in memory already.
    check_memory(replace(needed, weights=needed.weights - 4 * trained), free_memory())


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
