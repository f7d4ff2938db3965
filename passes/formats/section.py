"""The rules of a table of a recipe, for tables that an export reads and for those that a pass reads."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of a recipe. It is frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
