"""Compares a bundle with the source that the user says it was exported from."""

from __future__ import annotations

from pathlib import Path

from enginewright.optimizer.capture import build_from_source
from enginewright.optimizer.capture.build_pooled import build_pooled_source, find_pooled, pooled_info
from enginewright.optimizer.capture.model_info import model_info
from enginewright.optimizer.capture.model_source import ModelSource
from enginewright.optimizer.evaluate.source_model import source_tokenizer_files
from enginewright.optimizer.recipes.stored import recipe_of
from enginewright.optimizer.shared.export_records import VerificationReport
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.shared.contracts import ModelInfo
from enginewright.runtime.shared.errors import SourceError, VerificationError
from enginewright.runtime.shared.progress import Progress
from enginewright.runtime.text.tokenizer import Tokenizer

from .text import evaluation_text
from .verify import verify

_HINT = "Pass the model that the bundle was exported from; the bundle's manifest has its name."
_ANOTHER_CHECKPOINT = (
    "{source} may be another checkpoint of the same shape: the bundle was made from {name}. "
    "If it is that very model, `optimize bisect {source} {bundle}` finds where they first differ."
)


def compare_bundle(
    bundle: Bundle, source: ModelSource, target: str, progress: Progress, placement: Placement = Placement()
) -> VerificationReport:
    """Compares a bundle with its source as its export did, within the budget of the recipe in the bundle's manifest.

    Args:
        bundle: the bundle.
        source: the model that it was exported from.
        target: the bundle's target to run.
        progress: called with each stage.
        placement: the resources that the target runs on.

    Raises:
        SourceError: the source is missing, damaged, another model, or has another tokenizer.
        BundleError: this version can't read the manifest's recipe.
        VerificationError: the logits differ by more than the recipe allows.
    """
    check_source(bundle, source)
    path = source.path
    try:
        return verify(bundle, source, recipe_of(bundle), target, progress, placement=placement)
    except VerificationError as e:
        name = bundle.manifest.source.name
        hint = _ANOTHER_CHECKPOINT.format(source=path, name=name, bundle=bundle.path)
        raise VerificationError(e.message, hint=hint) from e


def check_source(bundle: Bundle, source: ModelSource) -> None:
    """Raises SourceError if the model's shape or tokenizer shows that a bundle wasn't exported from it.

    Other weights of the same shape aren't noticed here; the comparison of logits finds them.
    """
    path = source.path
    if path is None or not path.exists():
        raise SourceError(f"source: {source.model} doesn't exist", hint="Pass a Hugging Face directory or a GGUF file.")
    expected, info = bundle.model, _info(bundle, source, path)
    for what in ("architecture", "vocab_size", "parameters"):
        ours, theirs = getattr(expected, what), getattr(info, what)
        if ours != theirs:
            raise SourceError(
                f"source: {path} is another model than {bundle.path} was made from: its {what} is {_shown(theirs)}, "
                f"the bundle's {_shown(ours)}",
                hint=_HINT,
            )
    ours, theirs = bundle.tokenizer_files(), source_tokenizer_files(path)
    if not ours.tokenizer_json or theirs is None or not theirs.tokenizer_json:
        return
    first, second = (Tokenizer(files).encode(evaluation_text()) for files in (ours, theirs))
    if first != second:
        at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        raise SourceError(
            f"source: {path} has another tokenizer than {bundle.path}: they make different tokens of a text, from "
            f"its token {at} on",
            hint=_HINT,
        )


def _info(bundle: Bundle, source: ModelSource, path: Path) -> ModelInfo:
    """Returns the source's description, the same as in a bundle of it. Raises the errors of an export."""
    name, context = bundle.model.name, bundle.model.context_length
    if bundle.model.pooling is not None and (pooled := find_pooled(path, recipe_of(bundle).pooling)):
        return pooled_info(build_pooled_source(*pooled)[0], pooled[0], name, context)
    return model_info(build_from_source(source)[0], name, context, {}, None)


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
