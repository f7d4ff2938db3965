"""The rules of a table of a recipe, whether an export reads it or the pass next to which it is defined."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of a recipe: frozen, and a key that it doesn't know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
