"""The base class of a recipe's tables, for those that an export reads and those that a pass reads."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of a recipe. It is frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
