"""The buckets of an export, chosen for the model's context."""

from __future__ import annotations

from dataclasses import dataclass

from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.runtime.bundle.buckets import BucketPlan
from enginewright.runtime.shared.errors import RecipeError

from .choose import BucketSource, choose
from .report import SizesReport


@dataclass(frozen=True)
class ExportBuckets:
    """The buckets of an export, from the recipe's section [buckets].

    Attributes:
        section: the section with sizes alone, for the manifest: it is complete without the files that they came from.
        plan: the same sizes, in the form that the runtime takes.
        sizes: the report of the choice; None if the recipe lists the sizes.
    """

    section: BucketsSection
    plan: BucketPlan
    sizes: SizesReport | None


def check_files(section: BucketsSection) -> None:
    """Raises the errors that `buckets_of` would raise for the files that a recipe names, before the model is read."""
    if not section.tokens:
        choose(_source(section))


def _source(section: BucketsSection) -> BucketSource:
    return BucketSource(**section.model_dump(exclude={"tokens", "batch"}))


def buckets_of(section: BucketsSection, context_length: int) -> ExportBuckets:
    """Returns the buckets for a model with a context of ``context_length`` tokens.

    Raises:
        RecipeError: a size is beyond the context.
        RequestError: a file is invalid; see `choose`.
    """
    report: SizesReport | None = None
    tokens, batch = section.tokens, section.batch
    if not tokens:
        chosen = choose(_source(section), context_length)
        tokens, batch, report = chosen.tokens, chosen.batch, chosen.report
    if tokens[-1] > context_length:
        raise RecipeError(
            f"buckets.tokens: a bucket of {tokens[-1]:,} tokens is beyond the context of {context_length:,}",
            hint="No step has more tokens than a request may: leave it out, or export for a longer context.",
        )
    sizes = BucketsSection(tokens=tokens, batch=batch, max_batch=section.max_batch)
    return ExportBuckets(sizes, BucketPlan.from_sizes(tokens, batch, section.max_batch), report)
