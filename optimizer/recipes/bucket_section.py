"""[buckets] of a recipe: the fixed sizes of a bundle's steps, or the data for choosing them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from enginewright.passes.formats.section import Section

Size = Annotated[int, Field(ge=1, le=1 << 20, strict=True)]

SOURCES = ("histogram", "trace", "default")
"""The keys that name a source of lengths."""

FILE_FIELDS = ("histogram", "trace", "batches")


class BucketsSection(Section):
    """Fixed sizes of steps, either listed or chosen for the least padding.

    Attributes:
        tokens: sizes of prompts.
        batch: sizes of decode steps in requests; if empty, these run in the buckets of prompts.
        histogram, trace, default: one of them instead of sizes: the lengths to choose sizes for. The file is relative
            to the recipe's.
        most: maximum number of chosen buckets, of prompts and decode steps together.
        batches, multiple, chunk: as for ``optimize buckets``.
        max_batch: as there; also the maximum requests of a step if ``batch`` is empty.
    """

    tokens: tuple[Size, ...] = ()
    batch: tuple[Size, ...] = ()
    histogram: str | None = Field(default=None, min_length=1)
    trace: str | None = Field(default=None, min_length=1)
    default: str | None = Field(default=None, min_length=1)
    batches: str | None = Field(default=None, min_length=1)
    most: int | None = Field(default=None, ge=1, le=256, strict=True)
    multiple: Size = 8
    max_batch: Size = 64
    chunk: Size | None = None

    @field_validator("tokens", "batch")
    @classmethod
    def _rising(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) < len(value):
            raise ValueError("a size is listed twice")
        return tuple(sorted(value))

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        sources = [name for name in SOURCES if getattr(self, name) is not None]
        if len(sources) > 1:
            raise ValueError(f"[buckets] has {' and '.join(sources)}: one of them says what lengths there are")
        if sources and (self.tokens or self.batch):
            raise ValueError(f"[buckets] has sizes and {sources[0]}: either lists them or has them chosen")
        if sources and self.most is None:
            raise ValueError(f"[buckets] has {sources[0]}, and needs most: how many buckets there may be")
        if not sources and not self.tokens:
            raise ValueError(f"[buckets] needs tokens, a list of sizes, or one of {', '.join(SOURCES)} with most")
        if not sources and (self.most is not None or self.batches is not None or self.chunk is not None):
            raise ValueError("[buckets] lists its sizes: most, batches and chunk are for sizes that are chosen")
        if self.batch and self.tokens and self.batch[-1] > self.tokens[-1]:
            raise ValueError(
                f"the largest batch, {self.batch[-1]}, is beyond the largest of tokens, {self.tokens[-1]}: "
                "decodes share steps with prompts"
            )
        return self

    def beside(self, folder: Path) -> Self:
        """Returns the section with relative paths of files taken from ``folder``."""
        files = {name: getattr(self, name) for name in FILE_FIELDS}
        return self.model_copy(update={k: None if v is None else str(folder / v) for k, v in files.items()})
