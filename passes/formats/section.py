"""What a table of a recipe is, whoever takes it: an export, or the pass beside which it is defined."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of a recipe: frozen, and a key that it doesn't know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
